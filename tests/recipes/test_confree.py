"""ConFREE: the gain of each client along its direction, and conflicts after projections."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedshift import recipes
from fedshift.recipes import Setting
from fedshift.seeds import numpy_generator
from fedshift.server.confree import (
    ConFree,
    coordinates,
    fairest,
    guidance,
)
from fedshift_papers.recipes import PairwiseProjection
from support.by_hand import Array, final, max_difference
from support.comparing import same
from support.federations import double

AGAINST = np.array([[1.0, 0.2, 0.0], [-0.6, 0.5, 0.3], [0.1, -0.9, 0.4]])
AGREED = np.abs(AGAINST)


def combined(rule: ConFree | PairwiseProjection, rows: Array, seed: int = 0) -> Array:
    """The combination of changes [n, q] of one tensor by a rule, with equal weights."""
    n = len(rows)
    weights = torch.full((n,), 1.0 / n, dtype=torch.float64)
    change: Array = rule(weights, {"w": torch.from_numpy(rows)}, seed)["w"].numpy()
    return change


def cases(count: int) -> list[Array]:
    """Changes of many scales: with exact opposites, zeros, unequal lengths, n above and below q."""
    source, drawn = numpy_generator(5, "confree cases"), []
    for i in range(count):
        n, q = source.integers(1, 9), source.integers(1, 12)
        rows = source.normal(size=(n, q)) * 10.0 ** source.integers(-4, 2)
        if i % 5 == 0 and n > 1:
            rows[1] = -rows[0]
        if i % 7 == 0:
            rows += 2 * source.normal(size=q) * np.abs(rows).max()
        if i % 11 == 0:
            rows[0] = 0.0
        if i % 13 == 0:
            rows *= 10.0 ** source.integers(-3, 4, size=(n, 1))
        drawn.append(rows)
    return drawn


def test_every_client_gains_at_least_what_the_guidance_gives() -> None:
    """||d - g_0|| <= alpha ||g_0||, min <u_i, d> >= min <u_i, g_0>, and a duality gap of 0."""
    worse_means = 0
    for i, rows in enumerate(cases(250)):
        alpha = (0.01, 0.1, 0.5, 0.9, 1.5)[i % 5]
        start = guidance(rows, np.random.default_rng(i))
        solution = fairest(rows, start, alpha)
        g, d = start @ rows, solution @ rows
        longest, length = np.linalg.norm(rows, axis=1).max(), np.linalg.norm(g)
        if length <= 1e-12 * longest:  # nothing but conflicts: no move
            assert np.array_equal(solution, start)
            continue
        tolerance = 1e-7 * longest * length
        assert np.linalg.norm(d - g) <= alpha * length * (1 + 1e-9)
        assert (rows @ d).min() >= (rows @ g).min() - tolerance
        w = (solution - start) / (solution - start).sum()
        assert w.min() > -1e-9
        dual = w @ rows @ g + alpha * length * np.linalg.norm(w @ rows)
        assert (
            dual - (rows @ d).min() <= (1 + alpha) * tolerance
        )  # no direction has a better worst case
        mean = rows.mean(0)
        short = alpha * length / max(float(np.linalg.norm(mean - g)), 1e-300)
        other = g + min(1.0, short) * (mean - g)  # the control: towards the mean, as far as allowed
        worse_means += bool((rows @ other).min() < (rows @ d).min() - 10 * tolerance)
    assert worse_means > 100


def test_no_conflict_and_no_reach_is_the_mean() -> None:
    assert np.abs(combined(ConFree(alpha=0.0), AGREED) - AGREED.mean(0)).max() < 1e-15
    assert np.abs(combined(ConFree(alpha=0.0), AGAINST) - AGAINST.mean(0)).max() > 0.05
    one = AGAINST[:1]
    assert np.array_equal(combined(ConFree(alpha=0.0), one), one[0])


def test_the_step_is_rescaled() -> None:
    """n = 1: d = (1 + alpha) u, applied as d / (1 + alpha^2)."""
    for alpha in (0.0, 0.3, 0.5, 2.0):
        moved = combined(ConFree(alpha), AGAINST[:1])
        assert np.allclose(moved, (1 + alpha) / (1 + alpha**2) * AGAINST[0], rtol=1e-12)


def test_opposite_changes_do_not_move() -> None:
    rows = np.stack([AGAINST[0], -AGAINST[0]])
    assert np.array_equal(combined(ConFree(), rows), np.zeros(3))
    assert np.abs(combined(ConFree(), rows * np.array([[1.0], [0.99]]))).max() < 1e-15
    turned = rows + np.array([[0.0, 0.0, 0.1], [0.0, 0.0, 0.1]])
    assert np.abs(combined(ConFree(), turned)).max() > 0.05


def test_two_clients_are_projected_off_one_another() -> None:
    """v_i = u_i - <u_i, u_j>/||u_j||^2 u_j, so <v_i, u_j> = 0; g_0 is their mean."""
    one, two = AGAINST[:2]
    v = one - one @ two / (two @ two) * two, two - one @ two / (one @ one) * one
    assert min(v[0] @ two, v[1] @ one) >= -1e-12
    start = guidance(AGAINST[:2], np.random.default_rng(0))
    assert np.abs(start @ AGAINST[:2] - (v[0] + v[1]) / 2).max() < 1e-15
    raw = guidance(AGAINST[:2], np.random.default_rng(0), normalise=False)
    assert np.abs(raw @ AGAINST[:2] - (v[0] + v[1]) / 2).max() > 0.01


def by_hand_guidance(rows: Array, orders: list[list[int]]) -> Array:
    changes = []
    for i, order in enumerate(orders):
        v = rows[i].copy()
        for j in order:
            if j != i and v @ rows[j] < 0:
                v = v - v @ rows[j] / (rows[j] @ rows[j]) * rows[j]
        changes.append(v)
    return np.mean(changes, axis=0)


def test_projections_follow_one_another_in_the_drawn_order() -> None:
    """v_i changes between projections, so the order matters; it is drawn from the seed."""
    drawn, results = np.random.default_rng(3), []
    orders = [drawn.permutation(3).tolist() for _ in range(3)]
    got = guidance(AGAINST, np.random.default_rng(3)) @ AGAINST
    assert np.abs(got - by_hand_guidance(AGAINST, orders)).max() < 1e-15
    for choice in itertools.product(itertools.permutations(range(3)), repeat=3):
        results.append(by_hand_guidance(AGAINST, [list(order) for order in choice]))
    assert np.ptp(np.array(results), axis=0).max() > 0.01
    rule = ConFree()
    seeds = [combined(rule, AGAINST, seed) for seed in range(8)]
    assert np.array_equal(seeds[0], combined(rule, AGAINST, 0))
    assert np.ptp(np.array(seeds), axis=0).max() > 1e-3


def test_scale_equivariance_needs_the_division() -> None:
    """The authors' code leaves it out: short changes are then hardly projected at all."""
    for normalise, law in ((True, True), (False, False)):
        rule = ConFree(normalise=normalise)
        small = combined(rule, 1e-3 * AGAINST) / 1e-3
        assert (np.abs(small - combined(rule, AGAINST)).max() < 1e-12) == law
    short = 7e-3 * AGAINST / np.linalg.norm(AGAINST, axis=1, keepdims=True)
    raw = guidance(short, np.random.default_rng(0), normalise=False) @ short
    true = guidance(short, np.random.default_rng(0)) @ short
    mean = short.mean(0)
    assert np.linalg.norm(raw - mean) < 1e-4 * np.linalg.norm(mean)
    assert np.linalg.norm(true - mean) > 0.1 * np.linalg.norm(mean)


