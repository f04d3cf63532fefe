"""Preparing an experiment from its configuration: data, clients, target, first model."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift import datasets, shifts
from fedshift.data import ClientData, Examples, Task, client_data
from fedshift.datasets import Dataset
from fedshift.errors import InputError
from fedshift.experiments.config.networks import BYTES
from fedshift.experiments.config.schema import PYTHON, Config, Data, Method, Network, ServerData
from fedshift.experiments.config.shift import Split
from fedshift.experiments.config.training_objects import gate_of
from fedshift.experiments.config.wording import in_file_words
from fedshift.experiments.task.client_tests import deal_to_clients
from fedshift.experiments.task.custom_source import task_of
from fedshift.experiments.task.extras import check_extras
from fedshift.experiments.task.feature_shift import check_images, dealing, noised
from fedshift.experiments.task.first_model import first_model
from fedshift.experiments.task.from_files import custom_of, prepare_source
from fedshift.experiments.task.natural import Dealt, natural
from fedshift.experiments.task.prepared import Indices, Look
from fedshift.experiments.task.prepared import Prepared as Prepared
from fedshift.experiments.task.server_rows import reserve
from fedshift.holdout import hold_out_by_label
from fedshift.seeds import numpy_generator
from fedshift.shifts.base import largest_multiple, largest_remainder
from fedshift.shifts.target import check_marginal
from fedshift.tasks.layout import scaled


def seen(x: Tensor, look: Look | None) -> Tensor:
    """Model inputs from stored images: changed by a client's look on [0, 1], then scaled."""
    return scaled(x) if look is None else look(x.float().div_(255.0)).sub(0.5).div_(0.5)


def prepare(config: Config) -> Prepared:
    """Load, split and resample as configured. Raises InputError or DataError; trains nothing."""
    _check_files(config.data, config.method)
    check_extras(config.data, config.model)
    custom = custom_of(config)
    if config.data.source is not None:
        return prepare_source(config, custom)
    seeds = config.seeds.resolved()
    dealt = _deal_data(config.data, config.shift, config.server, seeds.split)
    data, validation = dealt.data, dealt.validation
    check_images(config.shift, data)
    trains, holdouts = hold_out_by_label(
        data.train.y.numpy(), dealt.parts, config.data.validation, seeds.split
    )
    raw = as_bytes(config.data, config.model)
    task = _task(dealt, trains, holdouts, raw)
    augment = config.data.augment
    model = first_model(config.model, config.method, custom, task, seeds.init, augment=augment)
    kept_back = [*holdouts, *(rows for rows in (validation, dealt.server) if rows is not None)]
    kept_back += dealt.tests
    # The rows from which an oracle draws its clients: nothing is measured on them.
    pool = np.setdiff1d(np.arange(len(data.train.y)), np.concatenate(kept_back))
    announced = tuple(noisy(dealt.target, config.shift.target_noise, seeds.split).tolist())
    digest = _digest([*trains, *kept_back, dealt.test])
    inputs = None if dealt.server is None else _images(data.train.x, dealt.server, raw)
    looks = dealt.looks if dealt.tests else (dealt.test_look,) * len(trains)
    gate = gate_of(config.training, announced)
    ratios = dealt.log_ratios
    by_client = None if ratios is None else tuple(torch.from_numpy(ratios[rows]) for rows in trains)
    return Prepared(
        task, model, seeds, data, pool, digest, announced, server_inputs=inputs,
        server_examples=task.target_validation if config.server.validation else None,
        looks=tuple(looks), gate=gate, custom=custom, log_ratios=by_client,
    )  # fmt: skip


def _check_files(data: Data, method: Method) -> None:
    """Raise InputError for data or a method that a program gave, since no file has them."""
    given = {"data.source": data.source, "method.name": method.name}
    for key, value in given.items():
        if value == PYTHON:
            raise InputError(
                f'{key} = "python": a program gave it, and no file holds it; run that program '
                "again, with fs.fit(..., resume=True) to go on with a run"
            )


def population(config: Config) -> Callable[[Config], Prepared]:
    """A function like `prepare`, for configurations with the data, clients and target of this one.

    They follow from [data], [shift], [server], the split's seed and `as_bytes`, are loaded once
    here, and are shared. Raises what `prepare` raises.
    """
    _check_files(config.data, config.method)
    if config.data.source is not None:
        task = task_of(config.data, config.seeds.resolved().split)
        return lambda other: prepare_source(other, custom_of(other), task)
    return partial(_again, prepare(config))


def _again(before: Prepared, config: Config) -> Prepared:
    seeds, custom = config.seeds.resolved(), custom_of(config)
    model = first_model(
        config.model, config.method, custom, before.task, seeds.init, augment=config.data.augment
    )
    gate = gate_of(config.training, before.announced)
    return replace(before, model=model, seeds=seeds, gate=gate, custom=custom)


