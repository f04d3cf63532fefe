"""From a configuration to a task: data, clients, target, first model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedshift import datasets, shifts
from fedshift.data import ClientData, Examples, Task, client_data, register
from fedshift.datasets import Dataset, Samples
from fedshift.engine.rounds import Federation
from fedshift.errors import InputError
from fedshift.experiments.config import Config, Network, Split
from fedshift.experiments.natural import Dealt, natural
from fedshift.model import Model, build, check_classes
from fedshift.models.dense import Mlp
from fedshift.models.lenet import LeNet
from fedshift.models.pretrained import imagenet
from fedshift.models.resnet import Norm, ResNet, stem_for
from fedshift.seeds import Seeds, numpy_generator
from fedshift.shifts.base import largest_remainder
from fedshift.shifts.target import check_marginal

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Prepared:
    """A task, its first model, where its data came from, and the checksum of the split.

    `pool` are the training rows that the oracle may draw from: none that anybody validates on.
    `told` is what the server takes for T: T itself unless shift.target_noise is set.
    """

    task: Task
    model: Model
    seeds: Seeds
    data: Dataset
    pool: Indices
    split_sha256: str
    told: tuple[float, ...]

    def federation(self, clients: Sequence[ClientData] | None = None) -> Federation:
        """The task's clients (or others in their place) with the first model and the seeds."""
        chosen = self.task.clients if clients is None else tuple(clients)
        params, buffers = self.model.init()
        table = register(chosen, len(self.task.classes))
        return Federation(chosen, params, buffers, table, self.seeds)


def scaled(x: Tensor) -> Tensor:
    """Bytes 0..255 to (x/255 - 0.5) / 0.5 in float32, as the FedPALS code; floats as they are."""
    return x.float().div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


def prepare(config: Config) -> Prepared:
    """Load, split and resample as configured. Raises InputError or DataError; trains nothing."""
    seeds = config.seeds.resolved()
    data, parts, target, held, test = _dealt(config, seeds.split)
    trains, holdouts = _hold_out(data.train.y, parts, config.data.validation, seeds.split)
    x = scaled(data.train.x)
    task = Task(
        clients=tuple(client_data(x[i], data.train.y[i], c) for c, i in enumerate(trains)),
        validation=tuple(Examples(x[i], data.train.y[i]) for i in holdouts),
        target=torch.tensor(target),
        test=Examples(scaled(data.test.x[test]), data.test.y[test]),
        target_validation=None if held is None else Examples(x[held], data.train.y[held]),
        classes=data.classes,
    )
    model = network(config.model, tuple(x.shape[1:]), len(data.classes), seeds.init)
    check_classes(model, x[:2], len(data.classes))
    kept_back = [*holdouts, *([] if held is None else [held])]
    pool = np.setdiff1d(np.arange(len(data.train.y)), np.concatenate(kept_back))
    told = tuple(noisy(target, config.shift.target_noise, seeds.split).tolist())
    return Prepared(task, model, seeds, data, pool, _digest([*trains, *kept_back, test]), told)


def noisy(target: NDArray[np.float64], noise: float, seed: int) -> NDArray[np.float64]:
    """T_p = normalise(T + noise * max(eps, 0)), eps ~ N(0, I_K): a target known with error.

    FedPALS, Table 2. `target` [K]; T itself where noise is 0.
    """
    if not noise:
        return target
    eps = numpy_generator(seed, "target noise").standard_normal(len(target))
    moved = target + noise * np.maximum(eps, 0.0)
    return np.asarray(moved / moved.sum())


