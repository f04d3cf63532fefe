"""Costs, prices and rows of `pals_weights`: what they mean, and the answers of another solver."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize

from fedshift.errors import InputError
from fedshift.server.pals import PalsWeights, effective_sample_size, pals_weights
from support.label_counts import task

COUNTS = np.array([[40, 0, 10], [0, 300, 20], [5, 5, 0], [1000, 900, 100], [0, 0, 7]])
TARGET = np.array([0.2, 0.5, 0.3])
SIZES = COUNTS.sum(axis=1)


def same_bits(a: PalsWeights, b: PalsWeights) -> bool:
    numbers = ("weights", "residual", "ess", "ess_fraction", "distance", "gap", "l1_bound", "lam")
    pairs = [(np.asarray(getattr(a, k)), np.asarray(getattr(b, k))) for k in numbers]
    return a.certified == b.certified and all(x.tobytes() == y.tobytes() for x, y in pairs)


def value(rows, target, a, cost, price):
    r = target - a @ rows
    return float(r @ r + cost @ a**2 + price @ a)


def by_slsqp(rows, target, cost, price, cap):
    """The best of several starts, polished by no knowledge of the problem."""
    m = len(rows)
    rng, best = np.random.default_rng(0), None
    for start in (np.full(m, 1 / m), rng.dirichlet(np.ones(m))):
        done = scipy.optimize.minimize(
            lambda a: value(rows, target, a, cost, price), start,
            jac=lambda a: -2 * rows @ (target - a @ rows) + 2 * cost * a + price,
            bounds=[(0, cap)] * m, method="SLSQP", options={"ftol": 1e-15, "maxiter": 2000},
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(m)},
        )  # fmt: skip
        best = done if best is None or done.fun < best.fun else best
    return best.x


def draw(rng, embedded: bool):
    """(counts, rows or None, target, cost, price, cap) of a random programme."""
    m, k = int(rng.integers(2, 12)), int(rng.integers(2, 7))
    counts = rng.integers(0, 60, size=(m, k)) + (np.arange(k) == 0)
    rows = rng.normal(size=(m, k)) * 3 if embedded else None
    target = rng.normal(size=k) if embedded else rng.dirichlet(np.ones(k))
    cost = 10 ** rng.uniform(-3, 0, size=m)
    price = rng.normal(size=m) * 10 ** rng.uniform(-2, 0.5)
    cap = float(min(1.0, rng.uniform(1.1, 3.0) / m)) if rng.random() < 0.4 else 1.0
    return counts, rows, target, cost, price, cap


@pytest.mark.parametrize("embedded", [False, True], ids=["shares", "embeddings"])
def test_another_solver_gives_no_better_answer(embedded: bool) -> None:
    rng, proven = np.random.default_rng(4), 0
    for trial in range(60):
        counts, given, target, cost, price, cap = draw(rng, embedded)
        solved = pals_weights(counts, target, cost=cost, price=price, cap=cap, rows=given)
        rows = counts / counts.sum(1, keepdims=True) if given is None else given
        a, other = solved.weights, by_slsqp(rows, target, cost, price, cap)
        least = value(rows, target, a, cost, price)
        assert least <= value(rows, target, np.clip(other, 0, cap), cost, price) + 1e-9, trial
        assert np.abs(a - other).max() < 1e-3, trial
        assert abs(a.sum() - 1) <= 1e-12
        assert a.min() >= 0
        assert a.max() <= cap + 1e-15
        assert solved.ess == pytest.approx(effective_sample_size(a, counts.sum(1)))
        assert solved.residual == pytest.approx(target - a @ rows, abs=1e-12)
        proven += solved.certified
        # The control: without the price it is another answer.
        if trial < 10:
            plain = pals_weights(counts, target, cost=cost, cap=cap, rows=given).weights
            assert np.abs(plain - a).max() > 1e-6
    assert proven >= 59


@pytest.mark.parametrize("cap", [None, 0.35])
@pytest.mark.parametrize("lam", [1e-3, 0.3, 1.0, 37.5, 1e4])
@pytest.mark.parametrize("fidelity", ["squared", "norm"])
def test_a_cost_of_lam_over_n_is_lam_to_the_last_bit(lam, fidelity, cap) -> None:
    charged = pals_weights(COUNTS, TARGET, cost=lam / SIZES, fidelity=fidelity, cap=cap)
    assert same_bits(charged, pals_weights(COUNTS, TARGET, lam=lam, fidelity=fidelity, cap=cap))


def test_it_is_so_on_random_tasks() -> None:
    for seed in range(20):
        counts, target = task(seed)
        lam = float(10 ** np.random.default_rng(seed).uniform(-3, 5))
        cost = lam / counts.sum(1)
        assert same_bits(
            pals_weights(counts, target, cost=cost), pals_weights(counts, target, lam=lam)
        )


def test_costs_add_to_lam() -> None:
    kappa = np.array([0.1, 0.02, 0.5, 0.0, 0.3])
    whole = pals_weights(COUNTS, TARGET, cost=3.0 / SIZES + kappa)
    parts = pals_weights(COUNTS, TARGET, lam=3.0, cost=kappa)
    assert parts.weights == pytest.approx(whole.weights, abs=1e-13)
    assert (parts.lam, whole.lam) == (3.0, 0.0)
    assert np.abs(whole.weights - pals_weights(COUNTS, TARGET, lam=3.0).weights).max() > 1e-3


def test_no_charge_is_today_to_the_last_bit() -> None:
    nothing = np.zeros(5)
    for setting in ({"lam": 0.0}, {"lam": 2.0}, {"ess": 0.7}, {"lam": math.inf}):
        plain = pals_weights(COUNTS, TARGET, **setting)
        for charge in ({"price": nothing}, {"price": nothing + 0.25}, {"cost": nothing}):
            charged = pals_weights(COUNTS, TARGET, **setting, **charge)
            if "ess" in setting:  # another search for the same lam
                assert charged.weights == pytest.approx(plain.weights, abs=1e-9)
            else:
                assert same_bits(charged, plain)


def test_a_client_pays_for_its_price() -> None:
    """The dearer, the less weight; in the limit none; and the price paid falls with the rate."""
    price, paid, weight = np.array([0.3, 0.0, 0.1, 1.0, 0.0]), [], []
    for eta in (0.0, 1e-3, 0.01, 0.1, 1.0, 10.0, 1e3, 1e100 / 2):
        solved = pals_weights(COUNTS, TARGET, lam=5.0, price=eta * price)
        assert solved.certified
        paid.append(price @ solved.weights)
        weight.append(solved.weights[3])
    assert all(b <= a + 1e-12 for a, b in pairwise(paid))
    assert weight[0] > 0.1
    assert weight[-1] == weight[-2] == 0.0
    assert not solved.weights[[0, 2]].any()
    # What is left is the programme of those that are free.
    rest = pals_weights(COUNTS[[1, 4]], TARGET, lam=5.0).weights
    assert solved.weights[[1, 4]] == pytest.approx(rest, abs=1e-9)


def test_a_price_of_all_moves_nothing() -> None:
    price = np.array([0.1, -0.2, 0.0, 0.05, 0.3])
    one, other = (pals_weights(COUNTS, TARGET, lam=5.0, price=p) for p in (price, price + 7.0))
    assert other.weights == pytest.approx(one.weights, abs=1e-12)


@pytest.mark.parametrize("charge", [{"price": [0.3, 0.0, 0.1, 0.6, 0.0]}, {"cost": [0.1] * 5}])
def test_an_ess_is_reached_by_the_smallest_lam(charge) -> None:
    solved = pals_weights(COUNTS, TARGET, ess=0.6, **charge)
    assert solved.ess_fraction == pytest.approx(0.6, rel=1e-9)
    assert solved.ess == pytest.approx(effective_sample_size(solved.weights, SIZES))
    less = pals_weights(COUNTS, TARGET, lam=solved.lam * 0.99, **charge)
    assert less.ess_fraction < 0.6
    whole = pals_weights(COUNTS, TARGET, ess=1.0, **charge)
    assert (whole.lam, whole.weights) == (math.inf, pytest.approx(SIZES / SIZES.sum()))
    with pytest.raises(InputError, match="cannot be met: under this cap"):
        pals_weights(COUNTS, TARGET, ess=0.99, cap=0.3, **charge)


def test_rows_of_shares_are_counts() -> None:
    S = COUNTS / SIZES[:, None]
    for setting in ({"lam": 0.0}, {"lam": 2.0}, {"ess": 0.7}, {"lam": 3.0, "fidelity": "norm"}):
        plain = pals_weights(COUNTS, TARGET, **setting)
        given = pals_weights(SIZES[:, None], TARGET, rows=S, **setting)
        assert given.weights == pytest.approx(plain.weights, abs=1e-12)
        assert (given.certified, given.ess) == (True, pytest.approx(plain.ess))
        assert given.distance == pytest.approx(plain.distance)


@pytest.mark.parametrize("scale", [1e-9, 0.3, 1e6])
def test_the_unit_of_rows_does_not_matter(scale: float) -> None:
    """Rows and target times s, lam times s^2: the same weights, distances times s."""
    rng = np.random.default_rng(2)
    rows, target, n = rng.normal(size=(9, 3)), rng.normal(size=3) * 0.2, rng.integers(5, 90, (9, 1))
    for setting in ({"lam": 0.0}, {"lam": 4.0}, {"ess": 0.9}):
        one = pals_weights(n, target, rows=rows, **setting)
        assert one.certified
        setting = {k: v * scale**2 if k == "lam" else v for k, v in setting.items()}
        other = pals_weights(n, target * scale, rows=rows * scale, **setting)
        assert other.certified
        assert other.weights == pytest.approx(one.weights, abs=1e-9)
        assert other.lam == pytest.approx(one.lam * scale**2)
        assert other.residual == pytest.approx(one.residual * scale, abs=1e-12 * scale)
        assert other.distance == pytest.approx(one.distance * scale, abs=1e-12 * scale)


def test_rows_may_be_negative_and_bar_no_one() -> None:
    """A sum of 0 in a column says nothing where terms cancel: all three clients mix to 0."""
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    solved = pals_weights([[10], [10], [20]], [0.0, 0.0], rows=rows, lam=0.0)
    assert solved.weights == pytest.approx([0.25, 0.25, 0.5])
    assert solved.distance < 1e-12


def test_clients_without_examples_have_no_charge() -> None:
    more = np.vstack([COUNTS, np.zeros((1, 3), int)])
    price = np.array([0.1, -0.2, 0.0, 0.05, 0.3, -9.0])
    solved = pals_weights(more, TARGET, lam=5.0, price=price)
    assert solved.weights[5] == 0.0
    alone = pals_weights(COUNTS, TARGET, lam=5.0, price=price[:5])
    assert solved.weights[:5] == pytest.approx(alone.weights, abs=1e-13)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cost": [1.0]}, r"cost must have one entry per client, 5; got shape \(1,\)"),
        ({"cost": [1, 1, 1, 1, -1]}, r"cost\[4\] is -1; allowed: 0 to 1e\+100"),
        ({"cost": [1, 1, 0, 1, 1]}, r"must be more than 0 for every client"),
        ({"cost": [1, 1, 1e-40, 1, 1]}, r"the largest may be 1e\+30 times the smallest"),
        ({"lam": 0.0, "price": [1, 0, 0, 0, 0]}, r"must be more than 0 for every client"),
        ({"lam": 1.0, "price": [1, 0, math.nan, 0, 0]}, r"price\[2\] is nan; allowed"),
        ({"lam": 1.0, "price": "dear"}, "price must be a list of 5 numbers"),
        ({"price": [1, 0, 0, 0, 0]}, "give exactly one of lam and ess; got neither"),
        ({"cost": [1] * 5, "lam": 1.0, "ess": 0.5}, "exactly one of lam and ess; got both"),
        (
            {"lam": 1.0, "price": [1, 0, 0, 0, 0], "fidelity": "norm"},
            'fidelity "norm" takes no price',
        ),
        ({"lam": 1.0, "rows": np.zeros((4, 3))}, r"one row per client.*; got shape \(4, 3\)"),
        ({"lam": 1.0, "rows": np.full((5, 3), math.inf)}, "rows must be finite numbers"),
        ({"lam": 1.0, "rows": np.full((5, 3), 1e101)}, r"rows and target must lie within 1e\+100"),
        (
            {"lam": 1.0, "rows": np.zeros((5, 3)), "normalise_target": True},
            "normalise_target divides label shares",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(setting, message) -> None:
    with pytest.raises(InputError, match=message):
        pals_weights(COUNTS, TARGET, **setting)
