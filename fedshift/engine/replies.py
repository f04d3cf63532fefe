"""What a reply must look like: names, types, shapes, and numbers that are finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from fedshift.engine.backends import Reply
from fedshift.errors import DivergedError, TrainingError
from fedshift.model import split_buffers
from fedshift.tree import Parts, flatten

Form = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
# By how much counters (batches that running statistics have seen) may grow in one round.
MOST_BATCHES = 1_000_000


def expected_update(
    message: Callable[[int], Parts], replies: Sequence[Reply], parts: Collection[str] = ()
) -> Parts:
    """What an update must look like: the model that was sent for what mirrors it.

    The model that was sent, not the server's: clients may receive only rows of a layer. For all
    else, the form that most replies have, so that one odd client does not make the others look odd;
    forms that mirror what was sent, and hold none but the method's `parts` (any if left out), come
    first, and of two equals the one with more parts. `message` gives what a client was sent.
    """
    forms = [_form(reply) for reply in replies]
    counts = Counter(forms)

    def worth(form: Form) -> tuple[bool, int, int, int]:
        i = forms.index(form)
        told = replies[i].update
        fits = not parts or set(told) <= set(parts)
        fits = fits and all(_same(told[k], v) for k, v in _mirrors(message, replies[i]).items())
        return fits, counts[form], len(told), -i

    usual = replies[forms.index(max(counts, key=worth))]
    known = {k: v for k, v in usual.update.items() if not parts or k in parts}
    return {**known, **_mirrors(message, usual)}


def _form(reply: Reply) -> Form:
    flat = flatten(reply.update).items()
    return tuple((k, tuple(v.shape), v.dtype) for k, v in sorted(flat, key=itemgetter(0)))


def _mirrors(message: Callable[[int], Parts], reply: Reply) -> Parts:
    """What was sent to a client, for the parts of its update that have the same form."""
    sent = message(reply.client)
    floats, counters = split_buffers(sent.get("buffers", {}))
    # What goes out and comes back by one name has one form, as SCAFFOLD's controls.
    others = {k: v for k, v in sent.items() if k not in ("params", "buffers")}
    mirrors = others | {"delta": sent.get("params", {}), "buffers": floats, "counters": counters}
    return {part: tree for part, tree in mirrors.items() if part in reply.update}


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        v.shape == theirs[k].shape and v.dtype == theirs[k].dtype for k, v in ours.items()
    )


def odd_kind(update: Parts) -> str:
    """What of an update is not parts of plain tensors, in a few words; empty if nothing is.

    Plain is dense and without a gradient's history, which would grow with every round.
    """
    if not isinstance(update, dict) or not all(isinstance(t, dict) for t in update.values()):
        return "an update that is not parts of named tensors"
    for name, v in flatten(update).items():
        if not isinstance(v, Tensor):
            return f'"{name}", which is no tensor but {type(v).__name__}'
        if v.layout != torch.strided or v.is_meta:
            return f'"{name}", which is not dense'
        if v.requires_grad:
            return f'"{name}" with the history of its gradient; detach() what leaves a client'
    return ""


def check_reply(reply: Reply, expected: Parts) -> None:
    """Raise TrainingError, naming the client, for a misshapen or non-finite update.

    What a client keeps must be finite too: a personal model may diverge without a word of it in
    the update, and would be served.
    """
    for part in expected | reply.update:
        ours, theirs = reply.update.get(part), expected.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            raise TrainingError(f'client {reply.client} sent an update with a different "{part}"')
        for name, v in ours.items():
            if v.shape != theirs[name].shape or v.dtype != theirs[name].dtype:
                raise TrainingError(
                    f'client {reply.client} sent "{part}/{name}" as {v.dtype} {tuple(v.shape)}, '
                    f"expected {theirs[name].dtype} {tuple(theirs[name].shape)}"
                )
    check_finite(reply)


def check_finite(reply: Reply) -> None:
    """Raise DivergedError for non-finite numbers in what a client sends, or would keep."""
    for name, v in flatten(reply.update).items():
        if not finite(v):
            raise DivergedError(
                f'client {reply.client} sent non-finite numbers in "{name}": its '
                "training diverged. Lower the learning rate, or look at this client's data"
            )
    for name, v in flatten(reply.changed).items():
        if not finite(v):
            raise DivergedError(
                f'client {reply.client} would keep non-finite numbers in "{name}": its own model '
                "diverged. Lower the learning rate, or the strength of what pulls on this model"
            )


def check_said(reply: Reply, message: Callable[[int], Parts]) -> None:
    """Raise TrainingError for another client's report, and for counters that went astray.

    Counters are not negative, nor more than `MOST_BATCHES` above those that were sent; they may be
    below, where a client goes on from a model of its own.
    """
    told = reply.update.get("report", {}).get("id")
    if told is not None and (told.numel() != 1 or told.is_floating_point()):
        raise TrainingError(f"client {reply.client} sent an id that is no whole number")
    if told is not None and int(told) != reply.client:
        raise TrainingError(f"client {reply.client} says that it is client {int(told)}")
    counters = reply.update.get("counters", {})
    before = message(reply.client).get("buffers", {}) if counters else {}
    for name, v in counters.items():
        most = before.get(name, torch.zeros_like(v)) + MOST_BATCHES
        if bool((v < 0).any()) or bool((v > most).any()):
            raise TrainingError(
                f'client {reply.client} sent "counters/{name}" = {v.flatten()[:3].tolist()}, '
                "which is no count of batches"
            )


def finite(v: Tensor) -> bool:
    """Whether all entries are finite."""
    # NaN and infinity survive a sum, which is several times faster than a look at each entry; a
    # sum of finite numbers may overflow, then each is looked at.
    if not (v.is_floating_point() or v.is_complex()):
        return True
    return math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all())