def as_bytes(data: Data, model: Network) -> bool:
    """Whether images stay bytes: then they are mapped from their file, and not loaded to memory."""
    return data.size is not None and model.name in BYTES


def _task(dealt: Dealt, trains: Sequence[Indices], holdouts: Sequence[Indices], raw: bool) -> Task:
    """The task of dealt rows; raw: see `as_bytes`."""
    data, y = dealt.data, dealt.data.train.y
    looks = dealt.looks or (None,) * len(trains)

    def examples(rows: Indices, look: Look | None = None) -> Examples:
        return Examples(_images(data.train.x, rows, raw, look), y[rows])

    clients = (examples(rows, look) for rows, look in zip(trains, looks, strict=True))
    tests = tuple(map(examples, dealt.tests, looks))
    return Task(
        clients=tuple(client_data(one.x, one.y, i) for i, one in enumerate(clients)),
        validation=tuple(map(examples, holdouts, looks)),
        target=torch.tensor(dealt.target),
        test=joined(tests)
        if tests
        else Examples(
            _images(data.test.x, dealt.test, raw, dealt.test_look), data.test.y[dealt.test]
        ),
        target_validation=None if dealt.validation is None else examples(dealt.validation),
        classes=data.classes,
        tests=tests,
    )


def _images(x: Tensor, rows: Indices, raw: bool, look: Look | None = None) -> Tensor:
    return _rows(x, rows) if raw and look is None else seen(x[rows], look)


