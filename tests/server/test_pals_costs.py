"""`pals_weights` with costs, prices and rows that are embeddings: laws, and another solver."""

from __future__ import annotations

import clarabel
import numpy as np
import pytest
import scipy.sparse

from fedshift import InputError
from fedshift.server.pals import PalsWeights, pals_weights

COUNTS = np.array([[90, 10, 0], [20, 70, 10], [5, 5, 290], [40, 40, 40]])
TARGET = np.array([0.3, 0.3, 0.4])
SIZES = COUNTS.sum(axis=1).astype(float)


def clarabel_weights(rows, target, cost, price, cap) -> np.ndarray:
    """argmin ||T - S^T a||^2 + sum cost a^2 + price . a by an interior-point solver of cones."""
    clients, width = rows.shape
    off = rows - target
    quadratic = scipy.sparse.block_diag([scipy.sparse.diags(2 * cost), 2 * np.eye(width)])
    ones, none = np.ones((1, clients)), np.zeros((1, width))
    eye, zero = np.eye(clients), np.zeros((clients, width))
    system = np.block([[ones, none], [off.T, -np.eye(width)], [-eye, zero], [eye, zero]])
    right = np.r_[1.0, np.zeros(width), np.zeros(clients), np.full(clients, cap)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-13
    cones = [clarabel.ZeroConeT(1 + width), clarabel.NonnegativeConeT(2 * clients)]
    solved = clarabel.DefaultSolver(
        scipy.sparse.csc_matrix(scipy.sparse.triu(quadratic)),
        np.r_[price, np.zeros(width)],
        scipy.sparse.csc_matrix(system),
        right,
        cones,
        settings,
    ).solve()
    weights = np.clip(np.array(solved.x)[:clients], 0.0, None)
    return weights / weights.sum()


def draw(seed: int) -> dict:
    """A random programme: shares or embeddings of some scale, with any of cost, price and cap."""
    rng = np.random.default_rng(seed)
    clients, width = int(rng.integers(2, 30)), int(rng.integers(2, 12))
    sizes = np.maximum(1.0, (10 ** rng.uniform(0, 4, clients)).round())
    if rng.random() < 0.5:
        rows = rng.dirichlet(np.full(width, 0.3), size=clients)
        target = rng.dirichlet(np.full(width, 0.5))
    else:
        rows = rng.normal(size=(clients, width)) * 10 ** rng.uniform(-2, 2)
        target = rng.normal(size=width) * np.abs(rows).max()
    scale = float(np.abs(rows).max() ** 2)
    costed, priced = rng.random() < 0.6, rng.random() < 0.7
    return {
        "n": sizes,
        "T": target,
        "rows": rows,
        "lam": 0.0 if costed and rng.random() < 0.5 else float(10 ** rng.uniform(-3, 4)) * scale,
        "cost": 10 ** rng.uniform(-5, 1, clients) * scale if costed else None,
        "price": rng.uniform(-1, 1, clients) * 10 ** rng.uniform(-4, 2) * scale if priced else None,
        "cap": min(1.0, float(rng.uniform(1.1, 4)) / clients) if rng.random() < 0.4 else None,
    }


@pytest.mark.parametrize("seed", range(40))
def test_random_programmes_are_solved_as_by_another_solver(seed: int) -> None:
    given = draw(seed)
    sizes, target, rows = given.pop("n"), given.pop("T"), given["rows"]
    solved = pals_weights(sizes, target, **given)
    cost = given["lam"] / sizes + (0.0 if given["cost"] is None else given["cost"])
    price = np.zeros(len(sizes)) if given["price"] is None else given["price"]
    cap = 2.0 if given["cap"] is None else given["cap"]
    other = clarabel_weights(rows, target, cost, price, cap)

    def f(a: np.ndarray) -> float:
        return float(np.sum((target - rows.T @ a) ** 2) + cost @ a**2 + price @ a)

    assert f(solved.weights) <= f(other) + 1e-11 * max(1.0, abs(f(other)))
    # Both values are within the other solver's tolerance, and f is strongly convex.
    apart = np.sum(cost * (solved.weights - other) ** 2)
    assert apart <= abs(f(other) - f(solved.weights)) + 1e-9 * abs(f(other))
    assert solved.certified
    assert solved.gap <= 1e-9 * max(1.0, abs(f(other)))
    np.testing.assert_allclose(
        solved.residual,
        target - rows.T @ solved.weights,
        atol=1e-9 * cost.size * np.abs(rows).max(),
    )
    assert solved.ess == pytest.approx(1.0 / np.sum(solved.weights**2 / sizes))


def same_bits(one: PalsWeights, other: PalsWeights) -> bool:
    fields = ("ess", "ess_fraction", "distance", "gap", "l1_bound", "certified", "lam", "note")
    equal = all(getattr(one, name) == getattr(other, name) for name in fields)
    return (
        equal
        and one.weights.tobytes() == other.weights.tobytes()
        and one.residual.tobytes() == other.residual.tobytes()
    )


@pytest.mark.parametrize("lam", [0.3, 7.0, 1e3])
@pytest.mark.parametrize("cap", [None, 0.4])
def test_cost_lam_over_n_is_that_lam_bit_for_bit(lam: float, cap: float | None) -> None:
    plain = pals_weights(COUNTS, TARGET, lam=lam, cap=cap)
    assert same_bits(pals_weights(COUNTS, TARGET, cost=lam / SIZES, cap=cap), plain)
    other = pals_weights(COUNTS, TARGET, cost=np.sqrt(lam / SIZES), cap=cap)
    assert not same_bits(other, plain)  # the control


def test_any_cost_is_a_size_of_one_over_it_at_lam_1() -> None:
    cost = np.array([1e-3, 0.2, 0.01, 3.0])
    shares = COUNTS / SIZES[:, None]
    sized = pals_weights(shares / cost[:, None], TARGET, lam=1.0)
    solved = pals_weights(COUNTS, TARGET, cost=cost)
    np.testing.assert_allclose(solved.weights, sized.weights, atol=1e-13)
    assert solved.certified
    assert solved.ess == pytest.approx(1 / np.sum(solved.weights**2 / SIZES))


def test_cost_adds_to_lam() -> None:
    both = pals_weights(COUNTS, TARGET, lam=3.0, cost=5.0 / SIZES)
    np.testing.assert_allclose(both.weights, pals_weights(COUNTS, TARGET, lam=8.0).weights)
    assert both.lam == 3.0


@pytest.mark.parametrize("price", [np.zeros(4), np.full(4, 0.7)])
@pytest.mark.parametrize("setting", [{"lam": 0.0}, {"lam": 5.0}, {"ess": 0.9}])
def test_equal_prices_change_no_bit(price: np.ndarray, setting: dict) -> None:
    plain = pals_weights(COUNTS, TARGET, **setting)
    assert same_bits(pals_weights(COUNTS, TARGET, price=price, **setting), plain)


@pytest.mark.parametrize("setting", [{"lam": 0.0}, {"lam": 10.0}, {"ess": 0.5}])
def test_a_price_drives_its_client_out_steadily(setting: dict) -> None:
    weights = []
    for eta in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 1e3, 1e9):
        solved = pals_weights(COUNTS, TARGET, price=[0, 0, 0, eta], **setting)
        assert solved.certified
        weights.append(solved.weights[3])
    assert weights[0] > 0.0
    assert weights[-1] == weights[-2] == 0.0
    # At a fixed ESS lam moves, too: only the ends are certain there.
    if "ess" not in setting:
        assert (np.diff(weights) <= 1e-12).all()
    alone = pals_weights(COUNTS[:3], TARGET, **(setting if "lam" in setting else {"lam": 0.0}))
    if "lam" in setting:
        np.testing.assert_allclose(solved.weights[:3], alone.weights, atol=1e-9)


