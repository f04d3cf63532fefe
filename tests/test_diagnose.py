"""Diagnosis from label histograms: coverage, true verdicts, exact small cases."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from fedshift.diagnose import FRACTIONS, TOLERANCE, cost, diagnose, distance_interval
from fedshift.diagnosis import Diagnosis
from fedshift.errors import InputError
from fedshift.seeds import numpy_generator
from fedshift.server.pals import pals_weights

NAMES = ("cat", "dog", "owl")
# Three clients with one label each: every target is covered, with weights T.
CORNERS = np.diag([100, 100, 100])


def verdict_of(d: Diagnosis) -> str:
    return "\n".join(d.verdict)


def test_it_shows_its_verdict_and_a_short_repr() -> None:
    d = diagnose(CORNERS, [0.5, 0.3, 0.2], classes=NAMES, clients=["<b>", "b", "c"])
    assert str(d) == verdict_of(d)
    assert repr(d) == "Diagnosis(inside: distance 0.000, chosen λ = 0)"
    assert d._repr_html_().count("<p>") == len(d.verdict)
    assert "<b>" not in d._repr_html_()


# --------------------------------------------------------------------------- coverage


def test_a_target_inside_is_covered_with_everybody_taking_part() -> None:
    d = diagnose(CORNERS, [0.5, 0.3, 0.2], classes=NAMES)
    assert d.covered
    assert d.case == "inside"
    assert d.distance <= TOLERANCE
    assert d.verdict[0].startswith("Covered: the clients can be mixed into exactly the target's")
    # With one label per client the mixture is the weights, so lambda = 0 gives a = T, and
    # ESS = 1 / sum_i T_i^2 / 100.
    assert [x.closest for x in d.labels] == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)
    assert d.curve[0].ess == pytest.approx(100 / (0.25 + 0.09 + 0.04), rel=1e-9)
    assert d.fedavg_gap == pytest.approx(0.5 - 1 / 3 + 1 / 3 - 0.3 + 1 / 3 - 0.2)


def test_a_target_on_a_face_leaves_clients_out() -> None:
    d = diagnose(CORNERS, [0.5, 0.5, 0.0], classes=NAMES)
    assert d.case == "face"
    assert d.covered
    assert d.outsiders == 1
    assert "only by leaving at least one of them out" in verdict_of(d)
    assert "1 of 3 clients have labels that the target does not have" in verdict_of(d)
    assert d.labels[2].closest == 0.0


def test_a_target_on_a_face_between_clients_that_hold_every_label() -> None:
    """No label is zero: only the geometry shows that the third client must be left out."""
    counts = np.array([[80, 10, 10], [10, 80, 10], [30, 30, 40]])
    edge = (counts[0] + counts[1]) / 200
    assert diagnose(counts, edge).case == "face"
    assert diagnose(counts, 0.99 * edge + 0.01 * counts[2] / 100).case == "inside"


def test_a_target_outside_says_how_far_and_in_which_labels() -> None:
    counts = np.array([[90, 10, 0], [80, 10, 10]])
    T = np.array([0.2, 0.3, 0.5])
    d = diagnose(counts, T, classes=NAMES)
    # The second client is nearer for every mixture, so it is the projection.
    expected = np.linalg.norm(T - np.array([0.8, 0.1, 0.1]))
    assert not d.covered
    assert d.case == "outside"
    assert d.distance == pytest.approx(expected, rel=1e-9)
    assert d.closest_gap == pytest.approx(0.6 + 0.2 + 0.4)
    assert d.surplus == ("cat",)
    assert d.deficit == ("dog", "owl")
    assert "Not covered: no weighting" in verdict_of(d)
    assert "misplaces 60.0 % of the label mass" in verdict_of(d)
    assert "too little of owl (10.0 % instead of 50.0 %) and dog" in verdict_of(d)


def test_one_client_carries_and_two_carry() -> None:
    def verdict(target: list[float]) -> str:
        return " ".join(diagnose([[80, 10, 10], [10, 70, 20], [5, 15, 60]], target).verdict)

    assert "1 of 3 clients carries 99.7 %" in verdict([0.1, 0.1, 0.8])
    assert "3 of 3 clients carry 100" in verdict([1 / 3, 1 / 3, 1 / 3])


def test_a_target_just_outside_is_nearly_covered() -> None:
    counts = np.array([[100, 0, 0], [0, 100, 0]])
    d = diagnose(counts, [0.5, 0.495, 0.005], classes=NAMES)
    assert not d.covered
    assert "Not covered, but nearly" in d.verdict[0]


def test_a_sparse_target_whose_label_no_client_has() -> None:
    counts = np.array([[60, 40, 0], [50, 50, 0]])
    d = diagnose(counts, [0.0, 0.5, 0.5], classes=NAMES)
    assert d.missing == ("owl",)
    assert d.labels[2].holders == 0
    assert "No client has any example of owl, 50.0 % of the target" in verdict_of(d)


def test_rounded_targets_stay_covered() -> None:
    assert diagnose(CORNERS, [0.3333333, 0.3333333, 0.3333334]).covered
    assert not diagnose(CORNERS[:2], [0.5, 0.49999, 0.00001]).covered


@pytest.mark.slow
@pytest.mark.parametrize("case", ["inside", "face", "outside", "sparse"])
def test_the_case_is_right_on_random_constructions(case: str) -> None:
    rng = numpy_generator("test", case)
    for _ in range(25):
        K, M = int(rng.integers(3, 8)), int(rng.integers(3, 12))
        counts = rng.integers(1, 60, (M, K))
        if case == "sparse":
            counts *= rng.random((M, K)) < 0.5
            counts[:, -1] = 0
            counts[0, 0] += 5
        S = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        if case == "inside":
            target = (0.05 / M + 0.95 * rng.dirichlet(np.ones(M))) @ S
        elif case == "face":  # the client with most of label 0 is a vertex of the hull
            target = S[np.argmax(S[:, 0])]
        elif case == "outside":  # more of label 0 than anybody has
            target = 0.2 * np.eye(K)[0] + 0.8 * S[np.argmax(S[:, 0])]
        else:
            target = 0.7 * np.eye(K)[-1] + 0.3 * rng.dirichlet(np.ones(K))
        d = diagnose(counts, target)
        assert d.case == ("outside" if case == "sparse" else case)
        assert d.covered == (case in ("inside", "face"))
        assert ("Covered" in d.verdict[0]) == d.covered
        assert bool(d.missing) == (case == "sparse")


# --------------------------------------------------------------------------- curve and choice


def random_problem(seed: int, M: int = 12, K: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = numpy_generator("test", "problem", seed)
    counts = rng.integers(0, 80, (M, K)) * (rng.random((M, K)) < 0.6)
    counts[:, 0] += 1
    return counts, rng.dirichlet(np.ones(K))


def test_the_curve_rises_with_the_ess_and_ends_at_fedavg() -> None:
    for seed in range(5):
        d = diagnose(*random_problem(seed))
        ess = [p.ess_fraction for p in d.curve]
        assert ess == sorted(ess)
        assert d.curve[0].lam == 0.0
        assert d.curve[0].distance == pytest.approx(d.distance, abs=1e-9)
        assert d.curve[-1].lam == math.inf
        assert d.curve[-1].ess_fraction == pytest.approx(1.0)
        assert d.curve[-1].l1 == pytest.approx(d.fedavg_gap)
        distances = [p.distance for p in d.curve]
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(distances))
        inner = {round(p.ess_fraction, 6) for p in d.curve[1:-1]}
        assert inner == {f for f in FRACTIONS if ess[0] < f}


def test_the_recommendation_minimises_the_documented_cost() -> None:
    for seed in range(5):
        counts, T = random_problem(seed)
        d = diagnose(counts, T)
        for p in d.curve:
            assert p.cost == pytest.approx(p.l1 / 2 + math.sqrt(len(T) / p.ess))
        assert d.chosen.cost == pytest.approx(min(p.cost for p in d.curve))
        assert sum(p.chosen for p in d.curve) == 1
        assert d.chosen_by == "rule"
        assert "least cost = L1 distance / 2 + sqrt(K / ESS)" in d.rule
    assert cost(0.5, 400.0, 4) == pytest.approx(0.35)


def test_the_correction_comes_before_weights() -> None:
    """Where FedAvg does not fit; the control: where it does, there is nothing to correct."""
    apart = diagnose([[90, 10], [20, 80]], [0.9, 0.1])
    fits = diagnose([[90, 10], [10, 90]], [0.5, 0.5])
    for one, wanted in ((apart, True), (fits, False)):
        lines = [s for s in one.verdict if s.startswith("First try FedAvg with a corrected prior")]
        assert bool(lines) == wanted


def test_when_fedavg_fits_fedavg_is_recommended() -> None:
    counts, _ = random_problem(0)
    d = diagnose(counts, counts.sum(0) / counts.sum())
    assert d.chosen.lam == math.inf
    assert "FedAvg already trains on nearly the target's labels" in verdict_of(d)


def test_little_data_is_not_spent_on_a_small_gap() -> None:
    counts = np.array([[500, 500], [6, 4]])
    d = diagnose(counts, [0.6, 0.4])
    assert d.curve[0].ess == pytest.approx(10, rel=1e-6)
    assert d.chosen.ess > 500


def test_lam_or_ess_is_the_users_choice() -> None:
    counts, T = random_problem(1)
    d = diagnose(counts, T, ess=0.6)
    assert d.chosen_by == "ess"
    assert d.chosen.ess_fraction == pytest.approx(0.6)
    assert "With the ESS given: effective sample size 60.0 %" in verdict_of(d)
    d = diagnose(counts, T, lam=math.inf)
    assert d.chosen_by == "lam"
    assert [c.weight for c in d.carriers] == pytest.approx([c.n_share for c in d.carriers])
    assert "lambda infinite" in verdict_of(d)


def test_a_cap_bounds_the_weights_but_not_the_coverage() -> None:
    d = diagnose(CORNERS, [0.8, 0.1, 0.1], cap=0.5)
    assert d.covered
    assert d.largest_weight <= 0.5 + 1e-12
    assert d.capped_gap == pytest.approx(0.6, abs=1e-6)
    assert "With no weight above 0.5, the closest mixture misplaces 30.0 %" in verdict_of(d)


# --------------------------------------------------------------------------- labels and clients


def test_labels_and_risks_are_those_of_the_weights() -> None:
    counts, T = random_problem(2)
    d = diagnose(counts, T, ess=0.5)
    n = counts.sum(1)
    S = counts / n[:, None]
    a = np.empty(len(n))
    for c in d.carriers:
        a[int(c.name)] = c.weight
    assert [x.fedavg for x in d.labels] == pytest.approx(list(counts.sum(0) / counts.sum()))
    assert [x.pals for x in d.labels] == pytest.approx(list(a @ S))
    assert d.chosen.l1 == pytest.approx(np.abs(T - a @ S).sum())
    assert d.chosen.ess == pytest.approx(1 / np.sum(a**2 / n))
    assert d.largest_weight == a.max()
    assert d.noise_factor == pytest.approx(len(n) * a.max())
    assert [c.weight for c in d.carriers] == sorted(a, reverse=True)


def test_leaving_out_the_only_holder_of_a_label_moves_the_hull_away() -> None:
    d = diagnose(CORNERS, [0.5, 0.3, 0.2], clients=("x", "y", "z"), lam=0.0)
    without = {c.name: c.without for c in d.carriers}
    # Without x the nearest mixture of the other two spreads the missing half over both.
    assert without["x"] == pytest.approx(math.sqrt(0.5**2 + 2 * 0.25**2), rel=1e-9)
    assert 'rises without "x"' in verdict_of(d)


def test_clients_without_data_are_named_and_not_counted() -> None:
    counts = np.vstack([CORNERS, np.zeros((2, 3), int)])
    d = diagnose(counts, [0.5, 0.3, 0.2], clients=[*"abcde"])
    assert d.verdict[-1] == "Left out, since they have no example: d, e."
    assert "Left out" not in " ".join(diagnose(CORNERS, [0.5, 0.3, 0.2]).verdict)
    assert d.clients == 3
    assert len(d.carriers) == 3
    assert d.noise_factor == pytest.approx(3 * d.largest_weight)


def test_a_single_client_has_no_other_to_fall_back_on() -> None:
    d = diagnose([[3, 1]], [0.5, 0.5])
    assert d.carriers[0].without is None
    assert d.largest_weight == 1.0


@pytest.mark.slow
def test_numbers_in_the_sentences_are_the_numbers_of_the_diagnosis() -> None:
    for seed in range(10):
        d = diagnose(*random_problem(seed))
        text = verdict_of(d)
        assert f"{100 * d.chosen.ess_fraction:.1f} %" in text
        assert f"FedAvg misplaces {50 * d.fedavg_gap:.1f} % of the label mass" in text
        idle = sum(c.weight == 0 for c in d.carriers)
        assert (f"{idle} of {d.clients} get weight 0" in text) == (idle > 0)
        assert ("third or more" in text) == (d.largest_weight >= 1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"lam": 20.0}, {"ess": 0.4}, {"lam": math.inf}])
def test_what_a_lie_brings_is_what_the_sentence_says(given: Any) -> None:
    """Weights with the claim in place of the client's counts, then with the cap."""
    for seed in range(6):
        counts, T = random_problem(seed)
        d = diagnose(counts, T, **given)
        words = re.search(
            r'claiming (\d+) examples distributed as the target.*"(\d+)" would have ([\d.]+) %.*'
            r"instead of (?:less than )?([\d.]+) %.*cap = ([\d.]+) leaves",
            verdict_of(d),
        )
        assert words is not None
        examples, who, gains, honest, cap = (float(v) for v in words.groups())
        assert examples == counts.sum()
        rule = given or {"lam": d.chosen.lam}
        true = pals_weights(counts, T, **rule).weights
        assert 100 * true[int(who)] == pytest.approx(honest, abs=0.1)
        assert true[int(who)] == true[counts.sum(1) > 0].min()
        claimed = counts.astype(float)
        claimed[int(who)] = examples * T
        played = pals_weights(claimed, T, **rule).weights[int(who)]
        assert 100 * played == pytest.approx(gains, abs=0.05)
        assert played > d.largest_weight or played >= 0.5 - 1e-9
        # The claim is no bound, the cap is, and it takes nothing from the honest.
        claimed[int(who)] = 1000 * examples * T
        assert pals_weights(claimed, T, **rule).weights[int(who)] > 0.99
        # An ESS may be out of reach then: half of the examples cannot have more than the cap.
        weight = pals_weights(claimed, T, cap=cap, lam=d.chosen.lam).weights[int(who)]
        assert weight <= cap + 1e-9
        assert pals_weights(counts, T, cap=cap, **rule).weights == pytest.approx(true, abs=1e-6)


