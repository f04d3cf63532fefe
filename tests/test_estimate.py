"""Scores that add up, and target accuracy without target examples."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedshift as fs
from fedshift import estimate_target_accuracy
from fedshift.data import Examples
from fedshift.errors import DivergedError, InputError
from fedshift.estimate import estimate_target_loss
from fedshift.evaluation.scores import LARGEST, Score, score
from fedshift.model import Model
from fedshift.seeds import numpy_generator
from support.federations import CLASSES, make_clients


def test_scores_add_to_the_score_of_the_union(mlp: Model) -> None:
    params, _ = mlp.init()
    parts = [Examples(c.x, c.y) for c in make_clients()]
    union = Examples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts]))
    whole = score(mlp, params, {}, union, CLASSES, batch=17)
    pieces = [score(mlp, params, {}, p, CLASSES) for p in parts]
    added = sum(pieces[1:], start=pieces[0])
    assert torch.equal(whole.correct, added.correct)
    assert torch.equal(whole.total, added.total)
    assert torch.equal(whole.predicted, added.predicted)
    assert whole.loss == pytest.approx(added.loss, rel=1e-7)
    logits = mlp(params, {}, union.x)["logits"]
    assert torch.equal(whole.predicted, logits.argmax(1).bincount(minlength=CLASSES))
    assert whole.macro_f1 == added.macro_f1
    assert whole.macro_f1 != pytest.approx(np.mean([p.macro_f1 for p in pieces]))  # counts add
    assert whole.accuracy == pytest.approx((logits.argmax(1) == union.y).double().mean().item())
    assert whole.loss == pytest.approx(F.cross_entropy(logits, union.y).item(), rel=1e-5)


def test_a_score_of_nothing_has_no_accuracy(mlp: Model) -> None:
    nothing = Examples(torch.zeros(0, 8), torch.zeros(0).long())
    empty = score(mlp, mlp.init()[0], {}, nothing, CLASSES)
    assert math.isnan(empty.accuracy)
    assert math.isnan(empty.loss)
    assert math.isnan(empty.macro_f1)
    assert empty.recall == [None] * CLASSES
    with pytest.raises(InputError, match=r"labels must lie in 0\.\.4"):
        score(mlp, mlp.init()[0], {}, Examples(torch.zeros(1, 8), torch.tensor([5])), CLASSES)


def scored(predicted: torch.Tensor, truth: torch.Tensor, classes: int) -> Score:
    """The score of these predictions."""
    right = truth[predicted == truth]
    counts = (v.bincount(minlength=classes) for v in (right, truth, predicted))
    return Score(*counts, 0.0)


def test_macro_f1_by_hand() -> None:
    truth, predicted = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 3, 0])
    # Label 0: tp 1, n 2, p 2. Label 1: tp 1, n 2, p 2. Label 2: tp 0. Label 3 is never true.
    assert scored(predicted, truth, 4).macro_f1 == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert scored(truth, truth, 9).macro_f1 == 1.0
    everywhere = torch.zeros(5, dtype=torch.int64)
    assert scored(everywhere, truth, 4).macro_f1 == pytest.approx((2 * 2 / 7) / 3)


def test_macro_f1_is_the_mean_of_f1_over_the_labels_that_occur() -> None:
    """scikit-learn's f1_score(average="macro", labels=unique(truth)), from precision and recall."""
    source = np.random.default_rng(0)
    truth, predicted = (torch.from_numpy(source.integers(0, k, 300)) for k in (5, 6))
    terms = []
    for y in range(6):
        tp = int(((truth == y) & (predicted == y)).sum())
        precision = tp / int((predicted == y).sum())
        recall = tp / max(1, int((truth == y).sum()))
        terms.append(2 * precision * recall / max(1e-300, precision + recall))
    scores = scored(predicted, truth, 6)
    assert terms[5] == 0  # predicted, never true: no term of its own
    assert scores.macro_f1 == pytest.approx(np.mean(terms[:5]), rel=1e-12)
    assert scores.macro_f1 != pytest.approx(np.mean(terms))
    assert scores.macro_f1 != pytest.approx(scores.accuracy)