def test_a_negative_price_draws_its_client_in() -> None:
    drawn = pals_weights(COUNTS, TARGET, lam=0.0, price=[0, -100, 0, 0])
    assert drawn.weights.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capped", [False, True])
def test_the_limit_with_a_price_is_the_cheapest_mixture_of_the_largest_ess(
    seed: int, capped: bool
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 50, size=(9, 4)) + 1
    counts[4] = 2 * counts[3]  # equal shares: a tie that the largest ESS breaks
    target = rng.dirichlet(np.ones(4))
    price = rng.uniform(0, 0.3, 9)
    price[4] = price[3]
    cap = 0.3 if capped else None
    limit = pals_weights(counts, target, lam=0.0, price=price, cap=cap)
    near = pals_weights(counts, target, lam=1e-6 * counts.sum(), price=price, cap=cap)
    assert limit.certified
    assert np.abs(limit.weights - near.weights).max() < 1e-3
    if not capped:
        assert limit.weights[4] == pytest.approx(2 * limit.weights[3])

    def f(a: np.ndarray) -> float:
        shares = counts / counts.sum(1, keepdims=True)
        return float(np.sum((target - shares.T @ a) ** 2) + price @ a)

    assert f(limit.weights) <= f(near.weights) + 1e-13


@pytest.mark.parametrize("more", [{"cost": [0.01, 0.02, 0.03, 0.04]}, {"price": [0, 0.1, 0, 0.2]}])
@pytest.mark.parametrize("ess", [0.7, 0.95, 1.0])
def test_ess_is_reached_by_the_smallest_lam(more: dict, ess: float) -> None:
    solved = pals_weights(COUNTS, TARGET, ess=ess, **more)
    assert solved.ess_fraction == pytest.approx(ess, rel=1e-9) or solved.lam == 0.0
    assert solved.ess_fraction >= ess * (1 - 1e-9)
    if 0.0 < solved.lam < np.inf:
        again = pals_weights(COUNTS, TARGET, lam=solved.lam, **more)
        np.testing.assert_allclose(again.weights, solved.weights, atol=1e-9)
        less = pals_weights(COUNTS, TARGET, lam=0.9 * solved.lam, **more)
        assert less.ess_fraction < ess
    np.testing.assert_allclose(
        pals_weights(COUNTS, TARGET, lam=np.inf, **more).weights, SIZES / SIZES.sum()
    )


