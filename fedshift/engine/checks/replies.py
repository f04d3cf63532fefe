"""What a reply must be before it is used: the one place that looks at replies, for every engine.

Nothing that a reply says about its own weight is read: weights come from the server's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Dropped, Gate, Kind
from fedshift.errors import DivergedError, InputError, TrainingError, from_elsewhere
from fedshift.tree import Params, Parts

# How much a counter (of batches that running statistics have seen) may grow in one round.
MOST_BATCHES = 1_000_000
DIVERGED = "non-finite numbers"

# How an update looks: part -> name -> (shape, type).
Form = dict[str, dict[str, tuple[torch.Size, torch.dtype]]]


class Limits(NamedTuple):
    """What the replies of round t must keep to.

    message   what each client was sent
    infinite  buffers that were not finite before round 1; they pass where they are still the same
    """

    t: int
    gate: Gate
    message: Callable[[int], Parts]
    infinite: Params


def in_order(replies: Iterable[Reply], clients: Sequence[int]) -> Iterator[Reply | Dropped]:
    """One reply of each client, ascending, or why there is none; and at once what is too many."""
    if not isinstance(replies, Iterable):
        raise InputError(
            f"the backend gave {called(replies)}; it yields work(stage, job) for each job"
        )
    due, asked = iter(clients), frozenset(clients)
    waiting, seen, client = dict[int, Reply](), set[int](), next(due, None)
    for reply in replies:
        if not isinstance(reply, Reply):
            raise InputError(
                f"the backend gave {called(reply)}, no Reply; it yields work(stage, job) "
                "for each job"
            )
        who = reply.client
        if who not in asked or who in seen:
            why = "answered twice" if who in seen else "was not asked"
            yield Dropped(who, f"client {who} {why}", "reply")
            continue
        seen.add(who)
        waiting[who] = reply
        del reply  # so that its memory is free while the next client trains
        while client in waiting:
            yield waiting.pop(client)
            client = next(due, None)
    while client is not None:
        yield waiting.pop(client, Dropped(client, "no answer in time", "timeout"))
        client = next(due, None)


def fault_in(reply: Reply, form: Form | None, limits: Limits) -> Dropped | None:
    """Why a reply cannot be used; None if it can. form: that of an update, if it is known yet."""
    client, gate = reply.client, limits.gate

    def fault(why: str, kind: Kind = "reply") -> Dropped:
        # Reasons may quote names that a client chose.
        return Dropped(client, from_elsewhere(f"client {client} {why}"), kind)

    if reply.t != limits.t:
        return fault(f"answers round {reply.t}; this is round {limits.t}", "late")
    if reply.failed:
        return fault(f"failed: {' '.join(reply.failed.split())[:500]}", "error")
    for parts, did in ((reply.update, "sent"), (reply.changed, "would keep")):
        if odd := unplain(parts):
            return fault(f"{did} {odd}")
    size = sum(v.nbytes for tree in reply.update.values() for v in tree.values())
    if size > gate.max_bytes:
        return fault(f"sent {size} bytes; allowed: {gate.max_bytes}")
    if form is not None and (why := _misshapen(reply.update, form)):
        return fault(why)
    try:
        if odd := _not_finite(reply.update, limits.infinite):
            return fault(
                f'sent {DIVERGED} in "{odd}": its training diverged. Lower the learning rate, or '
                "look at this client's data"
            )
        if odd := _not_finite(reply.changed, limits.infinite):
            return fault(
                f'would keep {DIVERGED} in "{odd}": its own model diverged. Lower the learning '
                "rate, or the strength of what pulls on this model"
            )
        if why := _false_report(reply, limits.message):
            return fault(why)
        if gate.max_norm < math.inf:
            norm = norm_of(reply.update.get("delta", {}))
            if not norm <= gate.max_norm:
                return fault(
                    f"sent a change of norm {norm:.4g}, above max_norm = {gate.max_norm:g}"
                )
    except (RuntimeError, TypeError, ValueError) as e:
        return fault(f"sent numbers that cannot be read: {e}")  # torch cannot sum some types
    return None


def error_of(bad: Dropped) -> TrainingError:
    """The error that ends a run for a bad reply: DivergedError if its numbers are not finite."""
    return (DivergedError if DIVERGED in bad.reason else TrainingError)(bad.reason)


def usual_form(
    replies: Sequence[Reply], message: Parts, parts: Collection[str], fixed: Collection[str]
) -> Form:
    """What an update of this round looks like, by what clients were sent and the most replies.

    Parts that come back as they were sent, such as the change of the model, look like what was sent
    (not like the server's model: clients may get only some rows of a layer). For all other parts
    the majority decides. Forms that match what was sent, and have none but the method's `parts`
    (any, where these are not known), go before a majority; of two equal ones that with more parts.

    fixed: parameters that do not come back.
    """
    sent = _sent_back(message, fixed)
    forms, counts = list[Form](), list[int]()
    for reply in replies:
        form = {
            part: {k: (v.shape, v.dtype) for k, v in tree.items()}
            for part, tree in reply.update.items()
        }
        if form not in forms:
            forms.append(form)
            counts.append(0)
        counts[forms.index(form)] += 1

    def worth(i: int) -> tuple[bool, int, int, int]:
        form = forms[i]
        fits = not parts or form.keys() <= set(parts)
        fits = fits and all(form[part] == sent[part] for part in sent.keys() & form.keys())
        return fits, counts[i], len(form), -i

    usual = forms[max(range(len(forms)), key=worth)]
    return {
        part: sent.get(part, tree)
        for part, tree in usual.items()
        if not parts or part in parts or part in sent
    }


def _sent_back(message: Parts, fixed: Collection[str]) -> Form:
    """The form of the parts that come back in the form in which they were sent."""
    buffers = message.get("buffers", {})
    floats = {k: v for k, v in buffers.items() if v.is_floating_point() or v.is_complex()}
    counters = {k: v for k, v in buffers.items() if k not in floats}
    # A part of the same name both ways has the same form, such as SCAFFOLD's control variates.
    others = {k: v for k, v in message.items() if k not in ("params", "buffers")}
    delta = {k: v for k, v in message.get("params", {}).items() if k not in fixed}
    sent = others | {"delta": delta, "buffers": floats, "counters": counters}
    return {part: {k: (v.shape, v.dtype) for k, v in tree.items()} for part, tree in sent.items()}


def unplain(parts: object) -> str:
    """What is no named, plain tensor among the parts; empty if all are.

    Plain: dense, and without a gradient's history, which would grow with every round.
    """
    if not isinstance(parts, dict) or not all(isinstance(v, dict) for v in parts.values()):
        return "what is not parts of named tensors"
    for part, tree in parts.items():
        for name, v in tree.items():
            if not isinstance(v, Tensor):
                return f'"{part}/{name}", which is no tensor but {type(v).__name__}'
            if v.layout is not torch.strided or v.is_meta or v.is_nested:
                return f'"{part}/{name}", which is not dense'
            if v.requires_grad:
                return (
                    f'"{part}/{name}" with the history of its gradient (requires_grad); '
                    "give v.detach()"
                )
    return ""


def _misshapen(update: Parts, form: Form) -> str:
    """How an update differs from the form; empty if it does not."""
    for part in form | update:
        ours, theirs = update.get(part), form.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            return f'sent an update with a different "{part}"'
        for name, v in ours.items():
            shape, kind = theirs[name]
            if v.shape != shape or v.dtype != kind:
                return (
                    f'sent "{part}/{name}" as {v.dtype} {tuple(v.shape)}, '
                    f"expected {kind} {tuple(shape)}"
                )
    return ""


def _not_finite(parts: Parts, infinite: Params) -> str:
    """The first tensor that is not finite, and is no buffer that was so from the start."""
    for part, tree in parts.items():
        for name, v in tree.items():
            if finite(v):
                continue
            before = infinite.get(name) if part.endswith("buffers") else None
            if before is None or not _same(v, before):
                return f"{part}/{name}"
    return ""


def _false_report(reply: Reply, message: Callable[[int], Parts]) -> str:
    """Another client's id in a report, or impossible counters; empty if there is none.

    A counter must not be negative, nor more than `MOST_BATCHES` above the one that was sent. It may
    be below, where a client goes on from a model of its own.
    """
    claimed = reply.update.get("report", {}).get("id")
    if claimed is not None:
        if claimed.numel() != 1 or claimed.is_floating_point():
            return "sent an id that is no whole number"
        if int(claimed) != reply.client:
            return f"says that it is client {int(claimed)}"
    counters = reply.update.get("counters", {})
    sent = message(reply.client).get("buffers", {}) if counters else {}
    for name, v in counters.items():
        before = sent.get(name)
        most = (torch.zeros_like(v) if before is None else before).long() + MOST_BATCHES
        odd = bool((v.long() < 0).any()) or bool((v.long() > most).any())
        # An integer buffer that training leaves alone may hold anything: it need not be a counter.
        if odd and (before is None or not _same(v, before)):
            return (
                f'sent "counters/{name}" = {v.flatten()[:3].tolist()}, which is no count of batches'
            )
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all entries are equal; NaN equals NaN here."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def finite(v: Tensor) -> bool:
    """Whether all entries are finite."""
    if v.is_complex():
        return bool(torch.isfinite(v).all())
    if not v.is_floating_point():
        return True
    # NaN and infinity survive a sum, which is several times faster than a test of each entry. A sum
    # of finite numbers may overflow, though: then the entries are tested.
    return math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all())


def not_finite(tree: Params) -> Params:
    """The entries that hold NaN or infinity."""
    return {name: v for name, v in tree.items() if not finite(v)}


def norm_of(change: Params) -> float:
    """The Euclidean norm over all tensors, in float64."""
    real = (torch.view_as_real(v) if v.is_complex() else v for v in change.values())
    return math.sqrt(sum(float(v.double().square().sum()) for v in real))
