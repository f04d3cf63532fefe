"""FedPAC's mixtures of heads: a quadratic programme for each client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from fedshift.seeds import generator
from fedshift.server.heads import head_weights, pooled_prototypes

EVERYBODY = torch.ones(6, dtype=torch.bool)


def head_quadratic(variance: Tensor, means: Tensor, client: int) -> Tensor:
    """P_i [C, C]: a diagonal of variances plus a Gram matrix, so positive semidefinite."""
    rows = means.double().flatten(1)
    differences = rows - rows[client]
    return torch.diag(variance.double()) + differences @ differences.T


def statistics(clients: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Variances V [C] and class means H [C, K, d] of about the same weight in P."""
    source = generator(seed, "statistics")
    variance = 0.1 + torch.rand(clients, generator=source, dtype=torch.float64)
    return variance, 0.2 * torch.randn(clients, 3, 4, generator=source, dtype=torch.float64)


def test_p_is_positive_semidefinite() -> None:
    for seed in range(20):
        variance, means = statistics(seed=seed)
        p = head_quadratic(variance, means, seed % 6)
        assert float((p - p.T).abs().max()) < 1e-15 * float(p.trace())
        assert float(torch.linalg.eigvalsh(p)[0]) >= -1e-12 * float(p.trace())
        wrong = 2 * torch.diag(variance) - p  # the control: <H_i - H_j, H_l - H_i>
        assert float(torch.linalg.eigvalsh(wrong)[0]) < 0


def test_p_is_the_equation() -> None:
    variance, means = statistics()
    p = head_quadratic(variance, means, 2)
    for j in range(6):
        for k in range(6):
            inner = float(((means[2] - means[j]) * (means[2] - means[k])).sum())
            assert float(p[j, k]) == pytest.approx((j == k) * float(variance[j]) + inner, abs=1e-14)


def test_weights_minimise_on_the_simplex() -> None:
    """KKT: (P a)_j >= a' P a for all j. And the values of SLSQP, e_i and uniform are no smaller."""
    sparse = 0
    for seed in range(15):
        variance, means = statistics(seed=seed)
        variance, means = variance * 10.0 ** -(seed % 3), means * (1 + seed % 5)
        mix = head_weights(variance, means, EVERYBODY)
        assert float((mix.sum(1) - 1).abs().max()) < 1e-14
        assert float(mix.min()) >= 0
        sparse += int((mix == 0).any())
        for i, a in enumerate(mix):
            p = head_quadratic(variance, means, i)
            slack = p @ a - a @ p @ a
            assert float(slack.min()) > -1e-11 * float(p.trace())
            uniform = torch.full((6,), 1 / 6, dtype=torch.float64)
            for other in (uniform, torch.eye(6, dtype=torch.float64)[i]):
                assert float(a @ p @ a) <= float(other @ p @ other) + 1e-12
                assert float((p @ other - other @ p @ other).min()) < -1e-6 * float(p.trace())
        p = head_quadratic(variance, means, 0).numpy()
        solved = optimize.minimize(
            lambda a, p=p: a @ p @ a,
            np.full(6, 1 / 6),
            jac=lambda a, p=p: 2 * p @ a,
            bounds=[(0, 1)] * 6,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        assert np.abs(solved.x - mix[0].numpy()).max() < 1e-4
    assert sparse > 2


def test_equal_means_share_by_variance() -> None:
    """H_1 = ... = H_C: alpha_j = (1/V_j) / sum_l 1/V_l."""
    variance, means = statistics()
    expected = (1 / variance) / (1 / variance).sum()
    mix = head_weights(variance, means[:1].expand(6, 3, 4), EVERYBODY)
    assert float((mix - expected).abs().max()) < 1e-9
    assert float((head_weights(variance, means, EVERYBODY) - expected).abs().max()) > 0.05
    nothing = head_weights(torch.zeros(6), means[:1].expand(6, 3, 4), EVERYBODY)
    assert float((nothing - 1 / 6).abs().max()) < 1e-15


def test_a_client_far_away_keeps_to_itself() -> None:
    variance, means = statistics()
    gaps = []
    for distance in (0.0, 1.0, 10.0, 1e3):
        moved = means.clone()
        moved[4] += distance
        mix = head_weights(variance, moved, EVERYBODY)
        gaps.append(1 - float(mix[4, 4]))
        others = mix[EVERYBODY & (torch.arange(6) != 4), 4]
    assert gaps[0] > 0.3
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-5
    assert float(others.max()) < 1e-4


def test_scale_does_not_matter() -> None:
    """V -> s V, H -> sqrt(s) H leaves alpha; V alone does not."""
    variance, means = statistics()
    mix = head_weights(variance, means, EVERYBODY)
    for s in (1e-8, 1e-3, 50.0, 1e6):
        again = head_weights(s * variance, s**0.5 * means, EVERYBODY)
        assert float((again - mix).abs().max()) < 1e-9
    assert float((head_weights(50 * variance, means, EVERYBODY) - mix).abs().max()) > 0.05


def test_names_of_clients_do_not_matter() -> None:
    variance, means = statistics()
    mix = head_weights(variance, means, EVERYBODY)
    order = torch.tensor([3, 5, 0, 2, 1, 4])
    again = head_weights(variance[order], means[order], EVERYBODY)
    assert float((again - mix[order][:, order]).abs().max()) < 1e-9
    assert float((again - mix).abs().max()) > 0.05


def test_clients_without_examples_stay_apart() -> None:
    variance, means = statistics()
    present = torch.tensor([True, False, True, True, True, False])
    variance[[1, 5]], means[[1, 5]] = 0.0, 0.0
    mix = head_weights(variance, means, present)
    assert torch.equal(mix[1], torch.eye(6, dtype=torch.float64)[1])
    assert float(mix[present][:, ~present].abs().max()) == 0
    some = head_weights(variance[present], means[present], torch.ones(4, dtype=torch.bool))
    assert float((mix[present][:, present] - some).abs().max()) < 1e-12
    assert float(head_weights(variance, means, EVERYBODY)[present][:, ~present].max()) > 0.1


def test_a_class_that_no_client_has_is_not_made_up() -> None:
    stacked = {"mean": torch.ones(2, 3, 4), "count": torch.tensor([[2.0, 0, 0], [1, 0, 3]])}
    pooled = pooled_prototypes(stacked)
    assert pooled["count"].tolist() == [3, 0, 3]
    assert pooled["mean"].sum(1).tolist() == [4, 0, 4]
