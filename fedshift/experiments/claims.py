"""Audit of label counts: do the gradients of a task's clients fit the counts that they claim?"""

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
from fedshift.experiments.folder.model_file import misfit, read_parts
from fedshift.experiments.task.preparing import Prepared
from fedshift.files import is_file, is_folder
from fedshift.model import Model
from fedshift.record.folder import CONFIG, MODEL, deployed_of
from fedshift.seeds import numpy_generator
from fedshift.tree import Params

# Models with more parameters are audited on the gradient of their last layer alone: the audit
# keeps two gradients for each client.
MOST_NUMBERS = 500_000
BATCH = 256


def configured(place: Path) -> tuple[Config, Source, Path | None]:
    """(configuration, where its keys were set, model file) of FILE.toml or of a run folder.

    The model file is None if there is none.

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
    """(parameters, buffers) of the model file `path`; those of the first model if it is None.

    Raises DataError for a file that cannot be read or holds another network's model.
    """
    params, buffers = prepared.model.init()
    # The configuration has not been run. Claims can be audited at the first model as well.
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
    """The columns that clients registered for a deployed run; {} for any other run.

    labels: whether the label counts are needed. Raises InputError if clients were not asked for
    them. Also if clients have examples of their own: an audit compares a claim with gradients of
    the client's real examples, and the server has none of these.
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
    """Clients that registered another number of examples than the experiment dealt them."""
    dealt = prepared.federation().table["n"].numpy()
    pairs = enumerate(zip(sent.get("n", dealt), dealt, strict=True))
    return [{"client": i, "registered": int(a), "dealt": int(b)} for i, (a, b) in pairs if a != b]


def claimed(path: Path, classes: Sequence[str]) -> Floats:
    """Claims [M, K] from a CSV file with a row for each client and a column for each label.

    Rows are put in order if the clients are called 0 to M-1; under other names they stay in the
    file's order. Raises DataError for a file that is no table, and for labels other than `classes`.
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
    # Only numbers say which client of the task a row is: with other names the order has to.
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
    """`audit_marginals` of the task's clients, with their gradients at one model.

    claims [M, K]: the label counts to test; None for the true ones. Only the shares of a claim are
    used. If a claimed size were above the number of examples behind the gradient, the difference
    would look like noise, and one such claim would hide all others.
    """
    counts = prepared.federation().table["labels"].numpy()
    claimed_counts = counts if claims is None else claims
    if claimed_counts.shape != counts.shape:
        raise InputError(f"claims of shape {claimed_counts.shape}; the task has {counts.shape}")
    # A claim of no examples gives 0/0 here; `audit_marginals` refuses the NaN with a clear message.
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
    """Mean gradients of the cross-entropy over two random halves of a client's examples.

    Two halves, because their difference shows how noisy the gradient is. Both have the same label
    shares, up to one example. The network is in evaluation mode. Only the last layer's gradient is
    taken if there are more than `MOST_NUMBERS` parameters. Raises InputError for a client with
    fewer than two examples.
    """
    y = data.y.numpy()
    if len(y) < 2:
        raise InputError(f"client {int(data.id)} has {len(y)} examples; two halves need two")
    order = numpy_generator(seed, "audit").permutation(len(y))
    # Sorted by label, then every second row: this is what gives both halves the same shares.
    order = order[np.argsort(y[order], kind="stable")]
    return tuple(  # type: ignore[return-value]
        _gradient(model, params, buffers, data, rows) for rows in (order[::2], order[1::2])
    )


def _gradient(
    model: Model, params: Params, buffers: Params, data: ClientData, rows: NDArray[np.int64]
) -> Floats:
    whole = sum(v.numel() for v in params.values()) <= MOST_NUMBERS
    # A network without parameters named "head." is audited on all of them, however many.
    moving = {k for k in params if whole or k.startswith("head.")} or set(params)
    # autograd skips the other parameters, which saves the backward pass through the body.
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
    # None: the class loss does not depend on this tensor, for example on a router's branch.
    filled = [torch.zeros_like(v) if g is None else g for g, v in zip(grads, like, strict=True)]
    flat: Floats = torch.cat([g.double().flatten() for g in filled]).numpy()
    return flat
