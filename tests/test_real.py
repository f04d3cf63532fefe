"""Numbers from users: what is no number is refused with the reason, never converted."""

from __future__ import annotations

import math
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.diagnose import diagnose, distance_interval
from fedshift.errors import InputError
from fedshift.estimate import estimate_target_accuracy
from fedshift.real import described, number, numbers
from fedshift.server.confree import ConFree
from fedshift.server.optimizers import Adam, Sgd
from fedshift.server.pals import effective_sample_size, ess_curve, pals_weights
from fedshift.server.robust import Geometric, Krum, Trimmed
from fedshift.server.weights import Pals

HUGE = 10**400
COUNTS = [[40, 10, 0], [0, 300, 20], [5, 5, 7]]
TARGET = [0.2, 0.5, 0.3]
NOT_NUMBERS = ["0.5", b"1", True, np.True_, None, 1 + 0j, [0.5], np.array([0.5]), HUGE, object()]


@pytest.mark.parametrize("given", NOT_NUMBERS)
def test_what_is_no_number(given: Any) -> None:
    assert math.isnan(number(given))
    assert len(described(given)) <= 60


@pytest.mark.parametrize(
    "given",
    [0.5, np.float32(0.5), Fraction(1, 2), Decimal("0.5"), np.array(0.5), torch.tensor(0.5)],
)
def test_what_is_a_number(given: Any) -> None:
    assert number(given) == 0.5


def test_integers_that_python_does_not_write_are_described() -> None:
    assert described(10**6000) == "a number beyond all bounds"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([["1", "2"]], "it holds text"),
        ([[b"1", b"2"]], "it holds text"),
        ([[True, False]], "it holds True and False"),
        ([[1 + 2j, 1]], "it holds complex numbers"),
        (np.array([["2020-01-01"]], dtype="datetime64[D]"), "it holds dates"),
        (np.ones((2, 2), dtype="timedelta64[s]"), "it holds spans of time"),
        (np.ma.array([[1, 2]], mask=[[True, False]]), "some entries are masked"),
        ([[HUGE, 1]], "is no number that a float can hold"),
        ([[None, 1]], "None is no number"),
        ([[1, 2], [3]], "rows differ in length"),
    ],
)
def test_arrays_that_hold_no_numbers(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        numbers(given)
    with pytest.raises(InputError, match=reason):
        pals_weights(given, [0.5, 0.5], lam=1.0)
    with pytest.raises(InputError, match=reason):
        estimate_target_accuracy(given, given, [0.5, 0.5])


def test_arrays_of_numbers_of_any_type() -> None:
    for given in (
        [[1, 2]], np.array([[1, 2]], np.int8), np.array([[1, 2]], np.float16),
        torch.tensor([[1, 2]]), [[Fraction(1), Decimal(2)]], np.array([[1, 2]], object),
        np.ma.array([[1, 2]]),
    ):  # fmt: skip
        assert numbers(given).tolist() == [[1.0, 2.0]]  # type: ignore[arg-type]
        assert numbers(given).dtype == np.float64  # type: ignore[arg-type]
    assert math.isnan(numbers([math.nan])[0])  # its caller can say which entry it is


CALLS = (
    lambda setting: pals_weights(COUNTS, TARGET, **setting),
    lambda setting: Pals(tuple(TARGET), **setting),
    lambda setting: diagnose(COUNTS, TARGET, **setting),
)
GIVEN = [x for x in (*NOT_NUMBERS, math.nan, -1.0, -math.inf) if x is not None]


@pytest.mark.few(38)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ["lam", "ess", "cap"])
@pytest.mark.parametrize("call", CALLS)
def test_settings_that_are_no_numbers_are_refused_at_once(call: Any, name: str, given: Any) -> None:
    setting: dict[str, Any] = {"lam": 1.0} if name == "cap" else {}
    setting[name] = given
    start = time.perf_counter()
    with pytest.raises(InputError, match=rf"{name} .*got "):
        call(setting)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("fidelity", ["squared", "norm"])
