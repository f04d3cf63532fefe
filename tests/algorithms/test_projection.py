"""The projection on the simplex, against a computation that neither sorts nor divides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.algorithms.afl import project_simplex
from fedshift.errors import InputError
from support.comparing import by_bisection

vectors = st.lists(st.floats(-50, 50), min_size=1, max_size=12)


@pytest.mark.slow
@given(vectors, st.floats(0.1, 1000.0))
def test_projection_agrees_with_bisection(values: list[float], total: float) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    u = project_simplex(v, total)
    assert float((u - by_bisection(v, total)).abs().max()) < 1e-12 * (total + 50)
    assert float(u.min()) >= 0
    assert float(u.sum()) == pytest.approx(total, abs=1e-12 * total)


@pytest.mark.slow
@given(vectors)
def test_projection_is_idempotent_and_ignores_constants(values: list[float]) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    u = project_simplex(v)
    assert float((project_simplex(u) - u).abs().max()) < 1e-14
    assert float((project_simplex(v + 7.0) - u).abs().max()) < 1e-12


@given(vectors)
def test_projection_satisfies_the_conditions_of_a_minimiser(values: list[float]) -> None:
    """(v - u) . (s - u) <= 0 for every s of the simplex: it is enough to look at its corners."""
    v = torch.tensor(values, dtype=torch.float64)
    u = project_simplex(v)
    slopes = (v - u).max() - (v - u) @ u
    assert float(slopes) < 1e-11
    worse = torch.roll(u, 1)
    assert float((worse - v).norm()) >= float((u - v).norm()) - 1e-12


def test_projection_by_hand() -> None:
    assert project_simplex(torch.tensor([0.5, 0.7])).tolist() == pytest.approx([0.4, 0.6])
    assert project_simplex(torch.tensor([0.5, 0.9])).tolist() == pytest.approx([0.3, 0.7])
    assert project_simplex(torch.tensor([3.0, 0.0, 0.0])).tolist() == [1.0, 0.0, 0.0]
    assert project_simplex(torch.tensor([-9.0]), 4.0).tolist() == [4.0]
    large = project_simplex(torch.tensor([1e12, 1e12 + 0.5], dtype=torch.float64))
    assert large.tolist() == [0.25, 0.75]


def test_what_cannot_be_projected_is_refused() -> None:
    for bad in (torch.tensor([]), torch.tensor([1.0, float("nan")]), torch.ones(2, 2)):
        with pytest.raises(InputError, match="needs a vector of finite numbers"):
            project_simplex(bad)
    with pytest.raises(InputError, match=r"total must be a positive number, got 0\.0"):
        project_simplex(torch.ones(2), 0.0)
