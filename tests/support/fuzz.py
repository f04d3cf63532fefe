"""Rounds with randomly changed replies, to test what the gate accepts and what the server does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.engine.backends import Job, Reply, Stage, loop
from fedshift.engine.checks.gate import Gate
from fedshift.engine.round import Opened, Round, admit, close_round, open_round
from fedshift.engine.run import Federation, first_state, start
from fedshift.errors import InputError
from fedshift.seeds import numpy_generator
from fedshift.testing.attacks import ATTACKS, spoil
from fedshift.tree import Parts, flatten

# Numbers on which decoders, sums and comparisons often fail.
ODD = (
    np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 1e-310, 3.4028234e38, -3.4028234e38, 1e300,
    1.0, -1.0, 2.0**31, 2.0**63, 255.0,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Arena:
    """One round of a federation with every client's honest reply, to be settled again and again.

    Raises InputError for a gate that stops at the first bad reply.
    """

    opened: Opened
    server: Parts
    gate: Gate
    federation: Federation
    honest: tuple[Reply, ...]

    def __post_init__(self) -> None:
        if self.gate.on_bad == "stop":
            raise InputError('an arena needs a gate that drops: Gate(on_bad="drop")')

    def settled(self, replies: Sequence[Reply]) -> Round:
        """The round with these replies."""
        good, bad = admit(replies, self.opened, self.gate, {})
        table, seed = self.federation.table, self.federation.seeds.batch
        return close_round(self.opened, self.server, good, bad, self.gate, table, seed)


def arena(algorithm: Method, federation: Federation, gate: Gate) -> Arena:
    """Round 1 of a federation, in which all clients train once."""
    server = start(algorithm, federation).server
    clients, seed = federation.clients, federation.seeds.batch
    opened = open_round(algorithm, server, torch.arange(len(clients)), 1, gate.max_weight)
    jobs = (
        Job(i, 1, opened.message(i), first_state(algorithm, federation, i))
        for i in opened.clients()
    )
    honest = tuple(loop(Stage(algorithm, 1, clients, seed), jobs))
    return Arena(opened, server, gate, federation, honest)


@dataclass(frozen=True)
class Tally:
    """The number of fuzzed replies, how many were accepted, and what went wrong."""

    replies: int
    used: int
    broken: tuple[str, ...]


def fuzz(place: Arena, replies: int, seed: int) -> Tally:
    """Try at least `replies` fuzzed replies, from one to half of a round's clients at a time.

    A round counts as broken if it raises an error, is skipped although honest clients are left, or
    drops an honest client; if its server has other names, shapes or types, or numbers that are not
    finite; or if the server differs in any bit from that of the round without the dropped clients.
    """
    rng, references = numpy_generator(seed, "fuzz"), dict[frozenset[int], Parts]()
    done, used, broken = 0, 0, list[str]()
    while done < replies:
        # At most half, so that the honest clients can complete the round.
        count = 1 + int(rng.integers(max(1, (len(place.honest) - 1) // 2)))
        touched = {int(i) for i in rng.choice(len(place.honest), count, replace=False)}
        arriving: list[Reply] = []
        for i, reply in enumerate(place.honest):
            arriving += fuzzed(reply, rng) if i in touched else [reply]
        # Shuffle, because the result must not depend on the order of arrival.
        order = rng.permutation(len(arriving)).tolist()
        clients = {place.honest[i].client for i in touched}
        accepted, wrong = _judge(place, [arriving[i] for i in order], clients, references)
        broken += wrong
        done, used = done + count, used + accepted
    return Tally(done, used, tuple(broken))


def _judge(
    place: Arena,
    arriving: Sequence[Reply],
    touched: set[int],
    references: dict[frozenset[int], Parts],
) -> tuple[int, list[str]]:
    """(how many of the touched clients were accepted, what is wrong with the round)."""
    try:
        played = place.settled(arriving)
    except Exception as e:
        return 0, [f"{type(e).__name__}: {e}"]
    dropped = frozenset(drop.client for drop in played.dropped)
    accepted = touched - dropped
    wrong = [f"honest client {i} dropped" for i in sorted(dropped - touched)]
    wrong += [f"skipped: {played.skipped}"] if played.skipped else []
    wrong += list(_odd(played.server, place.server))
    if not accepted and not wrong:
        # Cached by the set of dropped clients: many fuzzed rounds drop the same ones.
        if dropped not in references:
            rest = [reply for reply in place.honest if reply.client not in dropped]
            references[dropped] = place.settled(rest).server
        wrong += [f"{name} differs" for name in different(played.server, references[dropped])]
    return len(accepted), wrong


def different(a: Parts, b: Parts) -> list[str]:
    """The names of tensors in which two servers differ, in type, shape or any bit."""
    x, y = flatten(a), flatten(b)
    changed = [
        k for k in x.keys() & y.keys() if x[k].dtype != y[k].dtype or not torch.equal(x[k], y[k])
    ]
    return sorted([*(x.keys() ^ y.keys()), *changed])


def _odd(after: Parts, before: Parts) -> Iterator[str]:
    """What is wrong with the server's tensors after a round: other forms, or not finite."""
    x, y = flatten(after), flatten(before)
    yield from sorted(x.keys() ^ y.keys())
    for k in x.keys() & y.keys():
        if x[k].shape != y[k].shape or x[k].dtype != y[k].dtype:
            yield f"{k} is now {x[k].dtype} {tuple(x[k].shape)}"
        elif not bool(torch.isfinite(x[k]).all()):
            yield f"{k} is not finite"


