"""Robust combination: closed forms, an independent solver, and bounds on bad clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.errors import InputError
from fedshift.seeds import generator
from fedshift.server.combine import Mean
from fedshift.server.robust import Geometric, Krum, Median, Trimmed
from fedshift.server.weights import Uniform
from fedshift.tree import Params

RULES = {
    "median": Median(),
    "trimmed": Trimmed(0.3),
    "krum": Krum(2),
    "multikrum": Krum(2, 4),
    "geometric": Geometric(),
}


def changes(count: int = 7, seed: int = 0) -> Params:
    """`count` changes near (1, 1, ...), in two tensors of float64."""
    source = generator(seed, "changes")
    shapes = {"a": (3, 2), "b": (5,)}
    return {
        k: 1.0 + 0.1 * torch.randn(count, *s, generator=source, dtype=torch.float64)
        for k, s in shapes.items()
    }


def equal(count: int) -> torch.Tensor:
    return torch.full((count,), 1.0 / count, dtype=torch.float64)


def combined(rule: Any, stacked: Params) -> Params:
    result: Params = rule(equal(len(stacked["b"])), stacked, 0)
    return result


def flat(one: Params) -> np.ndarray[Any, Any]:
    return torch.cat([v.flatten() for v in one.values()]).numpy()


def matrix(stacked: Params) -> np.ndarray[Any, Any]:
    return torch.cat([v.flatten(1) for v in stacked.values()], dim=1).numpy()


@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_median_coordinate_by_coordinate(count: int) -> None:
    stacked = changes(count)
    np.testing.assert_array_equal(
        flat(combined(Median(), stacked)), np.median(matrix(stacked), axis=0)
    )


@pytest.mark.parametrize(("share", "cut"), [(0.0, 0), (0.1, 0), (0.2, 1), (0.3, 2), (0.49, 3)])
def test_trimmed_cuts_whole_clients(share: float, cut: int) -> None:
    stacked = changes(7)
    rows = np.sort(matrix(stacked), axis=0)[cut : 7 - cut]
    np.testing.assert_allclose(
        flat(combined(Trimmed(share), stacked)), rows.mean(axis=0), rtol=1e-14
    )


def test_scores_of_krum_by_hand() -> None:
    """On a line, C = 6, f = 1: each score sums the 3 nearest squared distances."""
    stacked = {"b": torch.tensor([0.0, 1.0, 2.0, 4.0, 7.0, 100.0])[:, None]}
    scores = Krum(1).scores(stacked).tolist()
    assert scores == [21.0, 11.0, 9.0, 22.0, 70.0, 27469.0]
    assert float(combined(Krum(1), stacked)["b"]) == 2.0
    assert float(combined(Krum(1, 2), stacked)["b"]) == 1.5


def test_of_equal_scores_the_lower_client_goes_first() -> None:
    stacked = {"b": torch.tensor([0.0, 0.0, 0.0, 5.0, 5.0, 5.0])[:, None]}
    assert float(combined(Krum(1), stacked)["b"]) == 0.0


def test_geometric_median_is_the_minimum() -> None:
    """Against scipy's minimiser of sum_i a_i ||v - v_i||, weights unequal."""
    stacked = changes(5, seed=3)
    rows, a = matrix(stacked), np.array([0.1, 0.3, 0.2, 0.25, 0.15])
    median = flat(Geometric()(torch.from_numpy(a), stacked, 0))

    def cost(v: np.ndarray[Any, Any]) -> float:
        return float(a @ np.linalg.norm(rows - v, axis=1))

    best = scipy.optimize.minimize(cost, rows.mean(axis=0), tol=1e-12)
    assert cost(median) <= best.fun + 1e-10
    np.testing.assert_allclose(median, best.x, atol=1e-4)
    assert cost(a @ rows) > cost(median) + 1e-5


def test_half_of_the_weight_decides_the_geometric_median() -> None:
    stacked = changes(5)
    a = torch.tensor([0.1, 0.55, 0.1, 0.15, 0.1], dtype=torch.float64)
    median = flat(Geometric()(a, stacked, 0))
    np.testing.assert_allclose(median, matrix(stacked)[1], atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("size", [-1e30, -7.0, 0.0, 50.0, 1e30])
def test_two_bad_clients_of_seven_stay_without_much_say(rule: Any, size: float) -> None:
    stacked = changes()
    for v in stacked.values():
        v[[1, 4]] = size
    rows = np.delete(matrix(stacked), [1, 4], axis=0)
    result = flat(combined(rule, stacked))
    spread = np.linalg.norm(rows - rows.mean(axis=0), axis=1).max()
    assert np.linalg.norm(result - rows.mean(axis=0)) < 2.0 * spread
    mean = flat(combined(Mean(Uniform()), stacked))
    assert np.linalg.norm(mean - rows.mean(axis=0)) > 1.5 * spread


@given(st.lists(st.floats(-1e300, 1e300), min_size=5, max_size=5))
def test_medians_stay_among_the_honest(bad: list[float]) -> None:
    """5 bad of 11, whatever they send: every coordinate lies within the honest ones' range."""
    stacked = changes(11)
    for v in stacked.values():
        v[[0, 2, 5, 6, 10]] = torch.tensor(bad, dtype=v.dtype).view(5, *[1] * (v.dim() - 1))
    rows = np.delete(matrix(stacked), [0, 2, 5, 6, 10], axis=0)
    for rule in (Median(), Trimmed(0.46)):
        result = flat(combined(rule, stacked))
        assert (result >= rows.min(axis=0) - 1e-12).all()
        assert (result <= rows.max(axis=0) + 1e-12).all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_types_and_shapes_are_kept(rule: Any) -> None:
    stacked = {k: v.float() for k, v in changes().items()}
    result = combined(rule, stacked)
    assert {k: (v.dtype, v.shape) for k, v in result.items()} == {
        k: (v.dtype, v.shape[1:]) for k, v in stacked.items()
    }


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_clients_alike_give_their_change(rule: Any) -> None:
    one = changes(1)
    stacked = {k: v.expand(7, *v.shape[1:]).contiguous() for k, v in one.items()}
    np.testing.assert_allclose(flat(combined(rule, stacked)), matrix(one)[0], rtol=1e-14)


def test_a_cohort_too_small_for_krum_is_refused() -> None:
    with pytest.raises(InputError, match="5 clients' changes are too few for byzantine=2 and "):
        combined(Krum(2), changes(5))
    with pytest.raises(InputError, match="take at least 7 clients"):
        combined(Krum(2), changes(6))  # 2 f + 2
    with pytest.raises(InputError, match="take at least 8 clients"):
        combined(Krum(1, 7), changes(7))
    combined(Krum(2), changes(7))