def test_the_cap_is_the_bound_where_there_is_one() -> None:
    d = diagnose(CORNERS, [0.5, 0.3, 0.2], cap=0.6)
    assert "the cap leaves it at most 60.0 % of the average" in verdict_of(d)
    assert d.claim is None
    assert "at most" not in verdict_of(diagnose(CORNERS, [0.5, 0.3, 0.2]))
    assert "One client has all of the average." in verdict_of(diagnose([[3, 1]], [0.5, 0.5]))
    alone = diagnose(CORNERS, [1.0, 0.0, 0.0], lam=0.0)
    assert "a cap does: one below 1, which takes some from 100.0 %" in verdict_of(alone)


def test_an_ess_below_that_of_the_closest_mixture_is_reported() -> None:
    has = diagnose(CORNERS, [0.5, 0.3, 0.2], lam=0.0).chosen.ess_fraction
    words = "the closest mixture has more, so that changes nothing"
    assert words in verdict_of(diagnose(CORNERS, [0.5, 0.3, 0.2], ess=has / 2))
    assert words not in verdict_of(diagnose(CORNERS, [0.5, 0.3, 0.2], ess=(1 + has) / 2))


# --------------------------------------------------------------------------- interval


@pytest.mark.slow
def test_the_interval_covers_the_true_distance() -> None:
    rng = numpy_generator("test", "interval")
    P = rng.dirichlet(np.ones(5) * 0.5, 8)
    targets = {"edge": (P[0] + P[1]) / 2, "outside": rng.dirichlet(np.ones(5) * 0.3)}
    for name, T in targets.items():
        true = diagnose(np.round(P * 1e9), T / T.sum()).distance
        hits = 0
        for seed in range(100):
            counts = np.array([rng.multinomial(200, p) for p in P])
            i = distance_interval(counts, T / T.sum(), draws=60, seed=seed)
            hits += i.low - 1e-6 <= true <= i.high
        assert hits >= 93, name


