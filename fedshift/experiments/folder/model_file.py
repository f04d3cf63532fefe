"""model.safetensors of a run folder: how its parts are written and read back.

"params" and "buffers" are the server's model. A client that serves another model has parts of its
own (`model_parts`). A corrected model comes with the part "correction": scale [], bias [K] and
correctable [K]. If the last layer can take the correction (`head_of`), "params" have it already,
and the part "uncorrected" has that layer as it was trained. Otherwise `predict` applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedshift.engine.checks.replies import finite
from fedshift.errors import DataError, InputError
from fedshift.evaluation.corrected import head_of, written
from fedshift.model import Model
from fedshift.server.prior import Correction
from fedshift.tree import Params, Parts, flatten, unflatten

Pair = tuple[Params, Params]
# Parts with the first model, which clients that never took part serve, and with who took part.
FIRST, FIRST_BUFFERS, WHO = "first", "first_buffers", "clients"
# A mark in the latter: the clients' models stayed at their sites and are not in the file.
ON_SITES = "on_sites"
# Parts with the correction of a model, and with its last layer as it was trained.
CORRECTION, UNCORRECTED = "correction", "uncorrected"


def read_parts(path: Path) -> Parts:
    """All parts in the file, "params" and "buffers" among them.

    Raises DataError for a file that is missing, damaged, or holds numbers that are not finite.
    """
    try:
        # safetensors checks that the header fits the file and is below 100 MB.
        # Cloned, because tensors of a mapped file may be unaligned, where kernels can round
        # differently: predictions would then depend on the file's layout.
        flat = {name: v.clone() for name, v in load_file(path).items()}
        parts = unflatten(flat, ("params", "buffers"))
    except FileNotFoundError:
        raise DataError(f"{path}: missing; train again") from None
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (SafetensorError, ValueError, LookupError, RuntimeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from None
    for name, v in flatten(parts).items():
        # Whole numbers are counters, which are int64: other types mean a damaged or foreign file.
        if not (v.dtype.is_floating_point or v.dtype.itemsize == 8) or not finite(_biases(name, v)):
            raise DataError(f'{path}: "{name}" holds numbers that no training leaves ({v.dtype})')
    return parts


def _biases(name: str, v: Tensor) -> Tensor:
    """The tensor with a client's biases of minus infinity set to 0, so that it can be tested.

    Such a bias is legitimate: with it a client rules a label out.
    """
    of_client = name.startswith("client") and v.is_floating_point()
    return v.masked_fill(v == -torch.inf, 0.0) if of_client else v


def misfit(trees: Iterable[Params], model: Model) -> str:
    """The first mismatch of names or shapes with the network, in words; "" if all match."""
    given = {k: tuple(v.shape) for tree in trees for k, v in tree.items()}
    expected = {k: tuple(v.shape) for tree in model.init() for k, v in tree.items()}
    odd = sorted(k for k in expected.keys() | given.keys() if given.get(k) != expected.get(k))
    if not odd:
        return ""
    there, here = given.get(odd[0], "missing"), expected.get(odd[0], "missing")
    return f'"{odd[0]}" is {there} and in the network of config.resolved.toml {here}'


def check_fit(path: Path, model: Model, many: Iterable[Iterable[Params]]) -> None:
    """Raise DataError for parameters whose names or shapes are not this network's."""
    for trees in many:
        if odd := misfit(trees, model):
            raise DataError(f"{path}: {odd}; give the shape of one input as in training")


def model_parts(
    shared: Pair, first: Pair, served: Sequence[Pair], took_part: Iterable[int]
) -> Parts:
    """The parts of model.safetensors: the server's model, and what differs from it at each client.

    `served` [M] are the clients' models, () if only the server's is served. A tensor that equals
    the server's is written once. So is the first model's, for clients that never took part.
    Tensors are compared bit by bit and not by identity: workers and --resume make copies of what is
    one object elsewhere, and the file must be the same.
    """
    parts: Parts = {"params": shared[0], "buffers": shared[1]}
    if not served:
        return parts
    drawn = set(took_part)
    idle = [served[i] for i in range(len(served)) if i not in drawn]
    # The first model's tensors are stored only where an idle client still serves them.
    still_first = tuple(
        {
            k: v for k, v in tree.items()
            if not same_bits(shared[j].get(k), v)
            and any(same_bits(pair[j].get(k), v) for pair in idle)
        }
        for j, tree in enumerate(first)
    )  # fmt: skip
    for i, pair in enumerate(served):
        sent = (
            shared if i in drawn else tuple(a | b for a, b in zip(shared, still_first, strict=True))
        )
        changed = [
            {k: v for k, v in tree.items() if not same_bits(sent[j].get(k), v)}
            for j, tree in enumerate(pair)
        ]
        # "personal": a complete model of its own; "private": what completes the server's.
        kind = "personal" if changed[0].keys() == pair[0].keys() else "private"
        parts[f"client{i}.{kind}"], parts[f"client{i}.{kind}_buffers"] = changed
    # int64, because `read_parts` refuses other whole numbers.
    member = torch.tensor([i in drawn for i in range(len(served))]).long()
    return parts | {
        FIRST: still_first[0],
        FIRST_BUFFERS: still_first[1],
        WHO: {"took_part": member},
    }


