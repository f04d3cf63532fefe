"""FedDRM's client loss as an estimator: empirical likelihood, its dual, and density ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional as F

from fedshift.router.score import ClientHead, scores
from support.routing import draw_gaussians, gaussian, refit_locally, squares

MEANS, SDS, COUNTS = (0.0, 1.0, -0.7), (1.0, 1.5, 0.8), (900, 400, 700)


class Likelihood:
    """The pooled sample of three Gaussians and its fit, with client 0 as the reference."""

    def __init__(self) -> None:
        self.samples = draw_gaussians(MEANS, SDS, COUNTS)
        self.n = torch.tensor(COUNTS).double()
        self.total, self.rho = int(self.n.sum()), self.n / self.n.sum()
        self.h = squares(torch.cat(self.samples))
        self.who = torch.repeat_interleave(torch.arange(3), self.n.long())
        fit = refit_locally([squares(x) for x in self.samples], penalty=0.0, tolerance=1e-12)
        self.head, self.gradient = fit.head, fit.gradient
        # gamma (with log n in it) -> gamma-dagger, against client 0.
        gamma = fit.head.gamma - self.rho.log()
        self.gamma, self.xi = gamma - gamma[0], fit.head.xi - fit.head.xi[0]

    def tilts(self, shift: Tensor) -> Tensor:
        """e_l(x_ij) at gamma-dagger + shift: [total, 3]; column 0 is 1."""
        return (self.gamma + shift + self.h @ self.xi.T).exp()

    def own_tilts(self, shift: Tensor) -> Tensor:
        logs = self.gamma + shift + self.h @ self.xi.T
        return logs[torch.arange(self.total), self.who].sum()

    def dual(self, shift: Tensor) -> float:
        """The log-likelihood with the multipliers at n_l / N."""
        mixed = (self.tilts(shift) @ self.rho).log().sum()
        return float(self.own_tilts(shift) - self.total * math.log(self.total) - mixed)

    def profile(self, shift: Tensor) -> tuple[float, np.ndarray]:
        """The true profile: multipliers by minimising -sum log(1 + sum_l rho_l (e_l - 1))."""
        excess = (self.tilts(shift) - 1)[:, 1:].numpy()

        def value(rho: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
            inside = 1 + excess @ rho
            if (inside <= 1 / self.total).any():
                return math.inf, rho, np.eye(2)
            scaled = excess / inside[:, None]
            return -np.log(inside).sum(), -scaled.sum(0), scaled.T @ scaled

        rho = np.array([0.1, 0.1])
        for _ in range(60):  # damped Newton; the problem is convex with a barrier
            now, slope, curvature = value(rho)
            step = np.linalg.solve(curvature, slope)
            while value(rho - step)[0] > now:
                step = step / 2
                if np.abs(step).max() < 1e-16:
                    break
            rho = rho - step
        least = float(value(rho)[0])
        return float(self.own_tilts(shift)) - self.total * math.log(self.total) + least, rho


@pytest.fixture(scope="module")
def likelihood() -> Likelihood:
    return Likelihood()


def test_the_masses_satisfy_the_constraints(likelihood: Likelihood) -> None:
    """sum p = 1 and sum p e_l = 1, p = 1 / (N sum_l (n_l/N) e_l), at the multinomial fit."""
    tilts = likelihood.tilts(torch.zeros(3))
    p = 1 / (likelihood.total * (tilts @ likelihood.rho))
    assert float(p.sum()) == pytest.approx(1, abs=1e-8)
    assert float(((p[:, None] * tilts).sum(0) - 1).abs().max()) < 1e-8
    # The control: at the uncorrected intercepts (log n_i left in) the constraints do not hold.
    wrong = likelihood.tilts(likelihood.rho.log() - likelihood.rho[0].log())
    p = 1 / (likelihood.total * (wrong @ likelihood.rho))
    assert float(((p[:, None] * wrong).sum(0) - 1).abs().max()) > 1e-2


def test_the_multipliers_are_the_shares(likelihood: Likelihood) -> None:
    rho = likelihood.profile(torch.zeros(3))[1]
    assert np.abs(rho - likelihood.rho[1:].numpy()).max() < 1e-8


def test_profile_dual_and_cross_entropy_agree(likelihood: Likelihood) -> None:
    """pl_N = -(sum of client cross-entropies) - sum_i n_i log n_i at the maximiser."""
    nothing = torch.zeros(3)
    z = likelihood.head(likelihood.h)
    entropy = float(F.cross_entropy(z, likelihood.who, reduction="sum"))
    expected = -entropy - float((likelihood.n * likelihood.n.log()).sum())
    assert likelihood.dual(nothing) == pytest.approx(expected, rel=0, abs=1e-8)
    profile = likelihood.profile(nothing)[0]
    assert profile == pytest.approx(expected, rel=0, abs=1e-8)


def test_the_dual_is_never_below_the_profile(likelihood: Likelihood) -> None:
    source = torch.Generator().manual_seed(3)
    for scale in (0.05, 0.2, 0.5):
        shift = torch.cat([torch.zeros(1), scale * torch.randn(2, generator=source)]).double()
        gap = likelihood.dual(shift) - likelihood.profile(shift)[0]
        assert gap > 1e-3
    assert abs(likelihood.dual(torch.zeros(3)) - likelihood.profile(torch.zeros(3))[0]) < 1e-6


def test_the_masses_solve_the_constrained_problem() -> None:
    """The closed form against a primal solver: max sum log p, 30 points, 2 clients."""
    x = draw_gaussians((0.0, 0.6), (1.0, 1.0), (18, 12), seed=5)
    fit = refit_locally([v[:, None] for v in x], penalty=0.0, tolerance=1e-12)
    h, rho = torch.cat(x)[:, None], torch.tensor([0.6, 0.4]).double()
    gamma = fit.head.gamma - rho.log()
    tilt = (gamma - gamma[0] + h @ (fit.head.xi - fit.head.xi[0]).T).exp()[:, 1].numpy()
    closed = 1 / (30 * (0.6 + 0.4 * tilt))
    bounds = [{"type": "eq", "fun": lambda p: p.sum() - 1}]
    bounds += [{"type": "eq", "fun": lambda p: p @ tilt - 1}]
    solved = minimize(
        lambda p: -np.log(p).sum(), np.full(30, 1 / 30), jac=lambda p: -1 / p,
        bounds=[(1e-6, 1)] * 30, constraints=bounds, options={"ftol": 1e-14, "maxiter": 300},
    )  # fmt: skip
    assert solved.success
    assert np.abs(solved.x - closed).max() < 1e-6
    assert np.abs(np.full(30, 1 / 30) - closed).max() > 1e-3


def test_gaussian_density_ratios_are_recovered() -> None:
    """log of phi_l / phi_0 on |x| <= 2, and not without the log n_i correction."""
    sizes = (22_500, 10_000, 17_500)
    samples = draw_gaussians(MEANS, SDS, sizes, seed=1)
    head = refit_locally([squares(x) for x in samples], penalty=0.0).head
    grid = torch.linspace(-2, 2, 41, dtype=torch.float64)
    z = head(squares(grid))
    estimated = scores(z, torch.tensor(sizes), "density")
    for i in (1, 2):
        true = gaussian(grid, MEANS[i], SDS[i]) - gaussian(grid, MEANS[0], SDS[0])
        assert float((estimated[:, i] - estimated[:, 0] - true).abs().max()) < 0.1
        assert float((z[:, i] - z[:, 0] - true).abs().max()) > 0.2


def test_gamma_density_ratios_are_recovered() -> None:
    """Shapes a, rates b: the ratio's coefficients on (x, log x) are b_0 - b_1 and a_1 - a_0."""
    source = np.random.default_rng(7)
    shape, rate = (2.0, 3.5), (1.0, 1.6)
    x = [torch.from_numpy(source.gamma(a, 1 / b, 25_000)) for a, b in zip(shape, rate, strict=True)]
    xi = refit_locally([torch.stack([v, v.log()], 1) for v in x], penalty=0.0).head.xi
    assert float(xi[1, 0] - xi[0, 0]) == pytest.approx(rate[0] - rate[1], abs=0.1)
    assert float(xi[1, 1] - xi[0, 1]) == pytest.approx(shape[1] - shape[0], abs=0.1)


def test_only_differences_of_rows_are_identified() -> None:
    """A common number and a common row change neither posterior nor routing; the LSE does move."""
    source = torch.Generator().manual_seed(2)
    head = ClientHead(torch.randn(4, generator=source).double(), torch.randn(4, 3).double())
    moved = ClientHead(head.gamma + 3.0, head.xi + torch.tensor([1.0, -2.0, 0.5]))
    h = torch.randn(30, 3, generator=source)
    assert torch.allclose(head(h).softmax(1), moved(h).softmax(1), rtol=0, atol=1e-12)
    assert float((head(h).logsumexp(1) - moved(h).logsumexp(1)).abs().max()) > 1