def test_large_examples_are_scored_in_smaller_blocks() -> None:
    seen: list[int] = []

    class Watch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x[:, :1])

    model = Model(Watch(1, 2))
    for width, blocks in ((10, [12]), (LARGEST // 5, [5, 5, 2]), (2 * LARGEST, [1] * 12)):
        seen.clear()
        x = torch.zeros(1, 1).expand(12, width)
        score(model, *model.init(), Examples(x, torch.zeros(12).long()), 2)
        assert seen == blocks


def test_the_estimate_by_hand() -> None:
    """0.5 * 8/10 + 0.3 * 15/20 + 0.2 * 0 (no client has the third label)."""
    estimate = estimate_target_accuracy(
        [[5, 10, 0], [3, 5, 0]], [[5, 12, 0], [5, 8, 0]], [0.5, 0.3, 0.2]
    )
    assert estimate.accuracy == pytest.approx(0.5 * 0.8 + 0.3 * 0.75)
    assert estimate.unmeasured_mass == pytest.approx(0.2)
    assert math.isnan(estimate.recall[2])
    r = np.array([9 / 12, 16 / 22])
    se = math.sqrt(0.25 * r[0] * (1 - r[0]) / 10 + 0.09 * r[1] * (1 - r[1]) / 20)
    assert estimate.standard_error == pytest.approx(se)
    low, high = estimate.interval
    assert low == pytest.approx(0.625 - 1.959963984540054 * se)
    assert high == pytest.approx(0.625 + 1.959963984540054 * se + 0.2)


def test_the_interval_covers_the_truth_under_label_shift() -> None:
    """2,000 federations with known recalls: 95 % intervals cover, and pooling is what matters."""
    rng = numpy_generator(0, "coverage")
    covered, errors, scaled = 0, [], []
    for _ in range(2000):
        recall, target = rng.uniform(0.3, 1.0, 6), rng.dirichlet(np.ones(6))
        total = rng.multinomial(300, rng.dirichlet(np.ones(6)), size=3) + 5
        estimate = estimate_target_accuracy(rng.binomial(total, recall), total, target)
        truth = float(target @ recall)
        covered += estimate.interval[0] <= truth <= estimate.interval[1]
        errors.append(estimate.accuracy - truth)
        scaled.append((estimate.accuracy - truth) / estimate.standard_error)
    assert 0.93 <= covered / 2000 <= 0.98
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(2000)  # unbiased
    assert 0.9 < np.std(scaled) < 1.1


@pytest.mark.parametrize(
    ("correct", "total", "target", "message"),
    [
        ([1, 2], [2, 2, 2], [0.5, 0.5], "same number of labels"),
        ([3, 0], [2, 2], [0.5, 0.5], "label 0: 3 right out of 2"),
        ([-1, 0], [2, 2], [0.5, 0.5], "correct must hold counts"),
        ([1, 0], [float("nan"), 2], [0.5, 0.5], "total must hold counts"),
        ([1, 0], [2, 2], [0.5, 0.6], "sums to 1.1"),
        ([1, 0], [2, 2], [1.5, -0.5], r"target\[1\] is -0.5"),
        (1, [2], [1.0], "0 dimensions"),
    ],
)
def test_bad_counts_are_refused(
    correct: object, total: object, target: object, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        estimate_target_accuracy(correct, total, target)  # type: ignore[arg-type]


def test_labels_with_names_are_the_same_in_the_same_order() -> None:
    counts = pd.DataFrame({"b": [90.0, 10.0], "a": [10.0, 90.0]})
    for labels in (["a", "b"], ["b", "c"]):
        named = pd.Series([0.9, 0.1], labels)
        for call in (
            lambda t: fs.pals_weights(counts, t, lam=0),
            lambda t: fs.ess_curve(counts, t, (0.5,)),
            lambda t: estimate_target_accuracy(counts, counts, t),
            lambda t: fs.prior_shift(t, pd.Series([0.5, 0.5], ["a", "c"])),
        ):
            with pytest.raises(InputError, match="has the labels"):
                call(named)
    for unnamed in ([0.5, 0.5], pd.Series([0.5, 0.5])):  # by place
        assert fs.pals_weights(counts, unnamed, lam=0).certified


def test_a_model_that_gives_nan_has_no_score(mlp: Model) -> None:
    examples = Examples(torch.zeros(3, 8), torch.zeros(3).long())
    assert score(mlp, *mlp.init(), examples, CLASSES).n == 3
    examples.x[0] = torch.nan
    with pytest.raises(DivergedError, match="NaN for 1 of 3"):
        score(mlp, *mlp.init(), examples, CLASSES)


def test_nothing_measured_is_no_estimate() -> None:
    estimate = estimate_target_accuracy([0, 3], [0, 4], [1.0, 0.0])
    assert math.isnan(estimate.accuracy)
    assert math.isnan(estimate.standard_error)
    assert estimate.unmeasured_mass == 1.0


def by_bin(losses: np.ndarray, bins: np.ndarray, K: int) -> tuple[np.ndarray, ...]:
    """Sums of losses and of their squares, and counts, [K] each."""
    return tuple(np.bincount(bins, w, K) for w in (losses, losses**2, np.ones(len(bins))))


def test_loss_at_the_target_by_hand() -> None:
    """Bins without a client are left out, and the others' shares grow."""
    losses, bins = np.array([1.0, 3.0, 10.0]), np.array([0, 0, 1])
    result = estimate_target_loss(*by_bin(losses, bins, 3), [0.3, 0.5, 0.2])
    assert result.loss == pytest.approx((0.3 * 2 + 0.5 * 10) / 0.8)
    assert result.unmeasured_mass == pytest.approx(0.2)
    assert math.isnan(result.losses[2])
    spread = [losses[:2].var(ddof=1) / 2, losses.var(ddof=1) / 1]
    expected = math.sqrt((0.3 / 0.8) ** 2 * spread[0] + (0.5 / 0.8) ** 2 * spread[1])
    assert result.standard_error == pytest.approx(expected)
    nothing = estimate_target_loss(*by_bin(losses, bins, 3), [0.0, 0.0, 1.0])
    assert math.isnan(nothing.loss)
    assert nothing.unmeasured_mass == 1.0
    with pytest.raises(InputError, match="same number of bins"):
        estimate_target_loss([1.0], [1.0], [1.0], [0.5, 0.5])


def test_the_error_of_the_loss_is_right_and_the_plain_mean_is_biased() -> None:
    rng, target = np.random.default_rng(0), np.array([0.2, 0.8])
    estimates, errors, plain = [], [], []
    for _ in range(400):
        bins = (rng.random(100) < 0.3).astype(int)
        losses = rng.exponential(np.where(bins, 4.0, 1.0))
        result = estimate_target_loss(*by_bin(losses, bins, 2), target)
        estimates.append(result.loss)
        errors.append(result.standard_error)
        plain.append(losses.mean())
    truth = 0.2 * 1 + 0.8 * 4
    assert abs(np.mean(estimates) - truth) < 4 * np.std(estimates) / 20
    assert np.mean(errors) == pytest.approx(np.std(estimates), rel=0.15)
    assert abs(np.mean(plain) - truth) > 0.5