def test_coordinates_keep_inner_products() -> None:
    """Block by block, over tensors of any shape."""
    source = torch.Generator().manual_seed(0)
    leaves = [torch.randn(4, *s, generator=source) for s in ((3, 2), (70000,), (1,))]
    flat = torch.cat([leaf.flatten(1) for leaf in leaves], dim=1).double().numpy()
    rows = coordinates(leaves)
    assert rows.shape == (4, 4)
    assert np.abs(rows @ rows.T / (flat @ flat.T) - 1).max() < 1e-10
    missing = coordinates(leaves[:2])
    assert np.abs(missing @ missing.T - flat @ flat.T).max() > 1e-3


def test_scopes_differ_where_tensors_conflict_and_the_whole_does_not() -> None:
    """In "b" alone the changes conflict: per tensor their projections, as a whole the mean."""
    stacked = {
        "a": torch.tensor([[3.0, 0.0], [3.0, 1.0]]).double(),
        "b": torch.tensor([[1.0, 0.0], [-1.0, 1.0]]).double(),
    }
    half, mean = torch.full((2,), 0.5).double(), {k: v.mean(0) for k, v in stacked.items()}
    whole = ConFree(alpha=0.0, scope="model")(half, stacked, 0)
    assert max_difference(whole, mean) < 1e-15
    each = ConFree(alpha=0.0)(half, stacked, 0)
    assert max_difference({"a": each["a"]}, mean) < 1e-15
    # v_1 = (1, 0) + (-1, 1)/2 = (1/2, 1/2), v_2 = (-1, 1) + (1, 0) = (0, 1).
    assert torch.allclose(each["b"], torch.tensor([0.25, 0.75]).double(), atol=1e-15)
    assert max_difference({"b": each["b"]}, mean) > 0.2
    one = ConFree(alpha=0.0)(half, {"x": torch.cat([stacked["a"], stacked["b"]], 1)}, 0)["x"]
    assert float((one - torch.cat([whole["a"], whole["b"]])).abs().max()) < 1e-15