def test_an_ess_below_that_of_the_costs_alone_says_so() -> None:
    solved = pals_weights(COUNTS, TARGET, ess=0.1, cost=[0.5, 0.5, 0.5, 0.5])
    assert solved.lam == 0.0
    assert solved.note.startswith("ess=0.1 changes nothing")


@pytest.mark.parametrize("setting", [{"lam": 0.0}, {"lam": 5.0}, {"ess": 0.8}, {"lam": np.inf}])
@pytest.mark.parametrize("scale", [1.0, 2.0**20, 2.0**-20])
def test_rows_of_shares_equal_counts(setting: dict, scale: float) -> None:
    plain = pals_weights(COUNTS, TARGET, **setting)
    rows, target = scale * COUNTS / SIZES[:, None], scale * TARGET
    if setting.get("lam") == 5.0:
        setting = {"lam": 5.0 * scale**2}
    solved = pals_weights(SIZES, target, rows=rows, **setting)
    np.testing.assert_allclose(solved.weights, plain.weights, atol=1e-12)
    assert solved.certified
    assert solved.ess == pytest.approx(plain.ess)
    assert solved.distance == pytest.approx(scale * plain.distance, abs=1e-12 * scale)
    assert solved.lam == pytest.approx(plain.lam * scale**2)


def test_rows_that_cancel_reach_a_target_of_zero() -> None:
    solved = pals_weights([10, 30], [0.0, 0.0], rows=[[1, -1], [-1, 1]], lam=0.0)
    assert solved.weights.tolist() == [0.5, 0.5]
    assert solved.distance == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": [1, 2]}, "cost must have one number per client: there are 4 clients"),
        ({"cost": [1, 0, 1, 1]}, "cost[1] is 0; it must be above"),
        ({"cost": [1, -1, 1, 1]}, "cost[1] is -1; it must be above"),
        ({"price": [0, np.nan, 0, 0], "lam": 1.0}, "price[1] is not finite"),
        ({"price": [0, 1e13, 0, 0], "lam": 1.0}, "price[1] is 1e+13, which drowns all else"),
        ({"price": ["a"] * 4, "lam": 1.0}, "price must be a list of 4 numbers"),
        ({"rows": np.ones((3, 3)), "lam": 1.0}, "rows must have a row for each of the 4 clients"),
        ({"rows": np.ones((4, 2)), "lam": 1.0}, "rows have 2 columns, target has shape (3,)"),
        ({"price": [0, 1, 0, 0]}, "give exactly one of lam and ess; got neither"),
        ({"cost": [1] * 4, "lam": 1.0, "fidelity": "norm"}, 'fidelity="norm" takes no cost'),
        (
            {"rows": np.ones((4, 3)), "lam": 1.0, "normalise_target": True},
            "normalise_target is for label shares",
        ),
    ],
)
def test_what_cannot_be_is_refused(change: dict, message: str) -> None:
    with pytest.raises(InputError) as refused:
        pals_weights(COUNTS, TARGET, **change)
    assert message in str(refused.value)


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(20))
def test_certificates_hold_at_all_ends(seed: int) -> None:
    rng = np.random.default_rng([7, seed])
    clients, classes = int(rng.integers(2, 60)), int(rng.integers(2, 12))
    sizes = np.maximum(1, 10 ** rng.uniform(0, 4, clients)).astype(int)
    counts = np.stack([rng.multinomial(n, rng.dirichlet(np.full(classes, 0.3))) for n in sizes])
    target = rng.dirichlet(np.full(classes, 0.5))
    # One-hot clients of other prices are no equal clients.
    price = rng.uniform(0, 1, clients) * 10 ** rng.uniform(-4, 4)
    cost = rng.uniform(1e-6, 1e-1, clients)
    for setting in ({"lam": 0.0}, {"ess": 0.5}, {"ess": 0.5, "cost": cost}, {"lam": np.inf}):
        assert pals_weights(counts, target, price=price, **setting).certified
    equal = pals_weights([[5, 0], [5, 0], [0, 5]], [0.5, 0.5], lam=0.0, price=[0.0, 0.1, 0.0])
    np.testing.assert_allclose(equal.weights, [0.5, 0.0, 0.5], atol=1e-12)


