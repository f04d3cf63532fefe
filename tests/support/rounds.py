"""Comparisons of rounds: bit for bit, or by distance."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fedshift.engine.run import Round
from fedshift.tree import Params, Parts, flatten


def last(rounds: Iterable[Round]) -> Round:
    return list(rounds)[-1]


def everything(played: Round) -> Parts:
    states = {f"{i} {part}": t for i, s in played.states.items() for part, t in s.items()}
    return played.server | states


def different(a: Round, b: Round) -> list[str]:
    """Names of the tensors that are not bit for bit the same."""
    one, two = flatten(everything(a)), flatten(everything(b))
    odd = one.keys() ^ two.keys()
    both = one.keys() & two.keys()
    return [
        *odd,
        *(k for k in both if one[k].dtype != two[k].dtype or not torch.equal(one[k], two[k])),
    ]


def far(one: Round, other: Round) -> float:
    """The largest difference of two states over the size of the first."""
    a, b = flatten(everything(one)), flatten(everything(other))
    assert a.keys() == b.keys()
    size = max(float(v.double().abs().max()) for v in a.values() if v.numel())
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()) / size


def relative_difference(one: Round, two: Round, before: Round) -> float:
    """||a - b|| over ||a - what was before round 1||, the largest of all parts of all states."""
    a, b, first = everything(one), everything(two), everything(before)
    assert flatten(a).keys() == flatten(b).keys()
    worst = 0.0
    for part, tree in a.items():
        for k, v in tree.items():
            assert (v.dtype, v.shape) == (b[part][k].dtype, b[part][k].shape)
        old = first.get(part.partition(" ")[2] or part, first.get(part, {}))
        gap, way = distance(tree, b[part]), distance(tree, old)
        worst = max(worst, gap / way if way else gap)
    return worst


def distance(a: Params, b: Params) -> float:
    each = [v.double() - b[k].double() if k in b and b[k].shape == v.shape else v.double()
            for k, v in a.items()]  # fmt: skip
    return math.hypot(*(float(v.norm()) for v in each))