def network(config: Network, shape: tuple[int, ...], classes: int, seed: int) -> Model:
    """The configured network for inputs of `shape`, first weights from `seed`."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "lenet": lambda: LeNet(shape[0], shape[-1], classes),
        "mlp": lambda: Mlp(shape, config.hidden, classes),
        "linear": lambda: Mlp(shape, (), classes),
        "resnet18-gn": lambda: _resnet(18, "group", config, shape, classes),
        "resnet18": lambda: _resnet(18, "batch", config, shape, classes),
        "resnet50": lambda: _resnet(50, "batch", config, shape, classes),
    }
    vectors = config.name in ("mlp", "linear")
    if not vectors and (len(shape) != 3 or shape[1] != shape[2]):
        raise InputError(
            f'model.name "{config.name}" needs square images [channels, size, size], the data are '
            f'{shape}; use "mlp" or "linear"'
        )
    return build(makers[config.name], seed, freeze_norm=config.freeze_norm)


def _resnet(
    depth: int, norm: Norm, config: Network, shape: tuple[int, ...], classes: int
) -> ResNet:
    """A ResNet with the stem for the images' size, or ImageNet's with ImageNet weights."""
    if not config.pretrained:
        stem = stem_for(shape[-1])
        return ResNet(depth, classes, norm=norm, stem=stem, channels=shape[0])
    net = ResNet(depth, classes, norm=norm, channels=shape[0], colours="imagenet")
    return imagenet(net, depth)


def oracle_clients(prepared: Prepared) -> tuple[ClientData, ...]:
    """Clients that all follow T, as many and as large as the task's; ids and order kept.

    Each is drawn without replacement from the pool. Where the clients together need more of a label
    than there is, they overlap, as evenly as a pool dealt round after round allows (chosen: the
    paper says "freshly sampled" and n_i of all clients can exceed the supply of T's labels).
    """
    task, pool = prepared.task, prepared.pool
    x, labels = prepared.data.train.x, prepared.data.train.y
    rng = numpy_generator(prepared.seeds.split, "oracle")
    decks = [_Deck(pool[labels.numpy()[pool] == y], rng) for y in range(len(task.classes))]
    clients = []
    for i, client in enumerate(task.clients):
        counts = largest_remainder(task.target.numpy() * len(client.y))
        rows = np.concatenate([deck.deal(int(c)) for deck, c in zip(decks, counts, strict=True)])
        clients.append(client_data(scaled(x[rows]), labels[rows], i))
    return tuple(clients)


class _Deck:
    """Indices of one label, dealt in random order and shuffled anew when they run out."""

    def __init__(self, cards: Indices, rng: np.random.Generator) -> None:
        self.cards, self.rng, self.left = cards, rng, np.empty(0, np.int64)

    def deal(self, count: int) -> Indices:
        """`count` different indices."""
        if count > len(self.cards):
            raise InputError(
                f"the oracle needs {count} examples of one label for one client and the pool has "
                f"{len(self.cards)}; use fewer or smaller clients"
            )
        if count > len(self.left):
            # Those still in hand come last in the next pass: no hand holds one twice, and every
            # pass deals every card once.
            others = np.setdiff1d(self.cards, self.left)
            again = [self.rng.permutation(others), self.rng.permutation(self.left)]
            self.left = np.concatenate([self.left, *again])
        hand, self.left = self.left[:count], self.left[count:]
        return hand


def _dealt(config: Config, seed: int) -> Dealt:
    """The data set with its rows dealt: by the configured shift, or as they came."""
    if config.shift.kind == "natural":
        return natural(config.data.name, config.shift, seed)
    data = datasets.load(config.data.name)
    parts, target, held = _deal(data.train, len(data.classes), config.shift, seed)
    return Dealt(data, parts, target, held, _target_test(data, target, seed))


def _deal(
    train: Samples, classes: int, split: Split, seed: int
) -> tuple[list[Indices], NDArray[np.float64], Indices | None]:
    """(parts of the training clients, T [K], the target's own share or None)."""
    labels = train.y.numpy()
    drawn = split.target == "drawn"
    rng = numpy_generator(seed, "split")
    try:
        parts = split.shift()(labels, classes, split.clients + drawn, rng)
    except InputError as e:
        raise InputError(f"[shift]: {e}") from None
    if drawn:
        counts = np.bincount(labels[parts[-1]], minlength=classes)
        if not counts.sum():
            raise InputError("[shift]: the target drew no example; raise min_size or beta")
        return list(parts[:-1]), counts / counts.sum(), parts[-1]
    return list(parts), _given_target(split, classes), None


def _given_target(split: Split, classes: int) -> NDArray[np.float64]:
    if isinstance(split.target, str):
        return np.full(classes, 1.0 / classes)
    given = np.asarray(split.target, dtype=np.float64)
    if given.shape == (classes,) and split.normalise_target and given.sum() > 0:
        given = given / given.sum()
    try:
        return check_marginal(given, classes)
    except InputError as e:
        hint = "" if split.normalise_target else " Or set shift.normalise_target = true."
        raise InputError(f"shift.target: {e}{hint}") from None


def _hold_out(
    y: Tensor, parts: Sequence[Indices], share: float, seed: int
) -> tuple[list[Indices], list[Indices]]:
    """Each client's part cut label by label: share * count examples for validation.

    What rounding down leaves is carried to the next client with that label, so that small clients
    together hold out their share too; a client keeps at least one example of each of its labels.
    """
    trains, holdouts = [], []
    carried: dict[int, float] = {}
    for client, part in enumerate(parts):
        order = numpy_generator(seed, "validation", client).permutation(part)
        labels = y.numpy()[order]
        held = np.zeros(len(order), dtype=bool)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            owed = carried.get(label, 0.0) + share * len(rows)
            taken = min(math.floor(owed + 1e-9), len(rows) - 1)
            carried[label] = owed - taken
            held[rows[:taken]] = True
        trains.append(np.sort(order[~held]))
        holdouts.append(np.sort(order[held]))
    return trains, holdouts


def _target_test(data: Dataset, target: NDArray[np.float64], seed: int) -> Indices:
    rng = numpy_generator(seed, "test")
    return shifts.resample_to(data.test.y.numpy(), target, len(data.classes), rng)


def _digest(parts: Sequence[Indices]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.int64(len(part)).tobytes() + part.astype("<i8").tobytes())
    return digest.hexdigest()