def draw_uneven(seed: int) -> dict:
    """Label counts of many clients, from 1 to 1e5 examples, rare labels among them, with prices."""
    rng = np.random.default_rng(seed)
    clients, classes = int(rng.integers(50, 200)), int(rng.integers(20, 50))
    sizes = np.maximum(1, np.round(10 ** rng.uniform(0, 5, clients))).astype(int)
    shares = rng.dirichlet(np.full(classes, 0.3), size=clients)
    counts = np.stack([rng.multinomial(n, p) for n, p in zip(sizes, shares, strict=True)])
    return {
        "label_counts": counts,
        "target": rng.dirichlet(np.full(classes, 0.3)),
        "lam": float(10 ** rng.uniform(-3, 5)),
        "price": rng.normal(size=clients) * 10 ** rng.uniform(-6, 1),
        "cap": min(1.0, float(rng.uniform(1.01, 4)) / clients) if seed % 3 == 0 else None,
    }


def kkt_violation(task: dict, a: np.ndarray) -> float:
    """How much larger the slope of a client that could give weight is than of one to take it."""
    n = task["label_counts"].sum(axis=1)
    S = task["label_counts"] / n[:, None]
    slopes = -2 * S @ (task["target"] - a @ S) + 2 * task["lam"] * a / n + task["price"]
    cap = task["cap"] or 2.0
    gap = slopes[a > 0].max() - slopes[a < cap].min(initial=np.inf)
    return float(gap / max(1.0, np.abs(slopes).max()))


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(150))
def test_a_price_on_uneven_clients_is_solved_exactly(seed: int) -> None:
    """Where shares of rare labels express a price badly, it must not be split along them."""
    task = draw_uneven(seed)
    solved = pals_weights(**task)
    assert solved.certified
    assert kkt_violation(task, solved.weights) < 1e-9
    moved = solved.weights.copy()  # the control
    giver, taker = np.argmax(moved), np.argmin(moved)
    moved[giver], moved[taker] = moved[giver] - 1e-4, moved[taker] + 1e-4
    assert kkt_violation(task, moved) > 1e-9
