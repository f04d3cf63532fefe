"""Hard cases for certificates: faces of the hull, and rows that nearly agree."""

from __future__ import annotations

from fractions import Fraction
from importlib import import_module

import numpy as np
import pytest

from fedshift import pals_weights
from fedshift.server.rounding import rank
from support.other_solvers import conic, exact_weights, off_exact

drawn = import_module("certificates")  # a benchmark, on the path by the import above


def norm_objective(counts: np.ndarray, target: np.ndarray, lam: float, a: np.ndarray) -> float:
    """||T - S^T a|| + lam sum_i a_i^2 / n_i."""
    n = counts.sum(1)
    return float(np.linalg.norm(target - a @ (counts / n[:, None])) + lam * np.sum(a * a / n))


@pytest.mark.few(5)
@pytest.mark.parametrize("lam", [1.0, 12.0, 42.0, 93.0, 1e4])
@pytest.mark.parametrize(
    ("counts", "target"),
    [
        ([[20, 20, 0], [9, 0, 9]], [0.5, 0.5, 0.0]),  # a vertex: the first client alone
        ([[100, 0, 0], [0, 100, 0], [0, 0, 100]], [1.0, 0.0, 0.0]),
        ([[30, 30, 0], [0, 25, 25], [40, 0, 40], [9, 9, 9]], [0.25, 0.5, 0.25]),  # an edge
        ([[50, 50, 0, 0], [0, 30, 30, 0], [0, 0, 20, 20]], [0.3, 0.5, 0.2, 0.0]),
    ],
)
def test_the_norm_form_on_faces(counts: list[list[int]], target: list[float], lam: float) -> None:
    table, T = np.array(counts, float), np.array(target)
    solved = pals_weights(table, T, lam=lam, fidelity="norm")
    assert solved.certified
    n = table.sum(1)
    ours = norm_objective(table, T, lam, solved.weights)
    other = norm_objective(table, T, lam, conic(table / n[:, None], T, lam / n, norm=True))
    assert ours <= other + 1e-9 * max(1.0, other)
    at_zero = pals_weights(table, T, lam=0.0).weights
    if lam == 1e4:  # the control: the lambda = 0 answer, once returned here, is far off
        assert norm_objective(table, T, lam, at_zero) > 1.05 * ours


NEARLY_DEPENDENT = [[1109, 8453, 1473], [4019, 7611, 4812], [4576, 15015, 5624]]


def test_nearly_dependent_rows_are_not_certified_wrongly() -> None:
    """Three clients whose marginals lie on a line to 1e-13: rounding decides, and is charged."""
    target = [0.18225147205725611, 0.5938527115832326, 0.22389581635951125]
    solved = pals_weights(NEARLY_DEPENDENT, target, lam=0.0)
    error = off_exact(NEARLY_DEPENDENT, target, 0.0, solved.weights)
    assert error <= 1e-6 or not solved.certified
    apart = [[1109, 8453, 1473], [4019, 7611, 9812], [9576, 15015, 5624]]
    mixed = (np.array(apart) / np.array(apart).sum(1)[:, None]).T @ [0.2, 0.3, 0.5]
    clear = pals_weights(apart, mixed, lam=0.0)
    assert clear.certified  # the control: rows that differ are certified, and right
    assert np.abs(clear.weights - [0.2, 0.3, 0.5]).max() < 1e-12


@pytest.mark.parametrize("scale", [1e-15, 6.5e-15, 1e-14, 1e-13, 1e-11, 1e-9, 1e-6])
def test_tiny_lambdas_are_not_certified_by_the_limit(scale: float) -> None:
    """0 < lam < 1e-12 N may return the limit; it is certified only where it is lam's own answer."""
    counts = [[528, 364, 441], [216, 616, 383], [95, 150, 116]]
    table = np.array(counts, float)
    n = table.sum(1)
    target = (np.full(3, 1 / 3) @ (table / n[:, None])).tolist()
    solved = pals_weights(counts, target, lam=scale * n.sum())
    error = off_exact(counts, target, scale * n.sum(), solved.weights)
    assert error <= 1e-6 or not solved.certified
    if scale >= 1e-6:
        assert solved.certified


# ---------------------------------------------------------------- clients that hardly differ


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", range(4))
def test_clients_that_hardly_differ_are_certified_rightly(kind: int) -> None:
    """A sample of `benchmarks/certificates.py`, of which `make test-slow` runs a third."""
    certified, count = 0, 25 if kind < 3 else 8
    for index in range(kind + 8, 4 * count + 8, 4):
        programme = drawn.draw(index)
        solved = programme.solve()
        off = exact_weights.l1(solved.weights.tolist(), drawn.exact_answer(programme, solved))
        assert off <= 1e-6 or not solved.certified, index
        certified += solved.certified
    assert certified >= (22 if kind < 3 else 2)


