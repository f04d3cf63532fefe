"""Measures of a router, against closed forms and brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshift.router import quality
from fedshift.router.route import ABSTAIN


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled(n: int, clients: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Posteriors [n, N], and origins drawn from them: calibrated by construction."""
    r = (1.5 * draw(n, clients, seed=seed)).softmax(1)
    return r, torch.multinomial(r, 1, generator=torch.Generator().manual_seed(seed + 1))[:, 0]


def test_client_accuracy_counts_any_column_and_no_refusal() -> None:
    origin = torch.tensor([0, 1, 2, 2])
    assert quality.client_accuracy(torch.tensor([0, 1, 0, 2]), origin) == 0.75
    assert quality.client_accuracy(torch.tensor([[1, 0], [1, 2], [0, 1], [2, 0]]), origin) == 0.75
    assert quality.client_accuracy(torch.tensor([0, ABSTAIN, ABSTAIN, 2]), origin) == 0.5


def test_brier_of_known_cases() -> None:
    origin = torch.tensor([0, 1])
    assert quality.brier(torch.eye(2), origin) == 0
    assert quality.brier(torch.eye(2).flip(0), origin) == 2
    assert quality.brier(torch.full((2, 4), 0.25), origin) == pytest.approx(0.75)
    r, who = sampled(20_000, 3)
    assert quality.brier(r, who) == pytest.approx(float(1 - r.square().sum(1).mean()), abs=0.01)
    assert quality.brier(r.pow(2) / r.pow(2).sum(1, keepdim=True), who) > quality.brier(r, who)


def test_calibration_error_by_hand() -> None:
    """Confidences 0.55, 0.6 (one right) and 0.95 (wrong): (2 |0.5 - 0.575| + 0.95) / 3."""
    r = torch.tensor([[0.55, 0.45], [0.4, 0.6], [0.95, 0.05]], dtype=torch.float64)
    origin = torch.tensor([0, 0, 1])
    assert quality.calibration_error(r, origin, bins=10) == pytest.approx((0.15 + 0.95) / 3)
    assert quality.calibration_error(r, origin, bins=1) == pytest.approx(abs(1 - 2.1) / 3)
    r, who = sampled(40_000, 4)
    assert quality.calibration_error(r, who) < 0.01
    sharp = r.pow(3) / r.pow(3).sum(1, keepdim=True)
    assert quality.calibration_error(sharp, who) > 0.1


def test_auc_is_the_share_of_ordered_pairs() -> None:
    scores, origin = draw(60, 4), torch.arange(60) % 3  # client 3 has no query
    scores[::5] = scores[0].clone()  # ties
    auc = quality.pairwise_auc(scores, origin)
    for i in range(3):
        for j in range(3):
            if i == j:
                continue
            a = (scores[:, i] - scores[:, j])[origin == i]
            b = (scores[:, i] - scores[:, j])[origin == j]
            pairs = a[:, None] - b[None, :]
            share = float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean())
            assert float(auc[i, j]) == pytest.approx(share, abs=1e-12)
    assert bool(auc[3].isnan().all())
    assert bool(auc.diagonal().isnan().all())
    apart = torch.nn.functional.one_hot(origin, 4) * 9.0 + scores * 0.01
    assert float(quality.pairwise_auc(apart, origin)[0, 1]) == 1.0
    priced = scores - torch.tensor([0.0, 3.0, -2.0, 1.0])  # prices and priors do not matter
    assert torch.allclose(quality.pairwise_auc(priced, origin), auc, equal_nan=True, atol=1e-12)


def test_risk_at_full_coverage_is_the_error_rate() -> None:
    confidence, wrong = draw(50), draw(50, seed=1) > 0.3
    curve = quality.risk_coverage(confidence, wrong)
    assert float(curve.risk[-1]) == pytest.approx(float(wrong.double().mean()))
    assert torch.equal(curve.coverage, torch.arange(1, 51) / torch.tensor(50.0).double())
    order = confidence.argsort(descending=True)
    for k in (1, 7, 31):
        assert float(curve.risk[k - 1]) == pytest.approx(float(wrong[order[:k]].double().mean()))


def test_a_perfect_score_never_adds_risk_by_refusing() -> None:
    wrong = torch.arange(40) % 4 == 0
    perfect = quality.risk_coverage(-wrong.double() + 0.01 * draw(40), wrong)
    assert bool((perfect.risk.diff() >= 0).all())
    assert float(perfect.risk[29]) == 0
    reverse = quality.risk_coverage(wrong.double() + 0.01 * draw(40), wrong)
    assert not bool((reverse.risk.diff() >= 0).all())
    assert perfect.area < 0.25 < reverse.area
    flat = quality.risk_coverage(torch.ones(40), wrong)
    assert flat.area == pytest.approx(0.25)


def test_ties_do_not_depend_on_the_order_of_queries() -> None:
    confidence, wrong = draw(80).round(), draw(80, seed=2) > 0
    mixed = torch.randperm(80, generator=torch.Generator().manual_seed(3))
    one = quality.risk_coverage(confidence, wrong)
    two = quality.risk_coverage(confidence[mixed], wrong[mixed])
    assert torch.allclose(one.risk, two.risk, rtol=0, atol=1e-14)
    finer = quality.risk_coverage(confidence + 1e-6 * draw(80, seed=4), wrong)
    assert not torch.allclose(one.risk, finer.risk, rtol=0, atol=1e-3)


@pytest.mark.parametrize("coverage", [0.29, 0.5, 0.907, 1.0])
def test_the_threshold_reaches_its_coverage(coverage: float) -> None:
    confidence = draw(100)
    t = quality.threshold(confidence, coverage)
    assert float((confidence >= t).double().mean()) >= coverage - 1e-12
    assert float((confidence > t).double().mean()) < coverage  # and no larger t would do
