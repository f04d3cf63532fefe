"""What a reply must look like: names, types, shapes, and numbers that are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fedshift.engine.backends import FAILED, UNSEEN, Block, Look, Reply
from fedshift.errors import DivergedError, TrainingError
from fedshift.tree import Params, Parts

# How much a counter (of batches that running statistics have seen) may grow in one round.
MOST_BATCHES = 1_000_000
# Types of which a single number is read directly, which is faster than a sum of one.
PLAIN = (torch.float32, torch.float64)


def block_of(reply: Reply | Block) -> Block:
    """The engine's one door: a reply becomes a block that records how its update looks.

    One that is no dictionary of plain tensors becomes a block without tensors, and `odd` says why.
    """
    if isinstance(reply, Block) and reply.look is not UNSEEN:
        return reply  # it has been here already, most often in a worker
    clients = reply.clients if isinstance(reply, Block) else (reply.client,)
    updates = reply.updates if isinstance(reply, Block) else reply.update
    for parts, did in ((reply.changed, "would keep"), (updates, "sent")):
        look, odd = inspect_parts(parts, several=len(clients) > 1)
        if odd:
            return Block(clients, {}, {}, reply.t, {}, odd=f"{did} {odd}")
    return Block(clients, updates, reply.changed, reply.t, look)


def inspect_parts(parts: Parts, *, several: bool = False) -> tuple[Look, str]:
    """(shapes and types of each client's tensors, what is wrong with them or "").

    They must be plain: dense, and without a gradient's history, which would grow with every round.
    One walk finds out both, because replies are often small and many. several: the tensors are
    [C, ...], of C clients.
    """
    look: Look = {}
    if not isinstance(parts, dict):
        return look, "what is not parts of named tensors"
    for part, tree in parts.items():
        if not isinstance(tree, dict):
            return look, "what is not parts of named tensors"
        leaves = look[part] = {}
        for name, v in tree.items():
            if odd := _odd_kind(v):
                return look, f'"{part}/{name}"{odd}'
            leaves[name] = (v.shape[1:] if several else v.shape, v.dtype)
    return look, ""


def _odd_kind(v: object) -> str:
    """What is wrong with something that is no plain tensor; empty if it is one."""
    if not isinstance(v, Tensor):
        return f", which is no tensor but {type(v).__name__}"
    if v.layout is not torch.strided or v.is_meta or v.is_nested:
        return ", which is not dense"
    return " with the history of its gradient; detach() it" if v.requires_grad else ""


def expected_look(
    message: Callable[[int], Parts], blocks: Sequence[Block], parts: Collection[str] = (),
    fixed: Collection[str] = (),
) -> Look:  # fmt: skip
    """What an update of this round must look like.

    Parts that come back as they were sent, such as the change of the model, must look like what the
    client was sent (not like the server's model: a client may get only some rows of a layer). For
    all other parts the majority decides, so that one odd client does not make the others look odd.
    Looks that match what was sent, and have none but the method's `parts` (any, where these are not
    known), are preferred to a majority; of two equal ones the look with more parts wins.

    message gives what a client was sent. fixed: parameters that do not come back.
    """
    looks = [block.look for block in blocks]

    def mirrored(i: int) -> Look:
        sent = _mirrored_parts(message(blocks[i].clients[0]), fixed)
        return {part: tree for part, tree in sent.items() if part in looks[i]}

    def worth(i: int) -> tuple[bool, int, int, int]:
        look = looks[i]
        fits = not parts or set(look) <= set(parts)
        fits = fits and all(look[part] == tree for part, tree in mirrored(i).items())
        alike = zip(blocks, looks, strict=True)
        count = sum(len(block.clients) for block, other in alike if other == look)
        return fits, count, len(look), -i

    firsts = [i for i, look in enumerate(looks) if looks.index(look) == i]
    usual = firsts[0] if len(firsts) == 1 else max(firsts, key=worth)
    relevant = {part: tree for part, tree in looks[usual].items() if not parts or part in parts}
    return {**relevant, **mirrored(usual)}


def _mirrored_parts(message: Parts, fixed: Collection[str]) -> Look:
    """The look of the parts that come back in the form in which they were sent."""
    buffers = message.get("buffers", {})
    floats = {k: v for k, v in buffers.items() if v.is_floating_point() or v.is_complex()}
    counters = {k: v for k, v in buffers.items() if k not in floats}
    # A part of the same name both ways has the same form, such as SCAFFOLD's control variates.
    others = {k: v for k, v in message.items() if k not in ("params", "buffers")}
    delta = {k: v for k, v in message.get("params", {}).items() if k not in fixed}
    sent = others | {"delta": delta, "buffers": floats, "counters": counters}
    return {part: {k: (v.shape, v.dtype) for k, v in tree.items()} for part, tree in sent.items()}


def failure(update: Parts) -> str | None:
    """The reason that a failed client gave, at most 500 characters; None if it did not fail."""
    if FAILED not in update:
        return None
    reason = update[FAILED].get("reason", torch.zeros(0, dtype=torch.uint8))
    text = bytes(reason.flatten().to(torch.uint8).tolist()[:2000]).decode(errors="replace")
    return " ".join(text.split())[:500] or "no reason given"


def misshapen(block: Block, expected: Look) -> str:
    """How an update differs from the expected look; empty if it does not."""
    client, look = block.clients[0], block.look
    for part in () if look == expected else expected | look:
        ours, theirs = look.get(part), expected.get(part)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            return f'client {client} sent an update with a different "{part}"'
        for name, (shape, kind) in ours.items():
            if ours[name] != theirs[name]:
                return (
                    f'client {client} sent "{part}/{name}" as {kind} {tuple(shape)}, '
                    f"expected {theirs[name][1]} {tuple(theirs[name][0])}"
                )
    return ""


def check_reply(
    block: Block, message: Callable[[int], Parts], summed: Collection[str] = (),
    infinite: Params | None = None,
) -> None:  # fmt: skip
    """`check_finite`, but for the parts that are `summed`, and `check_report`."""
    check_finite(block, infinite, summed)
    check_report(block, message)


def check_finite(
    block: Block, infinite: Params | None = None, summed: Collection[str] = ()
) -> None:
    """Raise DivergedError for numbers that are not finite in what clients send or would keep.

    States are checked too, because a personal model may diverge while the update stays finite, and
    would be served. Buffers pass where they equal those of `infinite`, which training has not made.
    The error names the block's first client: blocks of several are taken apart before the fault is
    reported. Raises TrainingError for what is no plain tensor.
    """
    client = block.clients[0]
    if block.odd:
        raise TrainingError(f"client {client} {block.odd}")
    if odd := _not_finite(block, block.updates, infinite, summed):
        raise DivergedError(
            f'client {client} sent non-finite numbers in "{odd}": its '
            "training diverged. Lower the learning rate, or look at this client's data"
        )
    if odd := _not_finite(block, block.changed, infinite):
        raise DivergedError(
            f'client {client} would keep non-finite numbers in "{odd}": its own model '
            "diverged. Lower the learning rate, or the strength of what pulls on this model"
        )


def not_finite(tree: Params) -> Params:
    """The entries that hold NaN or infinity."""
    return {name: v for name, v in tree.items() if not finite(v)}


def _not_finite(
    block: Block, parts: Parts, infinite: Params | None, summed: Collection[str] = ()
) -> str:
    """The first tensor of the block's parts that is not finite; empty if all are."""
    for part, tree in parts.items():
        for name, v in () if part in summed else tree.items():
            if finite(v):
                continue
            before = (infinite or {}).get(name) if part.endswith("buffers") else None
            if before is None or not all(_same(row, before) for row in block.rows(v)):
                return f"{part}/{name}"
    return ""


def check_report(block: Block, message: Callable[[int], Parts]) -> None:
    """Raise TrainingError for another client's id in a report, and for impossible counters.

    A counter must not be negative, nor more than `MOST_BATCHES` above the one that was sent. It may
    be below, where a client goes on from a model of its own.
    """
    ids = block.updates.get("report", {}).get("id")
    if ids is not None:
        if ids.numel() != len(block.clients) or ids.is_floating_point():
            raise TrainingError(f"client {block.clients[0]} sent an id that is no whole number")
        for client, claimed in zip(block.clients, ids.flatten().tolist(), strict=True):
            if claimed != client:
                raise TrainingError(f"client {client} says that it is client {int(claimed)}")
    counters = block.updates.get("counters", {})
    for i, client in enumerate(block.clients if counters else ()):
        before = message(client).get("buffers", {})
        for name, v in counters.items():
            _check_counter(client, name, block.rows(v)[i], before.get(name))


def _check_counter(client: int, name: str, v: Tensor, before: Tensor | None) -> None:
    most = (torch.zeros_like(v) if before is None else before).long() + MOST_BATCHES
    odd = bool((v.long() < 0).any()) or bool((v.long() > most).any())
    # An integer buffer that training leaves alone may hold anything: it need not be a counter.
    if odd and (before is None or not _same(v, before)):
        raise TrainingError(
            f'client {client} sent "counters/{name}" = {v.flatten()[:3].tolist()}, '
            "which is no count of batches"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether all entries are equal; NaN equals NaN here."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def finite(v: Tensor) -> bool:
    """Whether all entries are finite."""
    if v.is_complex():
        return bool(torch.isfinite(v).all())
    if not v.is_floating_point():
        return True
    if v.numel() == 1 and v.dtype in PLAIN:
        return math.isfinite(v.item())
    # NaN and infinity survive a sum, which is several times faster than a test of each entry. A sum
    # of finite numbers may overflow, though: then the entries are tested.
    return math.isfinite(v.sum().item()) or bool(torch.isfinite(v).all())
