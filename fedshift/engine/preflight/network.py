"""The network, tried on a few examples of a federation."""

from __future__ import annotations

import warnings
from functools import reduce

import torch
from torch import Tensor

from fedshift.data import ClientData, Surveyed, largest_label
from fedshift.engine.federation import Federation
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.modules import check_own
from fedshift.outputs import check_columns, dry_logits
from fedshift.randomness import one_at_a_time
from fedshift.tree import Params

# Examples that a network is tried on if it fails on two.
BATCH = 64


@torch.inference_mode(False)
def check_model(model: Model, federation: Federation) -> None:
    """Try the network on two examples. Raises InputError unless it has an output for every class.

    With labels [N, K] in the table, there must be K outputs; without, more than the largest label.
    A network of one output passes if all labels are 0: these are then no classes, and the objective
    is no classifier's.
    """
    data = first_with_examples(federation)
    if data is None:
        return
    logits = dry_logits(model, federation.params, federation.buffers, data.x[:2])
    # BatchNorm needs two examples in training.
    pair = data.x[:2] if len(data.x) > 1 else torch.cat([data.x, data.x])
    try:
        look(model, federation.params, federation.buffers, pair)
    except UntriedError:
        # Some networks need more examples, such as those that normalise over parts of a batch.
        if len(data.x) <= len(pair):
            raise
        look(model, federation.params, federation.buffers, data.x[:BATCH])
    _warn_of_probabilities(logits)
    _check_shapes(model, federation, data)
    _check_importances(federation)
    if model.outputs is not None:  # labels are no classes here
        check_columns(logits, 0, model.outputs)
        return
    largest, columns = largest_label(federation.clients), logits.shape[1]
    if "labels" in federation.table and (largest or columns > 1):
        check_columns(logits, federation.table["labels"].shape[1])
    if columns <= largest:
        raise InputError(
            f"the model has {columns} outputs, and clients hold label {largest}; "
            f"give it one output per class, at least {largest + 1}"
        )


