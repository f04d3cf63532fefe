"""Robust rules against implementations in plain loops, in whole runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.recipes import Setting
from support.references import (
    Played,
    Tree,
    by_size,
    descend,
    entropy,
    federated,
    mixed,
    off,
    reference_setting,
    uniform,
)

EXACT, OTHER = 1e-12, 1e-5
Combine = Callable[[Sequence[float], Sequence[Tree]], Tree]


def coordinates(cut: int | None) -> Combine:
    """Entry by entry the mean without the `cut` largest and smallest; None: the middle one."""

    def combine(weights: Sequence[float], changes: Sequence[Tree]) -> Tree:
        out = {}
        for k, first in changes[0].items():
            entries = []
            for values in zip(*(c[k].flatten().tolist() for c in changes), strict=True):
                left = sorted(values)
                drop = (len(left) - 1) // 2 if cut is None else cut
                middle = left[drop : len(left) - drop]
                entries.append(sum(middle) / len(middle))
            out[k] = torch.tensor(entries, dtype=torch.float64).reshape(first.shape)
        return out

    return combine


def flat(change: Tree) -> Tensor:
    return torch.cat([v.flatten() for v in change.values()])


def nearest(byzantine: int, keep: int) -> Combine:
    """The mean of those with the smallest sums of squared distances to their nearest."""

    def combine(weights: Sequence[float], changes: Sequence[Tree]) -> Tree:
        rows, scores = [flat(c) for c in changes], []
        for i, u in enumerate(rows):
            far = sorted(float(((u - v) ** 2).sum()) for j, v in enumerate(rows) if j != i)
            scores.append((sum(far[: len(rows) - byzantine - 2]), i))
        chosen = [changes[i] for _, i in sorted(scores)[:keep]]
        return mixed([1 / keep] * keep, chosen)

    return combine


def geometric(weights: Sequence[float], changes: Sequence[Tree]) -> Tree:
    """Weiszfeld's steps from the median, until no coefficient moves by more than 1e-9."""
    v, before = coordinates(None)(weights, changes), [0.0] * len(changes)
    for _ in range(200):
        b = [
            a / max(1e-6, float((flat(v) - flat(c)).norm()))
            for a, c in zip(weights, changes, strict=True)
        ]
        shares = [x / sum(b) for x in b]
        v = mixed(shares, changes)
        if max(abs(x - y) for x, y in zip(shares, before, strict=True)) <= 1e-9:
            break
        before = shares
    return v


RULES: dict[str, tuple[Callable[[Setting], Any], Combine, Any]] = {
    "fedmedian": (recipes.fedmedian, coordinates(None), uniform),
    "fedtrimmed": (lambda s: recipes.fedtrimmed(s, share=0.2), coordinates(1), uniform),
    "krum": (lambda s: recipes.krum(s, byzantine=1), nearest(1, 1), uniform),
    "multikrum": (lambda s: recipes.multikrum(s, byzantine=1, keep=3), nearest(1, 3), uniform),
    "rfa": (recipes.rfa, geometric, by_size),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RULES)
def test_robust_rules(name: str) -> None:
    make, combine, weigh = RULES[name]
    played = Played.of(make(reference_setting()), rounds=2, cohort=5)

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, entropy, played.batches(t, i))

    assert off(played.end, federated(played, client, weigh, combine=combine)) < EXACT
    assert off(played.end, federated(played, client, weigh)) > OTHER