def test_the_recipe_is_fedrep_with_another_combination(setting: Setting, federated: Any) -> None:
    host = recipes.fedrep(setting, head_epochs=1)
    federation = double(federated())
    ours = recipes.confree(setting)
    assert replace(ours, combine=host.combine) == host
    assert same(ours, host, federation, 1) > 1e-3
    assert set(final(ours, federation, 1).server["params"]) == set(
        final(host, federation, 1).server["params"]
    )


def by_hand_pairs(rows: Array, weights: Array, added: float = 1e-8) -> Array:
    projected = rows.copy()
    for i, j in itertools.combinations(range(len(rows)), 2):
        along = rows[i] @ rows[j]
        if along < 0:
            projected[i] -= along / (rows[j] @ rows[j] + added) * rows[j]
            projected[j] -= along / (rows[i] @ rows[i] + added) * rows[i]
    return weights @ projected  # type: ignore[no-any-return]


def test_the_other_code_projects_pairs_of_original_changes() -> None:
    weights = np.array([0.5, 0.3, 0.2])
    stacked = {"a": torch.from_numpy(AGAINST[:, :2]), "b": torch.from_numpy(AGAINST[:, 2:])}
    projected = PairwiseProjection()(torch.from_numpy(weights), stacked, 0)
    got = torch.cat([projected["a"], projected["b"]]).numpy()
    assert np.abs(got - by_hand_pairs(AGAINST, weights)).max() < 1e-15
    again = PairwiseProjection()(torch.from_numpy(weights), stacked, 1)
    assert all(torch.equal(projected[k], again[k]) for k in projected)
    mixed = np.vstack([AGAINST[:2], -AGAINST[1]]) + np.array([[0.0, 0.0, 0.2]])
    inner = mixed @ mixed.T
    assert (inner < 0).any()
    assert (inner[~np.eye(3, dtype=bool)] > 0).any()
    some = PairwiseProjection()(torch.from_numpy(weights), {"w": torch.from_numpy(mixed)}, 0)["w"]
    assert np.abs(some.numpy() - by_hand_pairs(mixed, weights)).max() < 1e-15
    sequential = ConFree(alpha=0.0)(torch.from_numpy(weights), stacked, 0)
    assert max_difference(projected, sequential) > 0.01
    short = 1e-4 * AGAINST  # of squares of the size of what the source adds to them
    few = PairwiseProjection()(torch.from_numpy(weights), {"w": torch.from_numpy(short)}, 0)["w"]
    assert np.abs(few.numpy() - by_hand_pairs(short, weights)).max() < 1e-19
    assert np.abs(few.numpy() - by_hand_pairs(short, weights, 0.0)).max() > 1e-6
    zeros = {"a": torch.zeros(3, 2).double()}
    assert not PairwiseProjection()(torch.from_numpy(weights), zeros, 0)["a"].any()
