"""What a reply must look like: names, types, shapes, and numbers that are finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.engine.backends import FAILED, Reply
from fedshift.errors import DivergedError, TrainingError
from fedshift.tree import Params, Parts, flatten, same_form, same_parts

Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
# By how much counters (batches that running statistics have seen) may grow in one round.
MOST_BATCHES = 1_000_000
# Types of which a single number is looked at without a sum.
PLAIN = (torch.float32, torch.float64)


class Came(NamedTuple):
    """A reply, and one that came before and looks as it does: whose parts have the same names,
    shapes and types. The first one of its look is its own.
    """

    reply: Reply
    like: Reply


def expected_update(
    message: Callable[[int], Parts], arrivals: Sequence[Came], parts: Collection[str] = (),
    fixed: Collection[str] = (),
) -> Parts:  # fmt: skip
    """What an update must look like: the model that was sent for what mirrors it.

    The model that was sent, not the server's: clients may receive only rows of a layer. For all
    else, the form that most replies have, so that one odd client does not make the others look odd;
    forms that mirror what was sent, and hold none but the method's `parts` (any if left out), come
    first, and of two equals the one with more parts. `message` gives what a client was sent; what
    is `fixed` of its model does not come back.
    """
    usual = (
        arrivals[0].reply
        if len(_distinct(arrivals)) == 1
        else _most_common(message, arrivals, parts, fixed)
    )
    relevant = {k: v for k, v in usual.update.items() if not parts or k in parts}
    return {**relevant, **_mirrored_parts(message, usual, fixed)}


def _distinct(arrivals: Sequence[Came]) -> dict[int, Reply]:
    return {id(one.like): one.like for one in arrivals}


def _most_common(
    message: Callable[[int], Parts], arrivals: Sequence[Came], parts: Collection[str],
    fixed: Collection[str],
) -> Reply:  # fmt: skip
    looks = {k: _form(like.update) for k, like in _distinct(arrivals).items()}
    forms = [looks[id(one.like)] for one in arrivals]
    counts = Counter(forms)

    def worth(form: Form) -> tuple[bool, int, int, int]:
        i = forms.index(form)
        reply = arrivals[i].reply
        fits = not parts or set(reply.update) <= set(parts)
        mirrored = _mirrored_parts(message, reply, fixed).items() if fits else ()
        fits = fits and all(same_form(reply.update[k], v) for k, v in mirrored)
        return fits, counts[form], len(reply.update), -i

    return arrivals[forms.index(max(counts, key=worth))].reply


def _form(update: Parts) -> Form:
    flat = flatten(update).items()
    return tuple((k, tuple(v.shape), v.dtype) for k, v in sorted(flat, key=itemgetter(0)))


def _mirrored_parts(message: Callable[[int], Parts], reply: Reply, fixed: Collection[str]) -> Parts:
    """What was sent to a client, for the parts of its update that have the same form."""
    broadcast = message(reply.client)
    buffers = broadcast.get("buffers", {})
    floats = {k: v for k, v in buffers.items() if v.is_floating_point() or v.is_complex()}
    counters = {k: v for k, v in buffers.items() if k not in floats}
    # What goes out and comes back by one name has one form, as SCAFFOLD's controls.
    others = {k: v for k, v in broadcast.items() if k not in ("params", "buffers")}
    delta = {k: v for k, v in broadcast.get("params", {}).items() if k not in fixed}
    mirrors = others | {"delta": delta, "buffers": floats, "counters": counters}
    return {part: tree for part, tree in mirrors.items() if part in reply.update}


def failure(update: Parts) -> str | None:
    """Why a client failed, in one line of at most 500 letters; None where it did not say so."""
    if FAILED not in update:
        return None
    reason = update[FAILED].get("reason", torch.zeros(0, dtype=torch.uint8))
    text = bytes(reason.flatten().to(torch.uint8).tolist()[:2000]).decode(errors="replace")
    return " ".join(text.split())[:500] or "no reason given"


def alike(update: Parts, plain: Parts) -> bool:
    """Whether an update has the parts, names, shapes and types of one that `odd_kind` let pass, and
    would pass there itself.
    """
    if type(update) is not dict or update.keys() != plain.keys():
        return False
    for part, tree in update.items():
        like = plain[part]
        if type(tree) is not dict or tree.keys() != like.keys():
            return False
        for name, v in tree.items():
            # Only ordinary tensors of torch are checked further.
            if type(v) is not Tensor or v.layout != torch.strided or v.requires_grad or v.is_nested:
                return False
            other = like[name]
            if v.shape != other.shape or v.dtype != other.dtype or v.is_meta:
                return False
    return True


def odd_kind(update: Parts) -> str:
    """What of an update or state is not parts of plain tensors, in a few words; empty if nothing.

    Plain is dense and without a gradient's history, which would grow with every round.
    """
    if not isinstance(update, dict) or not all(isinstance(t, dict) for t in update.values()):
        return "what is not parts of named tensors"
    for name, v in flatten(update).items():
        if not isinstance(v, Tensor):
            return f'"{name}", which is no tensor but {type(v).__name__}'
        if v.layout != torch.strided or v.is_meta:
            return f'"{name}", which is not dense'
        if v.requires_grad:
            return f'"{name}" with the history of its gradient; detach() it'
    return ""


def misshapen(arrivals: Sequence[Came], expected: Parts) -> dict[int, str]:
    """Why updates have not the form that is expected, by client; those that have it are left out.

    Each look is looked at once.
    """
    odd = {k for k, like in _distinct(arrivals).items() if not same_parts(like.update, expected)}
    return {
        one.reply.client: _odd_form(one.reply, expected) for one in arrivals if id(one.like) in odd
    }


def _odd_form(reply: Reply, expected: Parts) -> str:
    for part in expected | reply.update:
        ours, theirs = reply.update.get(part), expected.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            return f'client {reply.client} sent an update with a different "{part}"'
        for name, v in ours.items():
            if v.shape != theirs[name].shape or v.dtype != theirs[name].dtype:
                return (
                    f'client {reply.client} sent "{part}/{name}" as {v.dtype} {tuple(v.shape)}, '
                    f"expected {theirs[name].dtype} {tuple(theirs[name].shape)}"
                )
    return ""


def check_reply(
    reply: Reply, message: Callable[[int], Parts], summed: Collection[str] = (),
    infinite: Params | None = None,
) -> None:  # fmt: skip
    """`check_finite`, for the parts that are not `summed`, and `check_said`."""
    unsummed = {part: tree for part, tree in reply.update.items() if part not in summed}
    check_finite(Reply(reply.client, unsummed, reply.changed), infinite)
    check_said(reply, message)


def check_finite(reply: Reply, infinite: Params | None = None) -> None:
    """Raise DivergedError for non-finite numbers in what a client sends, or would keep.

    But for buffers of the names and numbers of `infinite`: training has not made them.

    What a client keeps must be finite too: a personal model may diverge without a word of it in
    the update, and would be served.
    """
    if odd := _not_finite(reply.update, infinite or {}):
        raise DivergedError(
            f'client {reply.client} sent non-finite numbers in "{odd}": its '
            "training diverged. Lower the learning rate, or look at this client's data"
        )
    if odd := _not_finite(reply.changed, infinite or {}):
        raise DivergedError(
            f'client {reply.client} would keep non-finite numbers in "{odd}": its own model '
            "diverged. Lower the learning rate, or the strength of what pulls on this model"
        )


def not_finite(tree: Params) -> Params:
    """The entries that hold NaN or infinity."""
    return {name: v for name, v in tree.items() if not finite(v)}


def _not_finite(parts: Parts, infinite: Params) -> str:
    """The first tensor that is not finite; empty if all are."""
    # Anything but a tree of tensors fails before its numbers are checked.
    leaves = [(part, name, v) for part, tree in parts.items() for name, v in tree.items()]
    for part, name, v in leaves:
        constant = name in infinite and part.endswith("buffers") and _same(v, infinite[name])
        if not (constant or finite(v)):
            return f"{part}/{name}"
    return ""


def check_said(reply: Reply, message: Callable[[int], Parts]) -> None:
    """Raise TrainingError for another client's report, and for counters that went astray.

    Counters are not negative, nor more than `MOST_BATCHES` above those that were sent; they may be
    below, where a client goes on from a model of its own.
    """
    client_id = reply.update.get("report", {}).get("id")
    if client_id is not None and (client_id.numel() != 1 or client_id.is_floating_point()):
        raise TrainingError(f"client {reply.client} sent an id that is no whole number")
    if client_id is not None and int(client_id) != reply.client:
        raise TrainingError(f"client {reply.client} says that it is client {int(client_id)}")
    counters = reply.update.get("counters", {})
    before = message(reply.client).get("buffers", {}) if counters else {}
    for name, v in counters.items():
        most = before.get(name, torch.zeros_like(v)).long() + MOST_BATCHES
        odd = bool((v.long() < 0).any()) or bool((v.long() > most).any())
        if odd and not (name in before and _same(v, before[name])):  # constants may be anything
            raise TrainingError(
                f'client {reply.client} sent "counters/{name}" = {v.flatten()[:3].tolist()}, '
                "which is no count of batches"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all entries are the same, NaN like NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def finite(v: Tensor) -> bool:
    """Whether all entries are finite."""
    if v.is_complex():
        return bool(torch.isfinite(v).all())
    if not v.is_floating_point():
        return True
    if v.numel() == 1 and v.dtype in PLAIN:
        return math.isfinite(v.item())
    # NaN and infinity survive a sum, which is several times faster than a look at each entry; a
    # sum of finite numbers may overflow, then each is looked at.
    return math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all())
