"""Invalid replies that a client could send instead of its update, by name: a table, not code.

Each attack is a row: what is changed, where, and into what. `spoil` turns one honest reply into the
replies that arrive instead: one, none (drop) or two (duplicate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedshift.engine.backends import FAILED, Reply
from fedshift.errors import InputError, check_name
from fedshift.seeds import generator
from fedshift.tree import Parts

Kind = Literal["value", "all", "shape", "type", "name", "part", "round", "id", "client", "copies"]
BIG = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Attack:
    """One row of the table.

    kind   what is changed: "value" one entry of a tensor, "all" every entry, its "shape" or "type",
           the "name" of a tensor, a "part", the "round", "id" or "client" that the reply claims, or
           how many "copies" arrive
    to     into what
    part   the part of the update that is changed; the tensor in it is drawn
    """

    kind: Kind
    to: Any = None
    part: str = "delta"


ATTACKS: Mapping[str, Attack] = {
    "drop": Attack("copies", 0),
    "delay": Attack("round", -1),
    "nan": Attack("value", torch.nan),
    "nan everywhere": Attack("all", torch.nan),
    "inf": Attack("value", torch.inf),
    "minus inf": Attack("value", -torch.inf),
    "inf everywhere": Attack("all", torch.inf),
    "inf and minus inf": Attack("value", (torch.inf, -torch.inf)),
    "nan in a statistic": Attack("value", torch.nan, "buffers"),
    "inf in a statistic": Attack("value", torch.inf, "buffers"),
    "nan loss": Attack("all", torch.nan, "report"),
    "largest float": Attack("all", BIG),
    "largest floats that cancel": Attack("value", (BIG, -BIG)),
    "1e30 everywhere": Attack("all", 1e30),
    "scalar": Attack("shape", "scalar"),
    "one number": Attack("shape", "one"),
    "one row": Attack("shape", "row"),
    "leading axis": Attack("shape", "leading"),
    "trailing axis": Attack("shape", "trailing"),
    "one row more": Attack("shape", "more"),
    "one row less": Attack("shape", "less"),
    "flattened": Attack("shape", "flat"),
    "empty tensor": Attack("shape", "empty"),
    "truncated": Attack("shape", "half"),
    "terabytes": Attack("shape", "terabytes"),
    "scalar statistic": Attack("shape", "one", "buffers"),
    "loss per example": Attack("shape", "more", "report"),
    "float64": Attack("type", torch.float64),
    "float16": Attack("type", torch.float16),
    "bfloat16": Attack("type", torch.bfloat16),
    "int64": Attack("type", torch.int64),
    "uint8": Attack("type", torch.uint8),
    "bool": Attack("type", torch.bool),
    "complex": Attack("type", torch.complex64),
    "float counters": Attack("type", torch.float32, "counters"),
    "missing tensor": Attack("name", "missing"),
    "extra tensor": Attack("name", "extra"),
    "renamed tensor": Attack("name", "renamed"),
    "upper case": Attack("name", "upper"),
    "empty name": Attack("name", ""),
    "name of a path": Attack("name", "../../etc/passwd"),
    "name with NUL": Attack("name", "head\0weight"),
    "name of 10,000 letters": Attack("name", "a" * 10_000),
    "10,000 tensors": Attack("name", "bloat"),
    "missing change": Attack("part", "missing"),
    "missing report": Attack("part", "missing", "report"),
    "missing statistics": Attack("part", "missing", "buffers"),
    "empty update": Attack("part", "none"),
    "the model itself": Attack("part", "params"),
    "weight of its own": Attack("part", "weight"),
    "a cohort of its own": Attack("part", "cohort"),
    "a table of its own": Attack("part", "table"),
    "failed": Attack("part", FAILED),
    "stale round": Attack("round", -1),
    "round to come": Attack("round", 1),
    "round 0": Attack("round", None),
    "negative round": Attack("round", -(10**9)),
    "another's id": Attack("id", 1),
    "negative id": Attack("id", -1),
    "huge id": Attack("id", 2**62),
    "id that is no number": Attack("id", torch.nan),
    "two ids": Attack("id", (3, 1)),
    "duplicate": Attack("copies", 2),
    "two answers": Attack("copies", -2),
    "huge count": Attack("all", 10**9, "counters"),
    "largest count": Attack("all", 2**62, "counters"),
    "negative count": Attack("all", -5, "counters"),
    "huge size": Attack("part", "n"),
    "negative size": Attack("part", "-n"),
}


def attack(name: str) -> Attack:
    """The row of this name. Raises InputError, with the nearest match, for others."""
    check_name("attack", name, ATTACKS)
    return ATTACKS[name]


def spoil(name: str, reply: Reply, seed: int = 0) -> tuple[Reply, ...]:
    """The replies that arrive in place of `reply`; the tensor and entry are drawn from the seed.

    Raises InputError for an unknown name, and if the update lacks the part (such as counters of a
    model that has none).
    """
    row, rng = attack(name), generator(seed, "attack", name, reply.t, reply.client)
    if row.kind == "copies":
        return _copies(row.to, reply)
    if row.kind == "round":
        return (reply._replace(t=0 if row.to is None else reply.t + row.to),)
    return (reply._replace(update=CHANGES[row.kind](reply.update, row, rng)),)


def _copies(count: int, reply: Reply) -> tuple[Reply, ...]:
    if count >= 0:
        return (reply,) * count
    # The second reply has other numbers: an equal one could pass as a repeated message.
    halved = {k: v / 2 for k, v in reply.update.get("delta", {}).items()}
    return reply, reply._replace(update={**reply.update, "delta": halved})


def _draw_tensor(update: Parts, row: Attack, rng: torch.Generator) -> str:
    """Draw a tensor of the attacked part, from those with entries."""
    tree = update.get(row.part, {})
    names = [k for k, v in tree.items() if v.numel() and (row.part != "report" or k == "loss")]
    if not names:
        raise InputError(f'an update without "{row.part}" cannot be attacked there')
    return names[int(torch.randint(len(names), (), generator=rng))]


def _with(update: Parts, part: str, name: str, v: Tensor) -> Parts:
    return {**update, part: {**update.get(part, {}), name: v}}


def _value(v: Tensor, to: Any, rng: torch.Generator) -> Tensor:
    v = v.clone()
    numbers = to if isinstance(to, tuple) else (to,)
    # Different entries, so that two numbers cannot replace each other.
    places = torch.randperm(v.numel(), generator=rng)[: len(numbers)]
    for place, number in zip(places.tolist(), numbers, strict=False):
        v.view(-1)[place] = number
    return v


SHAPES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda v: v.flatten()[0],
    "one": lambda v: v.flatten()[:1].reshape(1, 1),
    "row": lambda v: v[:1] if v.dim() and len(v) > 1 else v[None],
    "leading": lambda v: v[None],
    "trailing": lambda v: v[..., None],
    "more": lambda v: torch.cat([v.reshape(-1, *v.shape[1:]), v.reshape(-1, *v.shape[1:])[:1]]),
    "less": lambda v: v[:-1] if v.dim() else v[None][:0],
    "flat": lambda v: v.flatten() if v.dim() != 1 else v[:, None],
    "empty": lambda v: v.flatten()[:0],
    "half": lambda v: v.flatten()[: v.numel() // 2],
    # Only one number in memory; code that copies the tensor would need terabytes.
    "terabytes": lambda v: v.flatten()[:1].expand(1 << 40),
}


# Attacks that replace one tensor: (the tensor, what it becomes, generator) -> tensor.
TENSORS: Mapping[str, Callable[[Tensor, Any, torch.Generator], Tensor]] = {
    "value": _value,
    "all": lambda v, to, _: torch.full_like(v, to),
    "shape": lambda v, to, _: SHAPES[to](v),
    "type": lambda v, to, _: v.to(to),
}


def _tensor(update: Parts, row: Attack, rng: torch.Generator) -> Parts:
    name = _draw_tensor(update, row, rng)
    v = TENSORS[row.kind](update[row.part][name], row.to, rng)
    return _with(update, row.part, name, v)


def _name(update: Parts, row: Attack, rng: torch.Generator) -> Parts:
    """Remove, rename or add a tensor."""
    name = _draw_tensor(update, row, rng)
    tree = dict(update[row.part])
    v = tree.pop(name)
    if row.to == "extra":
        tree |= {name: v, f"{name}.extra": v}
    elif row.to == "bloat":
        tree |= {name: v} | dict.fromkeys(map("x{}".format, range(10_000)), torch.zeros(()))
    elif row.to in ("renamed", "upper"):
        tree[f"{name}_" if row.to == "renamed" else name.upper()] = v
    elif row.to != "missing":
        tree[row.to] = v
    return {**update, row.part: tree}


def _part(update: Parts, row: Attack, rng: torch.Generator) -> Parts:
    """Remove a part, or add one with a claim."""
    if row.to == "missing":
        return {k: v for k, v in update.items() if k != row.part}
    if row.to == "none":
        return {}
    claims: Parts = {
        "params": {k: torch.zeros_like(v) for k, v in update.get("delta", {}).items()},
        "weight": {"weight": torch.tensor(1.0, dtype=torch.float64)},
        "cohort": {"id": torch.tensor([0]), "weight": torch.tensor([1.0], dtype=torch.float64)},
        "table": {"n": torch.tensor([1e9], dtype=torch.float64)},
        FAILED: {"reason": torch.full((5000,), 255, dtype=torch.uint8)},
    }
    # With these claims a client would gain influence if the server took weights from replies.
    if row.to in claims:
        return {**update, row.to: claims[row.to]}
    size = torch.tensor(1e9 if row.to == "n" else -1e9, dtype=torch.float64)
    return _with(update, "report", "n", size)


def _id(update: Parts, row: Attack, rng: torch.Generator) -> Parts:
    return _with(update, "report", "id", torch.tensor(row.to))


CHANGES: Mapping[str, Callable[[Parts, Attack, torch.Generator], Parts]] = {
    **dict.fromkeys(TENSORS, _tensor),
    "name": _name,
    "part": _part,
    "id": _id,
}
