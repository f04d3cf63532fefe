"""Shifts: 10,000 random cases, the partition checker, laws, speed and bad input."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from fedshift.errors import InputError
from fedshift.shifts import (
    DirichletPerClass,
    DirichletPerClient,
    Iid,
    QuantitySkew,
    Shards,
    Shift,
    Sparsity,
    check_partition,
    dirichlet_marginal,
    label_counts,
    marginals,
    resample_to,
    sparse_marginal,
)
from support.partitions import rng, table

ALL: list[Shift] = [
    Iid(),
    QuantitySkew(0.5),
    Shards(2),
    Sparsity(3),
    DirichletPerClient(0.5),
    DirichletPerClient(0.5, rule="fill"),
    DirichletPerClass(0.5),
    DirichletPerClass(0.5, capacity=True),
]
EVEN = np.repeat(np.arange(10), 500)


def same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# --- 10,000 random cases -------------------------------------------------------------------------

# Per kind: the shift, whether it uses every sample, and the errors it may raise although there are
# enough samples for all clients.
Case = tuple[Shift, bool, tuple[str, ...]]


def random_shift(draw: np.random.Generator, kind: int, classes: int) -> Case:
    beta, least = float(10 ** draw.uniform(-2, 2)), int(draw.choice([1, 1, 2, 10]))
    return [
        lambda: (Iid(), True, ()),
        lambda: (QuantitySkew(beta, min_size=least - 1), True, ("needs",)),
        lambda: (Shards(int(draw.integers(1, 5))), True, ("shards of",)),
        lambda: (
            Sparsity(1 + int((classes + 1) * draw.random() ** 3)),
            False,
            ("number of labels in the data", "at least one. Ask for fewer"),
        ),
        lambda: (DirichletPerClient(beta, least), False, ("needs", "not reached")),
        lambda: (DirichletPerClient(beta, least, "fill"), True, ("needs",)),
        lambda: (
            DirichletPerClass(beta, least - 1, bool(draw.integers(2))),
            True,
            ("needs", "not reached"),
        ),
    ][kind]()


def random_labels(draw: np.random.Generator, classes: int) -> np.ndarray:
    n = int(2000 * draw.random() ** 2)
    skew = draw.dirichlet(np.full(classes, 10 ** draw.uniform(-1, 2)))
    return draw.choice(classes, size=n, p=skew)


def dealt(shift: Shift, labels: np.ndarray, classes: int, clients: int, seed: int):
    """The parts or the error's text, and the processor seconds it took."""
    start = time.process_time()
    try:
        outcome = shift(labels, classes, clients, rng(seed))
    except InputError as error:
        outcome = str(error)
    return outcome, time.process_time() - start