def test_the_interval_is_seeded_and_reported() -> None:
    counts, T = random_problem(3)
    d = diagnose(counts, T, bootstrap=50, seed=1)
    assert d.interval is not None
    assert d.interval == diagnose(counts, T, bootstrap=50, seed=1).interval
    assert d.interval != diagnose(counts, T, bootstrap=50, seed=2).interval
    assert d.interval.low <= d.distance <= d.interval.high
    assert f"between {d.interval.low:.3g} and {d.interval.high:.3g} (95% bootstrap" in verdict_of(d)
    with pytest.raises(InputError, match=r"draws=3, level=0.95; at least 20 draws"):
        distance_interval(counts, T, draws=3)


# --------------------------------------------------------------------------- input, output, speed


def test_json_is_strict_and_complete() -> None:
    counts, T = random_problem(4)
    d = diagnose(counts, T, lam=math.inf, bootstrap=20)
    back = json.loads(json.dumps(d.to_json(), allow_nan=False))
    assert back["chosen"]["lam"] == "inf"
    assert back["distance"] == d.distance
    assert [x["target"] for x in back["labels"]] == list(T)
    assert back["verdict"] == list(d.verdict)


def test_bad_input_says_what_is_wrong() -> None:
    with pytest.raises(InputError, match=r"classes: 2 names for 3 classes"):
        diagnose(CORNERS, [0.5, 0.3, 0.2], classes=("a", "b"))
    with pytest.raises(InputError, match=r'clients: names must differ; "x" is given 2 times'):
        diagnose(CORNERS, [0.5, 0.3, 0.2], clients=("x", "y", "x"))
    with pytest.raises(InputError, match="must sum to 1"):
        diagnose(CORNERS, [0.5, 0.5, 0.5])
    with pytest.raises(InputError, match="lam and ess"):
        diagnose(CORNERS, [0.5, 0.3, 0.2], lam=1.0, ess=0.5)
    with pytest.raises(InputError, match="cap=0.2 cannot be met"):
        diagnose(CORNERS, [0.5, 0.3, 0.2], cap=0.2)