@torch.inference_mode(False)
def check_rows(model: Model, federation: Federation, x: Tensor, whose: str) -> None:
    """InputError for rows, of the target say, that the network cannot take; tried on a few."""
    if not len(x):
        return
    flat = x.reshape(len(x), -1)
    few = torch.linspace(0, len(x) - 1, 8).long().tolist()
    ends = [int(flat.argmin()), int(flat.argmax())] if flat.numel() else []
    rows = sorted({*few, *(i // flat.shape[1] for i in ends)})
    try:
        dry_logits(model, federation.params, federation.buffers, x[rows])
    except InputError as e:
        raise InputError(f"{whose}: {e}") from e


def _warn_of_probabilities(logits: Tensor) -> None:
    """Warn if the outputs [n, K] are probabilities: the loss takes another softmax of them."""
    if logits.shape[1] > 1 and bool((logits >= 0).all()):
        sums = logits.float().sum(1)
        if torch.allclose(sums, torch.ones_like(sums), atol=1e-2 if logits.itemsize < 4 else 1e-4):
            warnings.warn(
                "the network's outputs are probabilities, and the loss takes logits: it learns "
                "slowly or not at all; leave out the softmax at its end",
                stacklevel=4,
            )


def _check_shapes(model: Model, federation: Federation, usual: ClientData) -> None:
    """InputError for a client whose inputs have a shape that the network cannot read.

    Some networks read several: sequences of any length, or images before a global mean.
    """
    if isinstance(federation.clients, Surveyed):
        return
    # Each shape is tried once: most often, a thousand clients have the same.
    tried = {usual.x.shape[1:]}
    for i, c in enumerate(federation.clients):
        shape = c.x.shape[1:]
        if len(c.y) and shape not in tried:
            tried.add(shape)
            try:
                dry_logits(model, federation.params, federation.buffers, c.x[:2])
            except InputError as e:
                first = f"client {int(usual.id)}'s {tuple(usual.x.shape[1:])}"
                raise InputError(
                    f"client {i}: inputs are {tuple(shape)}, {first}, and the network does not "
                    f"read both: {e}"
                ) from e


def _check_importances(federation: Federation) -> None:
    """InputError for importances of which a client's loss would take another type than others'.

    The server refuses replies of different types. Alike, float64 throughout is fine.
    """
    if isinstance(federation.clients, Surveyed):
        return
    net = [v.dtype for v in federation.params.values() if v.is_floating_point()]
    first = federation.clients[0].w.dtype
    kinds = {c.w.dtype for c in federation.clients}
    alike = {kind: reduce(torch.promote_types, net, kind) for kind in kinds}
    for i, c in enumerate(federation.clients):
        if alike[c.w.dtype] != alike[first]:
            raise InputError(
                f"client {i}: w is {c.w.dtype}, and client 0's is {first}; give all clients w of "
                "one type, as w.float()"
            )


def first_with_examples(federation: Federation) -> ClientData | None:
    """The first client that has examples; None where none has."""
    return next((c for c in federation.clients if len(c.y)), None)


class UntriedError(InputError):
    """A network failed in training mode on the examples of its trial."""


def look(model: Model, params: Params, buffers: Params, x: Tensor) -> None:
    """Try the network in training mode, and record the generators that it draws from.

    Makes passes on x [n, ...], n > 1. Draws that these passes do not make are refused later, when
    they happen (`fedshift.randomness.undrawn`). Raises InputError for a network that fails in
    training mode, for outputs that have no gradient, and if passes differ although tensors and seed
    are the same.
    """
    moving = {k: v.detach().requires_grad_() for k, v in model.trainable(params).items()}
    # Batches are contiguous. On rows that lie apart in memory, such as every third row of a table,
    # a plain pass and the shortcuts of later ones (`kernels`) may add in another order, and differ
    # in the last bits.
    x = x.contiguous()
    try:
        before = _evaluate(model, params, buffers, x)
        first, second = (_tensors(model.train(params | moving, buffers, x)[0]) for _ in "ab")
        after = _evaluate(model, params, buffers, x)
    except Exception as e:
        raise UntriedError(
            f"the model fails in training mode on inputs {x.dtype} {tuple(x.shape)}: {e}"
        ) from e
    if moving and first and not any(v.requires_grad for v in first.values()):
        raise InputError(
            "the network's outputs are cut off from its parameters (detach(), no_grad(), numpy "
            "or argmax in its forward): no gradient reaches them, and nothing would be learned"
        )
    if moving:
        with one_at_a_time():
            check_own(model.net, first.values(), moving.values())
    _check_stateless(first, second, "two passes of the network in training")
    _check_stateless(before, after, "the network's passes in evaluation before and after training")


def _evaluate(model: Model, params: Params, buffers: Params, x: Tensor) -> Params:
    with torch.no_grad():
        return _tensors(model(params, {k: v.clone() for k, v in buffers.items()}, x))


def _tensors(outputs: Params) -> Params:
    return {name: v for name, v in outputs.items() if isinstance(v, Tensor)}


def _check_stateless(one: Params, other: Params, which: str) -> None:
    if name := _first_difference(one, other):
        raise InputError(
            f'{which} give other "{name}", though parameters, buffers and seed are the same: '
            "it keeps a state, or draws from a generator that no seed reaches, such as numpy's "
            "default_rng, or one that it puts back after drawing (fork_rng). "
            " Keep a state in buffers (register_buffer). Draw by torch's functions "
            "without a generator, or from a torch.Generator that is an attribute of the network"
        )


def _first_difference(one: Params, other: Params) -> str:
    """The name of the first output that differs; empty if none does."""
    differing = (name for name, v in one.items() if name not in other or not _alike(v, other[name]))
    return next(differing, "")


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN; on a GPU, up to rounding.

    A GPU may add in another order each time.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() and a.device.type != "cpu":
        return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
