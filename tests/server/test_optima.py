"""Exact pointwise optima of the losses of central tuning, against a numerical solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from fedshift.server.optima import (
    accuracies,
    kl_optimum,
    mse_optimum,
    pairwise_optimum,
    spread,
)
from support.normals import drawn

LABELS = torch.tensor([[0, 3, -1], [4, 1, 2], [2, 3, -1], [-1, -1, -1]])
N, K = 6, 5
OPTIMA = {"mse": mse_optimum, "pairwise": pairwise_optimum}


def opinions(labels: Tensor = LABELS, seed: int = 1, sharp: float = 2.0) -> Tensor:
    z = sharp * drawn(len(labels), N, labels.shape[1], seed=seed).double()
    empty = (labels < 0)[:, None] & (labels >= 0).any(1)[:, None, None]
    return z.masked_fill(empty, -torch.inf).softmax(2)


def weights(each: bool) -> Tensor:
    """Of four clients, of which the last, without labels, has none; each: another on each input."""
    w = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)[:, None].expand(4, N)
    return w * (drawn(4, N, seed=9).double().exp() if each else 1.0)


def optimum(kind: str, p: Tensor, holds: Tensor, w: Tensor, start: Tensor) -> Tensor:
    return kl_optimum(p, holds, w, start) if kind == "kl" else OPTIMA[kind](p, holds, w)


def loss(kind: str, q: Any, p: Any, w: Any) -> float:
    """Of one input, in loops: p a list of (labels, probabilities), q [K]."""
    total = 0.0
    for weight, (labels, client) in zip(w, p, strict=True):
        if kind == "mse":
            each = sum((a - q[y]) ** 2 for y, a in zip(labels, client, strict=True))
        elif kind == "kl":
            mass = sum(q[y] for y in labels)
            pairs = zip(labels, client, strict=True)
            each = sum(a * np.log(a / q[y] * mass) for y, a in pairs)
        else:
            pairs = [(y, a) for y, a in zip(labels, client, strict=True)]
            each = sum((a * q[z] - b * q[y]) ** 2 for y, a in pairs for z, b in pairs)
        total += weight * each
    return total


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_the_optima_are_a_numerical_solvers(kind: str, each: bool) -> None:
    p, w = opinions(), weights(each)
    wide, holds = spread(p, LABELS, K)
    q = optimum(kind, wide, holds, w, drawn(N, K, seed=4))
    assert float((q.sum(1) - 1).abs().max()) < 1e-12
    assert float(q.min()) >= 0
    for b in range(N):
        sets = [
            ([y for y in labels if y >= 0], client[torch.tensor(labels) >= 0].tolist())
            for labels, client in zip(LABELS.tolist()[:3], p[:, b], strict=False)
        ]
        of = w[:3, b].tolist()
        value = minimize(
            lambda v, sets=sets, of=of: 1e3 * loss(kind, np.maximum(v, 1e-12), sets, of),
            np.full(K, 1 / K), method="SLSQP", bounds=[(1e-9, 1)] * K,
            constraints={"type": "eq", "fun": lambda v: v.sum() - 1},
            options={"maxiter": 1000, "ftol": 1e-14},
        )  # fmt: skip
        ours = loss(kind, q[b].numpy(), sets, of)
        assert ours <= value.fun / 1e3 + 1e-8
        assert float(np.abs(value.x - q[b].numpy()).max()) < 1e-3
        other = loss(kind, np.full(K, 1 / K), sets, of)
        assert ours < other - 1e-3


@pytest.mark.parametrize("kind", ["mse", "pairwise"])
def test_optima_among_some_labels_are_a_numerical_solvers(kind: str) -> None:
    """Also clients that answer for all labels, as in public mode; among all: another optimum."""
    allowed, everything = torch.tensor([True, False, True, True, False]), torch.arange(K)
    free = allowed.nonzero().flatten()
    for labels in (LABELS, everything.expand(4, -1)):
        p, w = opinions(labels), weights(True)
        wide, holds = spread(p, labels, K)
        q = OPTIMA[kind](wide, holds, w, allowed)
        assert float(q[:, ~allowed].abs().max()) == 0
        assert float((q.sum(1) - 1).abs().max()) < 1e-12
        assert torch.equal(OPTIMA[kind](wide, holds, w), OPTIMA[kind](wide, holds, w, holds.any(0)))
        assert float((q - OPTIMA[kind](wide, holds, w)).abs().max()) > 0.01
        for b in range(N):
            sets = [
                ([y for y in row if y >= 0], client[torch.tensor(row) >= 0].tolist())
                for row, client in zip(labels.tolist()[:3], p[:3, b], strict=True)
            ]

            weighed = w[:3, b].tolist()

            def at(v: Any, sets: Any = sets, of: Any = weighed) -> float:
                whole = np.zeros(K)
                whole[free] = v
                return 1e3 * loss(kind, whole, sets, of)

            value = minimize(
                at, np.full(3, 1 / 3), method="SLSQP", bounds=[(0, 1)] * 3,
                constraints={"type": "eq", "fun": lambda v: v.sum() - 1},
                options={"maxiter": 1000, "ftol": 1e-14},
            )  # fmt: skip
            assert at(q[b, free].numpy()) <= value.fun + 1e-5
            assert float(np.abs(value.x - q[b, free].numpy()).max()) < 1e-3


def test_errors_are_of_paired_differences() -> None:
    """s / sqrt(n) by numpy; not that of two independent accuracies."""
    n = 200
    p = (2 * drawn(4, n, K, seed=3).double()).softmax(2)
    everything, w = torch.arange(K).expand(4, -1), torch.full((4,), 0.25)
    z = p.mean(0).log() + 0.7 * drawn(n, K, seed=8)
    y = (p.mean(0).log() + drawn(n, K, seed=5)).argmax(1)
    means, errors = accuracies(p, everything, w, z, y)
    wide, holds = spread(p, everything, K)
    each = torch.full((4, n), 0.25, dtype=torch.float64)
    ends = {k: optimum(k, wide, holds, each, z) for k in ("mse", "pairwise", "kl")}
    right = {k: (q.argmax(1) == y).double().numpy() for k, q in ends.items()}
    plain = (z.argmax(1) == y).double().numpy()
    assert means.tolist() == pytest.approx([plain.mean(), *(v.mean() for v in right.values())])
    by_hand = [(v - plain).std(ddof=1) / np.sqrt(n) for v in right.values()]
    assert errors.tolist() == pytest.approx(by_hand)
    assert min(by_hand) > 0
    apart = [np.sqrt((v.var(ddof=1) + plain.var(ddof=1)) / n) for v in right.values()]
    assert all(a > 1.2 * e for a, e in zip(apart, by_hand, strict=True))
    assert accuracies(p[:, :1], everything, w, z[:1], y[:1])[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_perfect_clients_leave_the_truth_as_the_optimum_but_of_mse(kind: str) -> None:
    truth = drawn(N, K, seed=2).double().softmax(1)
    chain = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]])
    p = truth[:, chain].transpose(0, 1)
    wide, holds = spread(p / p.sum(2, keepdim=True), chain, K)
    w = torch.full((4, N), 0.25).double()
    gap = float((optimum(kind, wide, holds, w, drawn(N, K, seed=4)) - truth).abs().max())
    assert (gap < 1e-6) == (kind != "mse")


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_where_all_know_all_labels(kind: str) -> None:
    """MSE and KL: the weighted mean of the answers; pairwise: another."""
    everything = torch.arange(K).expand(4, -1)
    wide, holds = spread(opinions(everything), everything, K)
    w = weights(False)
    gap = optimum(kind, wide, holds, w, torch.zeros(N, K)) - torch.einsum("cn,cnk->nk", w, wide)
    assert (float(gap.abs().max()) < 1e-9) == (kind != "pairwise")


def test_labels_that_no_client_has() -> None:
    """They keep their logits in KL, take what is left in MSE, and all in the pairwise loss."""
    labels = torch.tensor([[0, 3], [0, 1]])
    p = torch.tensor([[[0.7, 0.3]], [[0.6, 0.4]]])
    wide, holds = spread(p, labels, K)
    w, start = torch.full((2, 1), 0.5).double(), torch.tensor([[0.5, 0.1, 2.0, 0.3, -1.0]])
    q = kl_optimum(wide, holds, w, start)
    assert float(q[0, 0] / q[0, 3]) == pytest.approx(7 / 3)
    assert float(q[0, 0] / q[0, 1]) == pytest.approx(6 / 4)
    assert float(q[0, 2] / q[0, 4]) == pytest.approx(float(torch.tensor(3.0).exp()))
    assert float(q[0, [0, 1, 3]].log().mean() - q[0, 2].log()) == pytest.approx(0.3 - 2.0, abs=1e-4)
    full = mse_optimum(wide, holds, w)  # 0.65 + 0.4 + 0.3 is more than 1: nothing is left
    assert full[0, [2, 4]].tolist() == [0, 0]
    wide, holds = spread(torch.tensor([[[0.4, 0.6]], [[0.2, 0.8]]]), torch.tensor([[0, 1]] * 2), K)
    assert pairwise_optimum(wide, holds, w)[0].tolist() == pytest.approx(
        [0, 0] + [1 / 3] * 3, abs=1e-8
    )
    assert mse_optimum(wide, holds, w)[0].tolist() == pytest.approx([0.3, 0.7, 0, 0, 0])
    certain = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # of labels 0 and 3, and 1 and 0
    wide, holds = spread(certain, torch.tensor([[0, 3], [1, 0]]), K)
    assert bool(torch.isfinite(kl_optimum(wide, holds, w, start)).all())
    left = mse_optimum(torch.zeros(1, 1, K).double(), torch.tensor([[True] + [False] * 4]), w[:1])
    assert left[0].tolist() == pytest.approx([0, 0.25, 0.25, 0.25, 0.25])