@pytest.mark.parametrize("lam", [5e-324, 1e-310, 1e-101, 1e101, 1e308])
def test_lambdas_that_cannot_be_computed_with_name_their_limit(lam: float, fidelity: Any) -> None:
    limit = "0" if lam < 1 else "inf"
    with pytest.raises(InputError, match=rf"^lam must be 0, from 1e-100 to 1e\+100.*lam={limit}, "):
        pals_weights(COUNTS, TARGET, lam=lam, fidelity=fidelity)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fidelity", ["squared", "norm"])
def test_lambdas_at_the_ends_are_the_limits(fidelity: Any) -> None:
    for lam, limit in ((1e-100, 0.0), (1e100, math.inf)):
        solved = pals_weights(COUNTS, TARGET, lam=lam, fidelity=fidelity)
        at_limit = pals_weights(COUNTS, TARGET, lam=limit, fidelity=fidelity)
        np.testing.assert_allclose(solved.weights, at_limit.weights, atol=1e-12)
    assert math.copysign(1.0, pals_weights(COUNTS, TARGET, lam=-0.0).lam) == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1e308, 1e200, 2e18, 5e-324, 1e-200, 1e-13])
@pytest.mark.parametrize("setting", [{"lam": 0.0}, {"lam": 1.0}, {"ess": 0.5}, {"lam": math.inf}])
def test_sizes_that_cannot_be_computed_with(count: float, setting: dict[str, float]) -> None:
    for row in ([count, count, 0.0], [0.0, count, 0.0]):
        with pytest.raises(InputError, match=r"label_counts\[1\] has .* examples in all; give 0"):
            pals_weights([[1, 2, 3], row, [3, 4, 5]], TARGET, **setting)


@pytest.mark.few(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cap", [None, 0.6])
@pytest.mark.parametrize("setting", [{"lam": 0.0}, {"lam": 1.0}, {"ess": 1e-17}, {"lam": math.inf}])
def test_sizes_at_the_ends_end_in_weights(setting: dict[str, float], cap: float | None) -> None:
    for fidelity in ("squared", "norm"):
        start = time.perf_counter()
        solved = pals_weights(
            [[1e-12, 0, 0], [0, 4e17, 5e17], [3, 4, 5]],
            TARGET,
            cap=cap,
            fidelity=fidelity,
            **setting,
        )
        assert solved.weights.sum() == pytest.approx(1.0, abs=1e-12)
        assert solved.weights.min() >= 0.0
        assert time.perf_counter() - start < 5.0


def test_a_share_that_floats_hardly_hold_is_one() -> None:
    solved = pals_weights([[1, 5e-324], [1, 2]], [0.5, 0.5], lam=0.0)
    np.testing.assert_allclose(solved.weights, [0.25, 0.75], atol=1e-15)
    plain = pals_weights([[1, 0], [1, 2]], [1.0, 5e-324], lam=0.0)
    assert plain.weights.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("target", [[1e308, 1e308], [5e-324, 5e-324], [1e-310, 1e-310], [3, 3]])
def test_a_target_is_rescaled_whatever_its_sum(target: list[float]) -> None:
    solved = pals_weights([[3, 1], [1, 3]], target, lam=0.0, normalise_target=True)
    assert solved.weights.tolist() == pytest.approx([0.5, 0.5], abs=1e-15)
    assert solved.distance < 1e-15
    diagnosis = diagnose([[3, 1], [1, 3]], target, normalise_target=True)
    assert [x.target for x in diagnosis.labels] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (["0.5", "0.5"], "text"),
        ([True, False], "True"),
        ([HUGE, 1], "no number that a float can hold"),
        ([0.5 + 0j, 0.5], "complex"),
        ("half", "text"),
        ([[0.5, 0.5]], "(shape|a list with a list)"),
    ],
)
def test_targets_of_a_rule(target: Any, reason: str) -> None:
    with pytest.raises(InputError, match=f"target.*{reason}"):
        Pals(target, lam=1.0)
    with pytest.raises(InputError, match=f"target.*{reason}"):
        pals_weights([[3, 1], [1, 3]], target, lam=1.0)


