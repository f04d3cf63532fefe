"""ConFREE against implementations in plain loops, as clients serve its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.seeds import key, numpy_generator
from support.references import (
    STEPS,
    Played,
    Tree,
    bodies,
    farthest,
    head_first,
    less,
    mixed,
    reference_setting,
)

EXACT, OTHER = 1e-12, 1e-5


def drawn_orders(t: int, played: Played, name: str, count: int) -> list[list[int]]:
    """The orders in which the library's server projects the changes of a tensor."""
    seed = key(played.federation.seeds.batch, "server", t)
    source = numpy_generator(seed, "confree", name)
    return [source.permutation(count).tolist() for _ in range(count)]


def guided(changes: list[Tensor], orders: list[list[int]]) -> Tensor:
    """The mean of the changes, each projected off the others in turn."""
    total = torch.zeros_like(changes[0])
    for i, order in enumerate(orders):
        v = changes[i]
        for j in order:
            along = v @ changes[j]
            if j != i and along < 0:
                v = v - along / (changes[j] @ changes[j]) * changes[j]
        total = total + v / len(changes)
    return total


def dual_weights(gram: Tensor, pull: Tensor, reach: float) -> Tensor:
    """argmin over the simplex of w' pull + reach sqrt(w' gram w): Newton's steps on every face."""
    n, best = len(pull), (float("inf"), torch.zeros(len(pull)).double())
    faces = chain.from_iterable(combinations(range(n), k) for k in range(1, n + 1))
    for face in map(list, faces):
        g, c, k = gram[face][:, face], pull[face], len(face)
        w = torch.full((k,), 1 / k, dtype=torch.float64)
        for _ in range(30):
            length = (w @ g @ w).sqrt()
            slope = c + reach * (g @ w) / length
            curve = reach * (g / length - torch.outer(g @ w, g @ w) / length**3)
            system = torch.zeros(k + 1, k + 1).double()
            system[:k, :k], system[k, :k], system[:k, k] = curve, 1.0, 1.0
            step = torch.linalg.lstsq(system, torch.cat([-slope, torch.zeros(1).double()])).solution
            scale = 1.0
            while scale > 1e-6 and float((w + scale * step[:k]).min()) < 0 and k > 1:
                scale /= 2
            w = w + scale * step[:k]
            if float(step[:k].abs().max()) < 1e-15:
                break
        value = float(w @ c + reach * (w @ g @ w).sqrt())
        if float(w.min()) >= 0 and value < best[0]:
            whole = torch.zeros(n).double()
            whole[face] = w
            best = (value, whole)
    return best[1]


def conflict_free(played: Played, alpha: float) -> Callable[..., Tree]:
    """ConFREE tensor by tensor: guidance, and the worst client's best direction near it."""

    def combine(t: int, weights: list[float], changes: list[Tree]) -> Tree:
        out = {}
        for name in changes[0]:
            u = torch.stack([change[name].flatten() for change in changes])
            g = guided(list(u), drawn_orders(t, played, name, len(u)))
            reach = alpha * float(g.norm())
            d = g
            if alpha:
                mix = dual_weights(u @ u.T, u @ g, reach) @ u
                d = g + reach * mix / mix.norm()
            out[name] = (d / (1 + alpha**2)).reshape(changes[0][name].shape)
        return out

    return combine


@pytest.mark.few(1)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_confree(alpha: float) -> None:
    played = Played.of(recipes.confree(reference_setting(), alpha=alpha))
    done = bodies(played, head_first(played), combine=conflict_free(played, alpha))
    assert farthest(played, done) < EXACT
    other = bodies(played, head_first(played), combine=conflict_free(played, 0.4))
    assert farthest(played, other) > OTHER


@pytest.mark.slow
def test_confree_as_the_other_code_runs_it() -> None:
    """All pairs of the changes as they came, over the whole body, with 1e-8 beside the norms."""
    many = reference_setting(local=replace(STEPS, steps=20))  # until whole bodies conflict
    played = Played.of(recipes.confree_drm_repo(many), rounds=5, cohort=5)

    def end(**how: Any) -> dict[int, Tree]:
        return bodies(played, head_first(played), until=5, **how)

    def pairs(added: float) -> Callable[..., Tree]:
        def combine(t: int, weights: list[float], changes: list[Tree]) -> Tree:
            u = [torch.cat([v.flatten() for v in change.values()]) for change in changes]
            free = [dict(change) for change in changes]
            for i in range(len(u)):
                for j in range(len(u)):
                    along = float(u[i] @ u[j])
                    if i != j and along < 0:
                        factor = along / (float(u[j] @ u[j]) + added)
                        free[i] = less(free[i], {k: factor * v for k, v in changes[j].items()})
            return mixed(weights, free)

        return combine

    assert farthest(played, end(combine=pairs(1e-8))) < EXACT
    assert farthest(played, end(combine=pairs(1e-2))) > OTHER
    assert farthest(played, end()) > OTHER