def test_a_target_in_counts_is_divided_by_its_sum_and_the_verdict_says_so() -> None:
    """Controls: no note where it is asked for, or for shares."""
    note = "The target was given as counts; they were divided by their sum."
    for normalise in (False, True):
        d = diagnose(CORNERS, [5, 3, 2], normalise_target=normalise)
        assert [x.target for x in d.labels] == [0.5, 0.3, 0.2]
        assert d.case == "inside"
        assert (note in d.verdict) == (not normalise)
    shares = diagnose(CORNERS, [0, 0, 1])
    assert note not in shares.verdict


def test_a_thousand_clients_take_seconds_at_most() -> None:
    rng = numpy_generator("test", "speed")
    counts = rng.integers(1, 50, (1000, 62)) * (rng.random((1000, 62)) < 0.15)
    start = time.thread_time()
    d = diagnose(counts, rng.dirichlet(np.ones(62)))
    assert len(d.carriers) == 1000
    # Processor time of this thread alone, 0.3 s when idle: what others do at the same time slows a
    # core and fills its caches, hence the room.
    assert time.thread_time() - start < 3.0


@pytest.mark.slow
def test_a_diagnosis_does_not_load_torch() -> None:
    code = (
        "import sys; from fedshift.diagnose import diagnose; diagnose([[1, 2]], [0.5, 0.5]);"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------- weights of examples


def test_what_weights_of_examples_would_give() -> None:
    counts, T = random_problem(2)
    d = diagnose(counts, T)
    assert d.weighed_ess == pytest.approx(1 / (T**2 / counts.sum(0)).sum())
    sentence = f"effective sample size of {d.weighed_ess:.0f} examples at gap 0; clients would"
    assert sentence in verdict_of(d)
    assert d.to_json()["weighed_ess"] == d.weighed_ess


def test_they_reach_what_clients_cannot_be_mixed_into() -> None:
    """No weights of clients alone have label 0 without label 1; those of examples have."""
    d = diagnose([[50, 50, 0], [20, 20, 60]], [0.9, 0.1, 0.0])
    assert not d.covered
    assert d.weighed_ess == pytest.approx(1 / (0.81 / 70 + 0.01 / 70))


def test_without_a_label_they_reach_the_others() -> None:
    d = diagnose([[50, 50, 0], [20, 20, 0]], [0.5, 0.0, 0.5])
    assert d.weighed_ess == pytest.approx(70)
    assert "70 examples on the target's other labels" in verdict_of(d)
    none = diagnose([[50, 50, 0], [20, 20, 0]], [0.0, 0.0, 1.0])
    assert none.weighed_ess == 0.0
    assert "Re-weighting" not in verdict_of(none)
