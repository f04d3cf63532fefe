"""Trust in clients: weights by confidence, and a temperature from sums of losses."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fedshift.server.agreement import kl, mse, pairwise, restricted
from fedshift.server.trust import TEMPERATURES, by_confidence, fitted_temperature
from support.normals import drawn

LABELS = torch.tensor([[0, 3, -1], [4, 1, 2], [2, -1, -1]])
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def logits(sharp: float = 1.0) -> Tensor:
    return (sharp * drawn(3, 40, 3, seed=1).double()).masked_fill((LABELS < 0)[:, None], -torch.inf)


def test_weights_by_confidence() -> None:
    p = logits().softmax(2)
    w = by_confidence(p, WEIGHTS)
    for b in range(40):
        sure = [float(WEIGHTS[k]) * max(p[k, b].tolist()) for k in range(3)]
        assert w[:, b].tolist() == pytest.approx([s / sum(sure) for s in sure])
    alike = torch.full((3, 4, 3), 1 / 3)
    assert by_confidence(alike, WEIGHTS)[:, 0].tolist() == pytest.approx(WEIGHTS.tolist())
    none = torch.tensor([0.0, 0.6, 0.4], dtype=torch.float64)
    assert by_confidence(p, none)[0].tolist() == [0.0] * 40


@pytest.mark.parametrize("loss", [mse, pairwise, kl])
def test_losses_with_a_weight_for_each_input(loss: object) -> None:
    """The same weight everywhere is one weight; others weigh inputs one by one."""
    p, z = logits().softmax(2), drawn(40, 5, seed=2).double()
    q = restricted(z, LABELS)

    def of(w: Tensor, rows: slice = slice(None)) -> float:
        return float(loss(p[:, rows], q[:, rows], w))  # type: ignore[operator]

    assert of(WEIGHTS[:, None].expand(3, 40)) == pytest.approx(of(WEIGHTS), abs=1e-14)
    w = by_confidence(p, WEIGHTS)
    by_hand = sum(of(w[:, b], slice(b, b + 1)) for b in range(40)) / 40
    assert of(w) == pytest.approx(by_hand, abs=1e-14)
    assert abs(of(w) - of(WEIGHTS)) > 1e-3


def test_the_temperature_is_the_grids_best() -> None:
    """Against scipy on the same sum; clients asked about labels that they lack do not count."""
    y = torch.arange(40) % 5
    z = logits(6.0)

    def loss(t: float) -> float:
        total = 0.0
        for k, labels in enumerate(LABELS.tolist()):
            for b in range(40):
                if int(y[b]) in labels:
                    logs = (z[k, b] / t).log_softmax(0)
                    total -= float(WEIGHTS[k]) * float(logs[labels.index(int(y[b]))])
        return total

    best = minimize_scalar(loss, bounds=(0.1, 40.0), method="bounded").x
    got = fitted_temperature(z, LABELS, y, WEIGHTS)
    assert got in TEMPERATURES
    assert loss(got) == min(map(loss, TEMPERATURES))
    assert 2**-0.25 < got / best < 2**0.25 or got == TEMPERATURES[-1]
    assert fitted_temperature(logits(0.01), LABELS, torch.full((40,), 2), WEIGHTS) < got
    prior = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)  # and it holds label 2 alone
    assert fitted_temperature(z, LABELS, torch.zeros(40).long(), prior) == 1.0