@pytest.mark.slow
def test_ten_thousand_random_cases() -> None:
    draw, succeeded = rng(0), np.zeros(7, int)
    for seed in range(10_000):
        classes, clients = int(draw.integers(2, 31)), int(draw.integers(1, 61))
        labels = random_labels(draw, classes)
        shift, whole, reasons = random_shift(draw, seed % 7, classes)
        outcome, seconds = dealt(shift, labels, classes, clients, seed)
        where = f"case {seed}: {shift}, n={labels.size}, K={classes}, M={clients}"
        assert seconds < 1, where
        if isinstance(outcome, str):
            too_few = labels.size < max(clients, 1)
            allowed = ("clients=", "labels of shape") if too_few else reasons
            assert any(text in outcome for text in allowed), f"{where}: {outcome}"
            short = clients * getattr(shift, "min_size", 0) > labels.size
            assert too_few or ("needs" not in reasons) or short == (" needs " in outcome), where
            continue
        least = getattr(shift, "min_size", 1)
        check_partition(outcome, labels.size, clients, whole=whole, min_size=least)
        succeeded[seed % 7] += 1
        if seed % 10 == 0:
            assert same(outcome, shift(labels, classes, clients, rng(seed))), where
    # A loop of refusals would show nothing; on skewed labels Sparsity often has to refuse.
    assert (succeeded > 10_000 / 7 / 3).all(), succeeded


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([[0, 1], [2, 2]], "not a strictly ascending"),
        ([[1, 0], [2, 3]], "not a strictly ascending"),
        ([[0, 1, 2], [2, 3]], "sample 2 is in 2 parts"),
        ([[0, 1], [3, 4]], "sample 2 is in no part"),
        ([[0, 1], [2, 3, 5]], "allowed: indices 0..4"),
        ([[-1, 0], [1, 2, 3, 4]], "allowed: indices 0..4"),
        ([[0, 1, 2, 3, 4]], "1 parts for 2 clients"),
        ([[0, 1, 2, 3], [4]], "part 1 holds 1 samples, fewer than min_size=2"),
    ],
)
def test_checker_refuses_broken_partitions(parts: list[list[int]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_partition([np.array(p) for p in parts], 5, 2, whole=True, min_size=2)
    check_partition([np.array([0, 1]), np.array([2, 3, 4])], 5, 2, whole=True, min_size=2)
    with pytest.raises(InputError, match="int64"):
        check_partition([np.array([0, 1], np.int32), np.array([2, 3])], 5, 2)


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", ALL, ids=str)
def test_function_of_the_stream(shift: Shift) -> None:
    first = shift(EVEN, 10, 7, rng(1))
    assert same(first, shift(EVEN.astype(np.uint8), 10, 7, rng(1)))
    assert not same(first, shift(EVEN, 10, 7, rng(2)))
    assert (table(shift, EVEN, 7, 1) != table(shift, EVEN, 7, 2)).any()
    assert all(part.dtype == np.int64 for part in first)
    with pytest.raises(FrozenInstanceError):
        shift.beta = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "shift", [s for s in ALL if not isinstance(s, Iid | QuantitySkew)], ids=str
)
def test_label_table_ignores_the_order_of_samples(shift: Shift) -> None:
    skewed = np.repeat(np.arange(10), np.arange(100, 1100, 100))
    shuffled = rng(5).permutation(skewed)
    np.testing.assert_array_equal(table(shift, skewed, 6, 3), table(shift, shuffled, 6, 3))
    # Control: one sample of another label changes the table of every shift that reads labels.
    other = np.append(skewed[200:], np.zeros(200, int) + 9)
    assert (table(shift, skewed, 6, 3) != table(shift, other, 6, 3)).any()


@pytest.mark.parametrize("shift", ALL, ids=str)
def test_renaming_labels_changes_nothing_where_labels_are_not_read(shift: Shift) -> None:
    name = np.array([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    unchanged = same(shift(EVEN, 10, 7, rng(1)), shift(name[EVEN], 10, 7, rng(1)))
    assert unchanged == isinstance(shift, Iid | QuantitySkew)


@pytest.mark.parametrize("shift", ALL, ids=str)
def test_a_thousand_clients_in_a_second(shift: Shift) -> None:
    labels = rng(0).integers(0, 10, 60_000)
    outcome, seconds = dealt(shift, labels, 10, 1000, 0)
    assert seconds < 1
    assert len(outcome) == 1000
    assert not isinstance(outcome, str)


@pytest.mark.parametrize("capacity", [False, True])
def test_a_minimum_out_of_reach_is_an_error_within_a_second(capacity: bool) -> None:
    labels = rng(0).integers(0, 10, 60_000)
    shift = DirichletPerClass(0.01, min_size=50, capacity=capacity)
    outcome, seconds = dealt(shift, labels, 10, 1000, 0)
    assert seconds < 1
    assert outcome.startswith("min_size=50 not reached: in the best of 100 draws")


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [DirichletPerClient, DirichletPerClass])
def test_beta_goes_from_one_label_to_iid(kind: type[DirichletPerClient]) -> None:
    labels, concentrated, even = np.repeat(np.arange(10), 5000), [], []
    for seed in range(10):
        small = table(kind(0.01, 1), labels, 5, seed)
        # Per class, it is a label's samples that gather at one client.
        rows = small if kind is DirichletPerClient else small.T
        concentrated.append(marginals(rows).max(axis=1))
        even.append(table(kind(1e6, 1), labels, 5, seed))
    assert np.mean(concentrated) > 0.9
    assert (abs(marginals(np.concatenate(even)) - 0.1) < 0.002).all()


# --- bad input -----------------------------------------------------------------------------------

Y = np.repeat(np.arange(3), 10)
# (the call, what its message names): the argument at fault and the value.
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: DirichletPerClient(-0.1), "beta=-0.1"),
    (lambda: DirichletPerClass(float("nan")), "beta=nan"),
    (lambda: QuantitySkew(True), "beta=True"),
    (lambda: DirichletPerClass("0.1"), "beta='0.1'"),  # type: ignore[arg-type]
    (lambda: DirichletPerClient(1, rule="fil"), 'rule "fil".*mean "fill"'),  # type: ignore[arg-type]
    (lambda: DirichletPerClient(1, min_size=0), "min_size=0"),
    (lambda: QuantitySkew(1, min_size=1.5), "min_size=1.5"),  # type: ignore[arg-type]
    (lambda: Sparsity(0), "labels_per_client=0"),
    (lambda: Shards(0), "per_client=0"),
    (lambda: Sparsity(4)(Y, 5, 2, rng(0)), "labels_per_client=4.*2 of 5 classes"),
    (lambda: Sparsity(3)(Y, 3, 11, rng(0)), "label 0 is drawn by 11 of 11 clients"),
    (lambda: Shards(4)(Y, 3, 10, rng(0)), "per_client=4"),
    (lambda: Iid()(Y, 3, 0, rng(0)), "clients=0"),
    (lambda: Iid()(Y, 3, 31, rng(0)), "clients=31"),
    (lambda: Iid()(Y, 0, 2, rng(0)), "classes=0"),
    (lambda: Iid()(Y, 2, 2, rng(0)), "label 2 with classes=2"),
    (lambda: Iid()(Y - 1, 3, 2, rng(0)), "label -1 with classes=3"),
    (lambda: Iid()(Y[:0], 3, 1, rng(0)), r"labels of shape \(0,\)"),
    (lambda: Iid()(Y[None], 3, 1, rng(0)), r"labels of shape \(1, 30\)"),
    (lambda: Iid()(Y / 1.0, 3, 1, rng(0)), "labels of type float64"),
    (lambda: Iid()(Y, 3, 1, 0), "rng=0"),  # type: ignore[arg-type]
    (lambda: QuantitySkew(1, 11)(Y, 3, 3, rng(0)), "min_size=11"),
    (lambda: DirichletPerClass(0.01, 3)(Y, 3, 10, rng(0)), "min_size=3 not reached"),
    (lambda: resample_to(Y, [0.5, 0.5], 3, rng(0)), "marginal has 2 numbers"),
    (lambda: resample_to(Y, [0.5, 0.5, 0.5], 3, rng(0)), "marginal sums to 1.5"),
    (lambda: resample_to(Y, [1.5, -0.5, 0], 3, rng(0)), r"marginal\[1\]=-0.5"),
    (lambda: resample_to(Y, [1, 0, np.nan], 3, rng(0)), r"marginal\[2\]=nan"),
    (lambda: resample_to(Y, ["a", 0, 0], 3, rng(0)), "marginal: .*'a'"),  # type: ignore[list-item]
    (lambda: resample_to(Y, [0.5, 0, 0, 0.5], 4, rng(0)), "no samples of label 3"),
    (lambda: resample_to(Y, [1, 0, 0], 3, rng(0), 11), "size=11"),
    (lambda: sparse_marginal(3, 4, rng(0)), "labels_per_client=4"),
    (lambda: dirichlet_marginal(3, 0, rng(0)), "beta=0"),
    (lambda: marginals([[1, -1]]), "counts"),
    (lambda: marginals([[1, 2], [3]]), "counts"),
    (lambda: marginals([1, 2]), "counts"),
    (lambda: label_counts(Y, [np.arange(30)], 2), "labels from 0 to 2"),
]


@pytest.mark.parametrize(("call", "names"), BAD, ids=[names for _, names in BAD])
def test_bad_input_is_named(call: Callable[[], object], names: str) -> None:
    with pytest.raises(InputError, match=f"(?s){names}"):
        call()