@pytest.mark.slow
def test_no_certificate_is_false_on_280_programmes() -> None:
    """A third of those of `results/certificates.md`."""
    rows = drawn.run(0, drawn.PROGRAMMES // 3)
    assert rows["all"].false == 0
    assert rows["all"].right >= 278
    assert rows["all"].certified >= 240


def test_a_cap_among_two_clients_that_hardly_differ() -> None:
    """Shares 1e-8 apart: the weights follow from one equation, and meet the cap."""
    counts, target = [[4876086, 14573557], [4876086, 14573559]], [0.2507030885707618, 0.7492969114]
    target[1] = 1.0 - target[0]
    shares, cap = [Fraction(a, a + b) for a, b in counts], 0.50005
    first = (Fraction(target[0]) - shares[1]) / (shares[0] - shares[1])
    solved = pals_weights(counts, target, lam=0.0, cap=cap)
    expected = float(min(max(first, 1 - Fraction(cap)), Fraction(cap)))
    assert solved.weights[0] == pytest.approx(expected, abs=1e-9)
    assert solved.certified


def test_the_reference_detects_wrong_weights() -> None:
    programme = drawn.draw(0)
    solved = programme.solve()
    best = drawn.exact_answer(programme, solved)
    assert exact_weights.l1(solved.weights.tolist(), best) <= 1e-6
    moved = [float(x) for x in solved.weights]
    moved[0], moved[-1] = moved[-1], moved[0]
    assert exact_weights.l1(moved, best) > 1e-3


# Counts, target and cap, with the optimum in rational arithmetic.
NEAR_TIES = [
    # A share of 1e-16 of a label that the target does not have bars the client from lambda = 0.
    (
        [[0, 874706], [0, 2494043], [728, 2233290], [1, 7736122023524831]],
        [0.0, 1.0], 0.5694442926198094,
        [0.43055570738019056, 0.5694442926198094, 0.0, 0.0],
    ),
    # Four clients on a line but for 1e-12: rounding of the target needs one off the edge.
    (
        [[169298783160, 101593714082, 19763130559], [159189624444, 130083012970, 1382990386],
         [993194082149, 693501495045, 67410042651], [1033386272913, 743921156477, 59010629917]],
        [0.5743415842632189, 0.3724459811260842, 0.053212434610696885], None,
        [0.500003676608229, 3.2282143162304244e-06, 0.49999309517745477, 0.0],
    ),
    # A client that has 1e-14 of a label and two that have none of it are no tie.
    (
        [[876827722, 795223463044, 69122716015221], [1, 65257272649448, 4661543656539],
         [0, 11623637289256, 58295179016732], [0, 13030386725712, 56888429580276],
         [83384458, 68597021906091, 1321711015439]],
        [0.32931804126686764, 0.2804557112578814, 0.39022624747525103], 0.2938919212705731,
        [0.2938919212705731, 0.11048007187062739, 0.2938919212705731, 0.007844164317653253,
         0.2938919212705731],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("counts", "target", "cap", "best"), NEAR_TIES)
def test_near_ties_are_not_certified_as_ties(
    counts: list[list[int]], target: list[float], cap: float | None, best: list[float]
) -> None:
    solved = pals_weights(counts, target, lam=0.0, cap=cap)
    assert np.abs(solved.weights - best).sum() <= 1e-6 or not solved.certified


def test_ties_are_certified() -> None:
    """The control: clients that are dependent to the last digit, two and two of one mixture."""
    counts = [[6, 6, 0, 0], [0, 0, 9, 9], [7, 0, 7, 0], [0, 5, 0, 5]]
    for target in ([0.25] * 4, [0.3, 0.2, 0.3, 0.2]):
        solved = pals_weights(counts, target, lam=0.0)
        assert solved.certified
        assert off_exact(counts, target, 0.0, solved.weights) <= 1e-12


def test_ranks_of_tables_of_counts() -> None:
    assert rank(np.array([[1.0, 2.0], [2.0, 4.0]])) == 1
    assert rank(np.array([[1.0, 2.0], [2.0, np.nextafter(4.0, 5.0)]])) == 2
    assert rank(np.array([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0]])) == 2  # 0.3 is not 3 times 0.1
    assert rank(np.array([[0.125, 0.25], [1.0, 2.0]])) == 1
    assert rank(np.zeros((3, 2))) == 0
    rng = np.random.default_rng(0)
    for thick in range(1, 6):
        table = rng.integers(0, 9, (8, thick)) @ rng.integers(0, 9, (thick, 6))
        assert rank(table.astype(float)) == np.linalg.matrix_rank(table)