def _rows(x: Tensor, rows: Indices) -> Tensor:
    """x[rows]; a view if the rows are consecutive, so that a mapped file is not copied."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return x[int(rows[0]) : int(rows[-1]) + 1]
    return x[rows]


def joined(parts: Sequence[Examples]) -> Examples:
    """The examples of several sets as one set, in order."""
    return Examples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))


def noisy(target: NDArray[np.float64], noise: float, seed: int) -> NDArray[np.float64]:
    """T_p = normalise(T + noise * max(eps, 0)), eps ~ N(0, I_K): a target known with error.

    FedPALS, Table 2. `target` [K]; T itself where noise is 0.
    """
    if not noise:
        return target
    eps = numpy_generator(seed, "target noise").standard_normal(len(target))
    moved = target + noise * np.maximum(eps, 0.0)
    return np.asarray(moved / moved.sum())


def oracle_clients(prepared: Prepared) -> tuple[ClientData, ...]:
    """Clients that all follow T, as many as the task has, with the same ids in the same order.

    Client i has min(n_i, s) examples, where s = floor(min_y supply_y / T_y) is the largest size
    that the pool can fill without using an example twice. Each client is drawn without replacement
    from the pool. Its images change as the target's do: by the client's own look if clients test on
    their own data. If all clients together need more of a label than there is, they overlap, as
    evenly as a pool that is dealt again and again allows. This is chosen: the FedPALS paper states
    neither sizes nor how the clients are drawn.

    Raises InputError if T has a label of which the pool has too few for any such client.
    """
    task, pool = prepared.task, prepared.pool
    x, labels = prepared.data.train.x, prepared.data.train.y
    target, size = task.target.numpy(), _largest(prepared)
    rng = numpy_generator(prepared.seeds.split, "oracle")
    decks = [_Deck(pool[labels.numpy()[pool] == y], rng) for y in range(len(task.classes))]
    looks = prepared.looks or (None,) * len(task.clients)
    clients = []
    for i, client in enumerate(task.clients):
        counts = largest_remainder(target * min(len(client.y), size))
        rows = np.concatenate([deck.deal(int(c)) for deck, c in zip(decks, counts, strict=True)])
        images = _images(x, rows, client.x.dtype == torch.uint8, looks[i])
        clients.append(client_data(images, labels[rows], i))
    return tuple(clients)


def _largest(prepared: Prepared) -> int:
    """The size of the largest set that follows T and uses no example of the pool twice."""
    task, labels = prepared.task, prepared.data.train.y.numpy()[prepared.pool]
    supply = np.bincount(labels, minlength=len(task.classes))
    size, scarce = largest_multiple(supply, task.target.numpy())
    if size < 1:
        raise InputError(
            f"the oracle needs examples of {task.classes[scarce]}, {task.target[scarce]:.3g} of "
            f"the target, and the pool has {supply[scarce]}; leave the oracle out, or give more of "
            "them"
        )
    return size


class _Deck:
    """Indices of one label, dealt in random order and shuffled anew when they run out."""

    def __init__(self, cards: Indices, rng: np.random.Generator) -> None:
        self.cards, self.rng, self.left = cards, rng, np.empty(0, np.int64)

    def deal(self, count: int) -> Indices:
        """`count` different indices; the deck must have that many."""
        if count > len(self.left):
            # The cards left over come last in the next pass. So no hand gets a card twice, and each
            # pass deals every card once.
            others = np.setdiff1d(self.cards, self.left)
            again = [self.rng.permutation(others), self.rng.permutation(self.left)]
            self.left = np.concatenate([self.left, *again])
        hand, self.left = self.left[:count], self.left[count:]
        return hand


def _deal_data(section: Data, split: Split, server: ServerData, seed: int) -> Dealt:
    """The data set with its rows assigned, by the configured shift or as the set itself does."""
    if split.target == "clients":
        return deal_to_clients(section, split, seed)
    if split.kind == "natural":
        return noised(split, natural(section.name, split, seed, section.size), seed)
    data = datasets.load(section.name, size=section.size)
    y, classes = data.train.y, len(data.classes)
    reserved = reserve(y, classes, server, seed)
    parts, target, validation = _deal(data, section.name, split, seed, reserved.others)
    reserved = reserved.following(y, target, seed)
    whole = split.target == "test"
    dealt = Dealt(
        data,
        parts,
        target,
        reserved.validation if len(reserved.validation) else validation,
        np.arange(len(data.test)) if whole else _target_test(data, target, seed),
        server=reserved.unlabeled if len(reserved.unlabeled) else None,
    )
    return noised(split, dealt, seed)


def _deal(
    data: Dataset, name: str, split: Split, seed: int, among: Indices
) -> tuple[list[Indices], NDArray[np.float64], Indices | None]:
    """(parts of the training clients, T [K], the target's own share or None).

    Parts are rows of the training file, drawn from those `among` them.
    """
    labels, classes = data.train.y.numpy()[among], len(data.classes)
    drawn = split.target == "drawn"
    rng = numpy_generator(seed, "split")
    with _errors_by_key(split, drawn):
        parts = dealing(split, name, seed, among)(labels, classes, split.clients + drawn, rng)
    rows = [among[part] for part in parts]
    if drawn:
        counts = np.bincount(labels[parts[-1]], minlength=classes)
        if not counts.sum():
            raise InputError("[shift]: the target drew no example; raise min_size or beta")
        return rows[:-1], counts / counts.sum(), rows[-1]
    if split.target == "test":
        counts = np.bincount(data.test.y.numpy(), minlength=classes)
        return rows, counts / counts.sum(), None
    present = np.bincount(labels[np.concatenate(parts)], minlength=classes) > 0
    return rows, _target(split, present), None


@contextlib.contextmanager
def _errors_by_key(split: Split, drawn: bool) -> Iterator[None]:
    """Within the block, errors name keys of [shift], and explain a number of clients above its."""
    names = split.arguments()
    if not drawn:
        with in_file_words("shift", names):
            yield
        return
    del names["clients"]
    try:
        with in_file_words("shift", names):
            yield
    except InputError as e:
        if re.search(rf"\b{split.clients + 1} clients|clients={split.clients + 1}\b", str(e)):
            one_more = f" They are shift.clients = {split.clients} and the target, drawn as one."
            e.args = (f"{str(e).removesuffix('.')}.{one_more}",)
        raise


def _target(split: Split, present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """T [K]; present [K]: whether any client has the label."""
    classes = len(present)
    if isinstance(split.target, str):
        among = present if split.target == "union" else np.ones(classes, np.bool_)
        return np.asarray(among / among.sum())
    given = np.asarray(split.target, dtype=np.float64)
    if given.shape == (classes,) and split.normalise_target and 0 < given.sum() < np.inf:
        given = given / given.sum()
    try:
        return check_marginal(given, classes, "shift.target")
    except InputError as e:
        shares = given.shape == (classes,) and bool((np.isfinite(given) & (given >= 0)).all())
        if split.normalise_target or not shares or not given.sum():
            raise
        raise InputError(f"{e} Or set shift.normalise_target = true.") from None


def _target_test(data: Dataset, target: NDArray[np.float64], seed: int) -> Indices:
    rng = numpy_generator(seed, "test")
    with in_file_words("shift", {"marginal": "target"}):
        return shifts.resample_to(data.test.y.numpy(), target, len(data.classes), rng)


def _digest(parts: Sequence[Indices]) -> str:
    digest = hashlib.sha256()
    # With the length of each part, or the same rows in other parts would have the same digest.
    for part in parts:
        digest.update(np.int64(len(part)).tobytes() + part.astype("<i8").tobytes())
    return digest.hexdigest()
