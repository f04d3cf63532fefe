"""Invalid replies that a client could send instead of its update, by name.

`spoil` turns one honest reply into the replies that arrive instead: one, none (drop) or two
(duplicate).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller

import torch
from torch import Tensor

from fedshift.engine.backends import Reply
from fedshift.errors import InputError, check_name
from fedshift.seeds import generator
from fedshift.tree import Params, Parts

BIG = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Attack:
    """What arrives in place of a reply, and the part of the update that is changed."""

    replies: Callable[[Reply, torch.Generator], tuple[Reply, ...]]
    part: str = "delta"


def _tree(change: Callable[[Params, str, torch.Generator], Params], part: str = "delta") -> Attack:
    """One part is changed: (its tensors, the name of one that is drawn, generator) -> tensors."""

    def replies(reply: Reply, rng: torch.Generator) -> tuple[Reply, ...]:
        tree = dict(reply.update.get(part, {}))
        names = [k for k, v in tree.items() if v.numel() and (part != "report" or k == "loss")]
        if not names:
            raise InputError(f'an update without "{part}" cannot be attacked there')
        name = names[int(torch.randint(len(names), (), generator=rng))]
        return (reply._replace(update={**reply.update, part: change(tree, name, rng)}),)

    return Attack(replies, part)


def _tensor(change: Callable[[Tensor], Tensor], part: str = "delta") -> Attack:
    """One tensor is replaced."""
    return _tree(lambda tree, name, _: {**tree, name: change(tree[name])}, part)


def _all(number: float, part: str = "delta") -> Attack:
    """A tensor has one number everywhere."""
    return _tensor(lambda v: torch.full_like(v, number), part)


def _some(*numbers: float, part: str = "delta") -> Attack:
    """A tensor has these numbers at entries that are drawn."""

    def change(tree: Params, name: str, rng: torch.Generator) -> Params:
        v = tree[name].clone()
        # Different entries, so that two numbers cannot replace each other.
        places = torch.randperm(v.numel(), generator=rng)[: len(numbers)]
        for place, number in zip(places.tolist(), numbers, strict=False):
            v.view(-1)[place] = number
        return {**tree, name: v}

    return _tree(change, part)


def _renamed(name: str) -> Attack:
    """A tensor has another name, in which {} stands for its own."""
    return _tree(lambda tree, was, _: {name.format(was): tree.pop(was)} | tree)


def _round(change: Callable[[int], int]) -> Attack:
    """The reply claims to be of another round."""
    return Attack(lambda reply, _: (reply._replace(t=change(reply.t)),))


def _parts(change: Callable[[Parts], Parts], part: str = "delta") -> Attack:
    """The update has other parts."""
    return Attack(lambda reply, _: (reply._replace(update=change(reply.update)),), part)


def _claim(part: str, **tensors: Tensor) -> Attack:
    """A part that the server would have to trust."""
    return _parts(lambda update: {**update, part: {**update.get(part, {}), **tensors}})


def _without(part: str) -> Attack:
    return _parts(lambda update: {k: v for k, v in update.items() if k != part}, part)


def _halved(reply: Reply) -> Reply:
    """An equal second reply could pass as a repeated message; this one has other numbers."""
    halved = {k: v / 2 for k, v in reply.update.get("delta", {}).items()}
    return reply._replace(update={**reply.update, "delta": halved})


def _more(v: Tensor) -> Tensor:
    rows = v.reshape(-1, *v.shape[1:])
    return torch.cat([rows, rows[:1]])


ATTACKS: Mapping[str, Attack] = {
    "drop": Attack(lambda reply, _: ()),
    "delay": _round(lambda t: t - 1),
    "nan": _some(torch.nan),
    "nan everywhere": _all(torch.nan),
    "inf": _some(torch.inf),
    "minus inf": _some(-torch.inf),
    "inf everywhere": _all(torch.inf),
    "inf and minus inf": _some(torch.inf, -torch.inf),
    "nan in a statistic": _some(torch.nan, part="buffers"),
    "inf in a statistic": _some(torch.inf, part="buffers"),
    "nan loss": _all(torch.nan, "report"),
    "largest float": _all(BIG),
    "largest floats that cancel": _some(BIG, -BIG),
    "1e30 everywhere": _all(1e30),
    "scalar": _tensor(lambda v: v.flatten()[0]),
    "one number": _tensor(lambda v: v.flatten()[:1].reshape(1, 1)),
    "one row": _tensor(lambda v: v[:1] if v.dim() and len(v) > 1 else v[None]),
    "leading axis": _tensor(lambda v: v[None]),
    "trailing axis": _tensor(lambda v: v[..., None]),
    "one row more": _tensor(_more),
    "one row less": _tensor(lambda v: v[:-1] if v.dim() else v[None][:0]),
    "flattened": _tensor(lambda v: v.flatten() if v.dim() != 1 else v[:, None]),
    "empty tensor": _tensor(lambda v: v.flatten()[:0]),
    "truncated": _tensor(lambda v: v.flatten()[: v.numel() // 2]),
    # Only one number in memory; code that copies the tensor would need terabytes.
    "terabytes": _tensor(lambda v: v.flatten()[:1].expand(1 << 40)),
    "scalar statistic": _tensor(lambda v: v.flatten()[:1].reshape(1, 1), "buffers"),
    "loss per example": _tensor(_more, "report"),
    **{
        kind: _tensor(methodcaller("to", getattr(torch, kind)))
        for kind in ("float64", "float16", "bfloat16", "int64", "uint8", "bool")
    },
    "complex": _tensor(lambda v: v.to(torch.complex64)),
    "float counters": _tensor(Tensor.float, "counters"),
    "missing tensor": _tree(lambda tree, name, _: {k: v for k, v in tree.items() if k != name}),
    "extra tensor": _tree(lambda tree, name, _: {**tree, f"{name}.extra": tree[name]}),
    "renamed tensor": _renamed("{}_"),
    "upper case": _tree(lambda tree, name, _: {name.upper(): tree.pop(name)} | tree),
    "empty name": _renamed(""),
    "name of a path": _renamed("../../etc/passwd"),
    "name with NUL": _renamed("head\0weight"),
    "name of 10,000 letters": _renamed("a" * 10_000),
    "10,000 tensors": _tree(lambda t, *_: t | {f"x{i}": torch.zeros(()) for i in range(10_000)}),
    "missing change": _without("delta"),
    "missing report": _without("report"),
    "missing statistics": _without("buffers"),
    "empty update": _parts(lambda update: {}),
    "the model itself": _parts(
        lambda u: {**u, "params": {k: torch.zeros_like(v) for k, v in u.get("delta", {}).items()}}
    ),
    # With these a client would gain influence if the server took weights from replies.
    "weight of its own": _claim("weight", weight=torch.tensor(1.0).double()),
    "a cohort of its own": _claim("cohort", id=torch.tensor([0]), weight=torch.ones(1).double()),
    "a table of its own": _claim("table", n=torch.tensor([1e9]).double()),
    "failed": _claim("failed", reason=torch.full((5000,), 255, dtype=torch.uint8)),
    "stale round": _round(lambda t: t - 1),
    "round to come": _round(lambda t: t + 1),
    "round 0": _round(lambda t: 0),
    "negative round": _round(lambda t: t - 10**9),
    "another's id": _claim("report", id=torch.tensor(1)),
    "negative id": _claim("report", id=torch.tensor(-1)),
    "huge id": _claim("report", id=torch.tensor(2**62)),
    "id that is no number": _claim("report", id=torch.tensor(torch.nan)),
    "two ids": _claim("report", id=torch.tensor((3, 1))),
    "duplicate": Attack(lambda reply, _: (reply, reply)),
    "two answers": Attack(lambda reply, _: (reply, _halved(reply))),
    "huge count": _all(10**9, "counters"),
    "largest count": _all(2**62, "counters"),
    "negative count": _all(-5, "counters"),
    "huge size": _claim("report", n=torch.tensor(1e9).double()),
    "negative size": _claim("report", n=torch.tensor(-1e9).double()),
}


def spoil(name: str, reply: Reply, seed: int = 0) -> tuple[Reply, ...]:
    """The replies that arrive in place of `reply`; the tensor and entry are drawn from the seed.

    Raises InputError for an unknown name, with the nearest match, and if the update lacks the part
    (such as counters of a model that has none).
    """
    check_name("attack", name, ATTACKS)
    return ATTACKS[name].replies(reply, generator(seed, "attack", name, reply.t, reply.client))