def fuzzed(reply: Reply, rng: np.random.Generator) -> list[Reply]:
    """The replies instead of one: an attack of the table, or one to three random changes.

    A reply may happen to stay the same; the gate must then accept it.
    """
    if rng.random() < 0.2:
        name = _pick(rng, list(ATTACKS))
        try:
            return list(spoil(name, reply, int(rng.integers(2**62))))
        except InputError:  # an update without that part
            return [reply]
    for _ in range(1 + int(rng.integers(3))):
        reply = reply._replace(update=_mutate(reply.update, rng))
    # Change the round, too: it is checked before any tensor.
    if rng.random() < 0.1:
        reply = reply._replace(t=reply.t + int(rng.integers(-3, 4)))
    return [reply] * (2 if rng.random() < 0.05 else 1)


def _pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _mutate(update: Parts, rng: np.random.Generator) -> Parts:
    """Change one tensor: its numbers, shape or type, its name, or its part."""
    places = [(part, name) for part, tree in update.items() for name in tree]
    if not places:
        return {"delta": {"x": torch.zeros(1)}}
    part, name = _pick(rng, places)
    kind = int(rng.integers(8))
    if kind < 5:
        v = (_numbers, _bits, _scaled, _reshaped, _retyped)[kind](update[part][name], rng)
        return {**update, part: {**update[part], name: v}}
    tree = {k: v for k, v in update[part].items() if k != name}
    if kind == 5:
        return {**update, part: tree}
    other = _pick(rng, places)[rng.integers(2)]
    moved = {**tree, str(other) * int(rng.integers(3)): update[part][name]}
    target = part if kind == 6 else _pick(rng, ["delta", "buffers", "report", "control", "table"])
    return {**update, part: tree, target: {**update.get(target, {}), **moved}}


def _numbers(v: Tensor, rng: np.random.Generator) -> Tensor:
    if not v.numel():
        return v
    v, number = v.contiguous().clone(), _pick(rng, ODD)
    if not v.is_floating_point():
        number = float(np.clip(np.nan_to_num(number), -(2.0**30), 2.0**30))
    # As a float64 tensor: assigning a Python number too large for float32 would raise an error.
    v.view(-1)[int(rng.integers(v.numel()))] = torch.tensor(number, dtype=torch.float64)
    return v


def _bits(v: Tensor, rng: np.random.Generator) -> Tensor:
    """Flip one bit."""
    if not v.numel() or v.dtype == torch.bool:
        return v
    # View the tensor as bytes, so that bits of exponents and signs are flipped as well.
    v = v.contiguous().clone()
    raw = v.view(-1).view(torch.uint8)
    raw[int(rng.integers(raw.numel()))] ^= 1 << int(rng.integers(8))
    return v


def _scaled(v: Tensor, rng: np.random.Generator) -> Tensor:
    return v * 10.0 ** float(rng.uniform(-50, 50)) if v.is_floating_point() else v


def _reshaped(v: Tensor, rng: np.random.Generator) -> Tensor:
    changes: Sequence[Callable[[Tensor], Tensor]] = (
        lambda v: v.flatten(), lambda v: v[None], lambda v: v[..., None], lambda v: v.flatten()[:1],
        lambda v: v.flatten()[:0], lambda v: torch.cat([v.flatten(), v.flatten()]),
        lambda v: v.movedim(0, -1) if v.dim() else v, lambda v: v.sum(),
    )  # fmt: skip
    changed: Tensor = _pick(rng, changes)(v)
    return changed


def _retyped(v: Tensor, rng: np.random.Generator) -> Tensor:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool,
             torch.uint8, torch.complex64)  # fmt: skip
    return (v.real if v.is_complex() else v).to(_pick(rng, kinds))
