"""CCVR's server: moments that pool exactly, Gaussians, and the known optimal head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.errors import DivergedError
from fedshift.seeds import generator
from fedshift.server.virtual import drawn, gaussians, refitted

K, D = 3, 2
MEANS = torch.tensor([[0.0, 1.0], [1.5, 0.0], [-1.0, -1.0]], dtype=torch.float64)
SPREAD = torch.tensor([[1.0, 0.4], [0.4, 0.8]], dtype=torch.float64)


def moments(f: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of = torch.nn.functional.one_hot(y, K).double()
    n = len(y)
    return of.mean(0), of.T @ f / n, torch.einsum("bk,bi,bj->kij", of, f, f) / n


def exact() -> tuple[Tensor, Tensor, Tensor]:
    """The moments of three Gaussians with one covariance, of shares 0.5, 0.3, 0.2."""
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    second = SPREAD + MEANS[:, :, None] * MEANS[:, None]
    return share, share[:, None] * MEANS, share[:, None, None] * second


def lda(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Fisher's discriminant: W = M S^-1, b = -diag(M S^-1 M^T)/2 + log shares; both centred."""
    weight = MEANS @ torch.linalg.inv(SPREAD)
    bias = -(weight * MEANS).sum(1) / 2 + shares.log()
    return weight - weight.mean(0), bias - bias.mean()


def test_moments_of_clients_pool_to_those_of_all_examples() -> None:
    """By sample-size weights, exactly but for rounding; the root is one of the covariance."""
    source = generator(0, "pooled")
    f = torch.randn(50, D, generator=source, dtype=torch.float64)
    y = torch.arange(50) % K
    parts = [slice(0, 8), slice(8, 30), slice(30, 50)]
    weights = [8 / 50, 22 / 50, 20 / 50]
    each = [moments(f[p], y[p]) for p in parts]
    pooled = [sum(w * m[i] for w, m in zip(weights, each, strict=True)) for i in range(3)]
    mean, root = gaussians(*(torch.as_tensor(v) for v in pooled))
    for c in range(K):
        rows = f[y == c].numpy()
        assert mean[c].numpy() == pytest.approx(rows.mean(0), abs=1e-12)
        covariance = np.cov(rows.T, bias=True)
        assert (root[c] @ root[c].T).numpy() == pytest.approx(covariance, abs=1e-12)
        assert torch.allclose(root[c], root[c].T, atol=1e-12)  # the one that signs do not change


def test_a_label_without_examples_has_zeros() -> None:
    f = torch.ones(4, D, dtype=torch.float64)
    mean, root = gaussians(*moments(f, torch.tensor([0, 0, 2, 2])))
    assert mean.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert float(root.abs().max()) < 1e-7  # equal features: no spread, and no NaN


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(1 / 3, 1 / 3, 1 / 3), (0.7, 0.2, 0.1)], ids=["even", "uneven"])
def test_of_exact_gaussians_the_head_is_the_linear_discriminant(shares: tuple[float, ...]) -> None:
    """Within the error of 20,000 draws of each label; control: that of other shares is not."""
    given = torch.tensor(shares, dtype=torch.float64)
    virtual = drawn(*gaussians(*exact()), 20_000, 0)
    weight, bias = refitted(virtual, given, 1e-6)
    W, b = lda(given)
    assert float((weight - weight.mean(0) - W).abs().max()) < 0.05
    assert float((bias - bias.mean() - b).abs().max()) < 0.05
    other = lda(torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64))[1]
    assert float((bias - bias.mean() - other).abs().max()) > 0.5


def test_the_fit_is_a_minimum_of_its_loss() -> None:
    """By autograd: the gradient of the loss, written anew, is 0 there; not so elsewhere."""
    virtual, shares = drawn(*gaussians(*exact()), 40, 1), torch.tensor([0.6, 0.4, 0.0]).double()

    def slope(weight: Tensor, bias: Tensor, ridge: float) -> float:
        at = [v.clone().requires_grad_() for v in (weight, bias)]
        z = virtual @ at[0].T + at[1]
        losses = torch.stack([-z[c].log_softmax(1)[:, c].mean() for c in range(K)])
        value = shares @ losses + ridge / 2 * sum(v.square().sum() for v in at)
        return max(float(g.abs().max()) for g in torch.autograd.grad(value, at))

    for ridge in (0.1, 1e-3):
        weight, bias = refitted(virtual, shares, ridge)
        assert slope(weight, bias, ridge) < 1e-5
        assert slope(1.1 * weight, bias, ridge) > 1e-3
    assert bias[2] < min(bias[:2]) - 1  # a label of share 0 is pushed down


def test_draws_repeat_and_each_label_has_its_own() -> None:
    one, two, other = (drawn(*gaussians(*exact()), 5, seed) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    more = drawn(torch.cat([MEANS, MEANS]), torch.zeros(6, D, D).double(), 5, 0)
    assert torch.equal(more[:K], more[K:])  # without spread they are the means
    noise = one - MEANS[:, None]
    assert not torch.allclose(noise[0], noise[1])


def test_a_bias_that_is_fixed() -> None:
    """With the bias that the fit finds, the matrix is the same, but for that one's ridge."""
    virtual, shares = drawn(*gaussians(*exact()), 50, 0), torch.ones(3).double() / 3
    weight, bias = refitted(virtual, shares, 1e-6)
    again, same = refitted(virtual, shares, 1e-6, bias)
    assert same is bias
    assert torch.allclose(again, weight, atol=1e-3)
    assert not torch.allclose(refitted(virtual, shares, 1e-6, torch.zeros(3))[0], weight, atol=1e-2)


def test_statistics_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DivergedError, match="not finite"):
        refitted(torch.full((2, 3, 2), torch.nan).double(), torch.ones(2) / 2, 1e-3)


@pytest.mark.parametrize("size", [1e30, 1e80, 1e160, 1e300])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_wild_statistics_of_a_liar_end_the_fit(size: float, at: int) -> None:
    """Without an end the optimiser would run for ever on features of 1e80."""
    sent = list(exact())
    sent[at] = sent[at] * (1 / size if at == 0 else size)
    with pytest.raises(DivergedError, match="beyond 1e"):
        gaussians(*sent)