def test_a_rule_takes_any_number() -> None:
    table = {"n": torch.tensor([4.0, 4.0]), "labels": torch.tensor([[3.0, 1.0], [1.0, 3.0]])}
    plain = Pals((0.6, 0.4), lam=0.5)(table).tolist()
    for lam in (Fraction(1, 2), Decimal("0.5"), np.float32(0.5)):
        assert Pals((0.6, 0.4), lam=lam)(table).tolist() == plain  # type: ignore[arg-type]
    assert Pals((0.6, 0.4), lam=0.25)(table).tolist() != plain


WRONG: list[tuple[Any, str]] = [
    (
        lambda: pals_weights(COUNTS, TARGET, lam=1.0, normalise_target="no"),
        "True or False, got the text",
    ),  # type: ignore[arg-type]
    (lambda: ess_curve(COUNTS, TARGET, (0.5, "0.5")), 'ess must .* got the text "0.5"'),  # type: ignore[list-item]
    (lambda: ess_curve(COUNTS, TARGET, (0.5,), cap="1"), 'cap must .* got the text "1"'),  # type: ignore[arg-type]
    (lambda: ess_curve(COUNTS, TARGET, 0.5), "fractions must be a list"),  # type: ignore[arg-type]
    (lambda: ess_curve(COUNTS, TARGET, "0.5"), "fractions must be a list"),  # type: ignore[arg-type]
    (lambda: effective_sample_size([0.5, math.nan], [1, 1]), "must be finite"),
    (lambda: effective_sample_size([0.5, -0.5], [1, 1]), "0 or more"),
    (lambda: effective_sample_size([1.0, 0.0], [5e-324, 1]), "squares are no floats"),
    (lambda: effective_sample_size(["1"], ["2"]), "it holds text"),
    (lambda: distance_interval(COUNTS, TARGET, draws="20"), "draws='20'"),  # type: ignore[arg-type]
    (lambda: distance_interval(COUNTS, TARGET, draws=10**18), "up to 100000"),
    (lambda: distance_interval(COUNTS, TARGET, level=math.nan), "level=nan"),
    (lambda: diagnose(COUNTS, TARGET, bootstrap=True), "draws=True"),
    (lambda: diagnose(COUNTS, TARGET, bootstrap=-1), "draws=-1"),
    (lambda: diagnose(COUNTS, TARGET, classes="abc"), 'not the one text "abc"'),
    (lambda: estimate_target_accuracy([1e308] * 2, [1e308] * 2, [0.5, 0.5]), "1e-12 to 1e"),
    (lambda: estimate_target_accuracy([5e-324] * 2, [5e-324] * 2, [0.5, 0.5]), "1e-12 to 1e"),
    (lambda: Trimmed("0.2"), 'share must be .* got the text "0.2"'),  # type: ignore[arg-type]
    (lambda: Trimmed(True), "got True"),
    (lambda: Krum(1.5), "byzantine must be a whole number, got 1.5"),  # type: ignore[arg-type]
    (lambda: Krum(True), "byzantine must be a whole number, got True"),
    (lambda: Krum(1, "2"), "keep must be a whole number"),  # type: ignore[arg-type]
    (lambda: Geometric(steps=2.5), "steps must be a whole number"),  # type: ignore[arg-type]
    (lambda: Geometric(floor=math.inf), "floor must be a positive number, got inf"),
    (lambda: ConFree(alpha="1"), "alpha must be a number, got the text"),  # type: ignore[arg-type]
    (lambda: Sgd(lr="1"), "lr must be a number, got the text"),  # type: ignore[arg-type]
    (lambda: Sgd(momentum=True), "momentum must be a number, got True"),
    (lambda: Adam(tau=HUGE), "tau must be a positive number"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_numbers_of_other_functions(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_their_right_uses_are_not_refused() -> None:
    assert distance_interval(COUNTS, TARGET, draws=20).draws == 20
    assert Krum(np.int64(1)).byzantine == 1  # type: ignore[arg-type]
    assert Sgd(lr=1).lr == Trimmed(0).share + 1
    assert effective_sample_size([1, 0], [3, 0]) == 3.0
