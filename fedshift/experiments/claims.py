"""The gradients of a configured task's clients, set against the label counts that they claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedshift.audit import Finding, Floats, audit_marginals
from fedshift.csv_counts import read_counts
from fedshift.data import ClientData
from fedshift.errors import DataError, InputError, shown
from fedshift.experiments.config.load import load_with_source
from fedshift.experiments.config.places import Source
from fedshift.experiments.config.schema import Config
from fedshift.experiments.folder.stored import misfit, read_parts
from fedshift.experiments.task.preparing import Prepared
from fedshift.files import is_file, is_folder
from fedshift.model import Model
from fedshift.record.folder import CONFIG, MODEL, deployed_of
from fedshift.seeds import numpy_generator
from fedshift.tree import Params

# Larger models are tested on the gradient of their last layer.
MOST_NUMBERS = 500_000
BATCH = 256


def configured(place: Path) -> tuple[Config, Source, Path | None]:
    """The configuration of FILE.toml, or of a run folder; its model, where it has one.

    Raises InputError for anything else.
    """
    if not is_folder(place):
        return *load_with_source(place), None
    if not is_file(place / CONFIG):
        run = f" (a federation's is {place / 'run'})" if is_folder(place / "app") else ""
        raise InputError(f"{place}: not a run folder (no {CONFIG}); give one{run}, or FILE.toml")
    model = place / MODEL
    return *load_with_source(place / CONFIG), model if is_file(model) else None


def model_of(prepared: Prepared, path: Path | None) -> tuple[Params, Params]:
    """(parameters, buffers) of a run's model; the first model without one.

    Raises DataError for a file that cannot be read or holds another network's model.
    """
    params, buffers = prepared.model.init()
    # A configuration that has not been run: claims can be tested at the first model as well.
    if path is None:
        return params, buffers
    parts = read_parts(path)
    if odd := misfit((parts["params"], parts["buffers"]), prepared.model):
        raise DataError(
            f"{path}: not the configured network's model: {odd} (some of it may stay on the "
            "clients); audit the configuration file instead, which is done on the first model"
        )
    return parts["params"], parts["buffers"]


def registered_in(place: Path, *, labels: bool) -> dict[str, Floats]:
    """The columns that clients registered for a deployed run; {} for any other.

    labels: whether these are needed. Raises InputError where clients were not asked for them, and
    where they have examples of their own: gradients of others say nothing of their claims.
    """
    deployed = deployed_of(place) if is_folder(place) else {}
    if deployed and not deployed.get("dealt"):
        raise InputError(
            f"{place}: its clients have data of their own, and only they "
            "can take the gradients that their claims would be set against"
        )
    columns = deployed.get("registered", {})
    if deployed and labels and "labels" not in columns:
        raise InputError(
            f"{place}: the clients registered sizes alone, since its method asks for no labels; "
            "give what they claim as --claims FILE.csv"
        )
    return {name: np.array(column, dtype=np.float64) for name, column in columns.items()}


def other_sizes(prepared: Prepared, sent: Mapping[str, Floats]) -> list[dict[str, int]]:
    """Clients that registered another size than that of the examples which they are dealt."""
    dealt = prepared.federation().table["n"].numpy()
    pairs = enumerate(zip(sent.get("n", dealt), dealt, strict=True))
    return [{"client": i, "registered": int(a), "dealt": int(b)} for i, (a, b) in pairs if a != b]


def claimed(path: Path, classes: Sequence[str]) -> Floats:
    """Claims [M, K] from a CSV file: its columns by their labels, its rows by their clients.

    Clients are 0 to M-1, or as they come where they have other names. Raises DataError for a file
    that is no table and for other labels than `classes`.
    """
    claims = read_counts(path)
    if sorted(claims.classes) != sorted(classes):
        odd = [c for c in claims.classes if c not in classes] or sorted(
            set(classes) - set(claims.classes)
        )
        raise DataError(
            f'{path}: label "{shown(odd[0])}" is not in both, header and task; the task\'s '
            f"labels are {', '.join(map(shown, classes))}, in any order"
        )
    # Rows may be in any order where clients are named by their numbers; other names say no order.
    numbers = [str(i) for i in range(len(claims.clients))]
    rows = numbers if sorted(claims.clients) == sorted(numbers) else claims.clients
    columns = [claims.classes.index(c) for c in classes]
    return claims.counts[[claims.clients.index(r) for r in rows]][:, columns]


def audit_task(
    prepared: Prepared,
    params: Params,
    buffers: Params,
    claims: Floats | None = None,
    *,
    level: float = 0.01,
) -> tuple[Finding, ...]:
    """`audit_marginals` of the task's clients at one model; claims [M, K], what they hold if None.

    Only the shares of a claim are used: a size above that of the examples whose gradients were
    taken would pass for noise, and one such claim hide all the others.
    """
    counts = prepared.federation().table["labels"].numpy()
    claimed_counts = counts if claims is None else claims
    if claimed_counts.shape != counts.shape:
        raise InputError(f"claims of shape {claimed_counts.shape}; the task has {counts.shape}")
    # A claim of no examples gives 0/0 here; `audit_marginals` refuses it in words.
    with np.errstate(invalid="ignore", over="ignore"):
        claimed_counts = (
            claimed_counts / claimed_counts.sum(1, keepdims=True) * counts.sum(1, keepdims=True)
        )
    halves = [
        half_gradients(prepared.model, params, buffers, client, i)
        for i, client in enumerate(prepared.task.clients)
    ]
    first, second = (np.stack([pair[k] for pair in halves]) for k in (0, 1))
    return audit_marginals(first, second, claimed_counts, level=level)


def half_gradients(
    model: Model, params: Params, buffers: Params, data: ClientData, seed: int
) -> tuple[Floats, Floats]:
    """Mean gradients of the cross-entropy over two random halves of each label's examples.

    In evaluation mode; of the last layer alone where there are more than `MOST_NUMBERS` parameters.
    Raises InputError for a client with fewer than two examples.
    """
    y = data.y.numpy()
    if len(y) < 2:
        raise InputError(f"client {int(data.id)} has {len(y)} examples; two halves need two")
    order = numpy_generator(seed, "audit").permutation(len(y))
    # Sorted by label, then every second row: both halves have each label equally often, up to one.
    order = order[np.argsort(y[order], kind="stable")]
    return tuple(  # type: ignore[return-value]
        _gradient(model, params, buffers, data, rows) for rows in (order[::2], order[1::2])
    )


def _gradient(
    model: Model, params: Params, buffers: Params, data: ClientData, rows: NDArray[np.int64]
) -> Floats:
    whole = sum(v.numel() for v in params.values()) <= MOST_NUMBERS
    # A network without a "head." is tested on all its parameters, however many.
    moving = {k for k in params if whole or k.startswith("head.")} or set(params)
    # Only these take part in the gradient, which saves the backward pass through the body.
    leaves = {k: v.detach().requires_grad_(k in moving) for k, v in params.items()}
    names = sorted(moving)
    total = np.zeros(sum(params[k].numel() for k in names))
    # In pieces, since a client's examples may not fit into memory at once.
    for piece in torch.split(torch.from_numpy(rows), BATCH):
        logits = model(leaves, buffers, data.x[piece])["logits"]
        loss = functional.cross_entropy(logits, data.y[piece], reduction="sum")
        grads = torch.autograd.grad(loss, [leaves[k] for k in names], allow_unused=True)
        total += _flat(grads, [params[k] for k in names]) / len(rows)
    return total


def _flat(grads: tuple[Tensor | None, ...], like: list[Tensor]) -> Floats:
    # None: the loss does not depend on this tensor, as on a router's branch.
    filled = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, like, strict=True)]
    flat: Floats = torch.cat([g.double().flatten() for g in filled]).numpy()
    return flat