def parts_without_clients(
    shared: Pair, first: Pair, took_part: Iterable[int], clients: int
) -> Parts:
    """`model_parts` of a run whose clients' models stayed at their sites.

    The server's model may be no whole network, because the rest is private. What it lacks is taken
    from the first model: with it the network can be built, and a router, which needs only the
    server's part, can name clients.
    """
    lacking = [
        {k: v for k, v in tree.items() if k not in shared[j]} for j, tree in enumerate(first)
    ]
    drawn = set(took_part)
    member = torch.tensor([i in drawn for i in range(clients)]).long()
    who = {"took_part": member, ON_SITES: torch.ones((), dtype=torch.int64)}
    return {
        "params": shared[0], "buffers": shared[1], FIRST: lacking[0], FIRST_BUFFERS: lacking[1],
        WHO: who,
    }  # fmt: skip


def same_bits(a: Tensor | None, b: Tensor) -> bool:
    """Whether both have the same type, shape and bits: -0.0 differs from 0.0, NaN equals itself."""
    # Clients share most tensors, and comparing an object with itself costs nothing this way.
    if a is None or a is b:
        return a is b
    alike = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return alike and torch.equal(bits(a), bits(b))


def bits(v: Tensor) -> Tensor:
    """The bytes of a tensor as a vector of uint8."""
    return v.detach().contiguous().flatten().view(torch.uint8)


def took_part(parts: Mapping[str, Params], clients: int, path: Path) -> tuple[int, ...]:
    """Ids of the clients that took part. Raises DataError for a file of other clients."""
    member = parts[WHO].get("took_part")
    if member is None or member.shape != (clients,):
        raise DataError(f"{path}: damaged (it does not say which of {clients} clients took part)")
    return tuple(member.nonzero().flatten().tolist())


def served_in(parts: Mapping[str, Params], client: int, drawn: bool) -> Pair:
    """The model that a client serves: `model_parts` undone; drawn: whether it took part."""

    def whole(shared: str, first_part: str, suffix: str) -> Params:
        first = {} if drawn else parts.get(first_part, {})
        pair = (parts.get(f"client{client}.{kind}{suffix}", {}) for kind in ("private", "personal"))
        private, personal = pair
        return parts[shared] | first | private | personal

    return whole("params", FIRST, ""), whole("buffers", FIRST_BUFFERS, "_buffers")


def complete(parts: Mapping[str, Params]) -> Pair:
    """The server's model, completed by the first one's tensors where it lacks some."""
    return (
        parts.get(FIRST, {}) | parts["params"],
        parts.get(FIRST_BUFFERS, {}) | parts["buffers"],
    )


class Applied(NamedTuple):
    """A correction, and the last layer as it was: {} where the layer could not take it."""

    correction: Correction
    before: Params


def with_correction(
    parts: Parts, model: Model, correction: Correction, shape: tuple[int, ...]
) -> Parts:
    """The parts of a corrected model, for inputs of this shape.

    Raises InputError for one that is corrected already: the target would count twice.
    """
    if CORRECTION in parts:
        raise InputError(
            "this model is corrected for a target already, and a second correction would count the "
            'target twice; correct the model as it was trained (part "uncorrected")'
        )
    pair = parts["params"], parts["buffers"]
    numbers: Params = {
        "scale": torch.tensor(correction.scale, dtype=torch.float64),
        "bias": torch.as_tensor(correction.bias, dtype=torch.float64),
        # int64: `read_parts` takes no other whole numbers.
        "correctable": torch.as_tensor(correction.correctable).long(),
    }
    head = head_of(model, *pair, shape)
    if head is None:
        return {**parts, CORRECTION: numbers}
    before = {name: pair[0][name] for name in head}
    return {
        **parts, "params": written(pair[0], head, correction), CORRECTION: numbers,
        UNCORRECTED: before,
    }  # fmt: skip


def correction_in(parts: Parts, path: Path) -> Applied | None:
    """What was done to the model; None for one as it was trained. Raises DataError."""
    if CORRECTION not in parts:
        return None
    numbers, before = parts[CORRECTION], parts.get(UNCORRECTED, {})
    shapes = {name: v.dim() for name, v in numbers.items()}
    params = parts["params"]
    alike = all(k in params and params[k].shape == v.shape for k, v in before.items())
    if shapes != {"scale": 0, "bias": 1, "correctable": 1} or not alike:
        raise DataError(f'{path}: damaged (part "{CORRECTION}" is none of this model)')
    bias, correctable = numbers["bias"].numpy(), numbers["correctable"].bool().numpy()
    return Applied(Correction(float(numbers["scale"]), bias, correctable), before)


def without_correction(parts: Parts) -> Parts:
    """The parts with any correction undone: the model as it was trained."""
    others = {k: v for k, v in parts.items() if k not in (CORRECTION, UNCORRECTED)}
    return others | {"params": parts["params"] | parts.get(UNCORRECTED, {})}
