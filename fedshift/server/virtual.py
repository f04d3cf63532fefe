"""A classifier from class statistics alone: draw features from Gaussians, fit a head to them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from torch import Tensor

from fedshift.errors import DivergedError
from fedshift.seeds import generator

Floats = NDArray[np.float64]
MOST_STEPS = 200
# Eigenvalues below this, relative to the largest one of their covariance, are rounding and set to
# 0: their square root, 1e-6, would no longer be negligible.
ROUNDING = 1e-12
# Limit for means and standard deviations. Larger ones come from a model that diverged, or from a
# malicious client; with them the fit would not reach its minimum, or would not end.
LARGEST = 1e6


def gaussians(share: Tensor, total: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """(mean [K, d], root [K, d, d]) of each label's features f, root root^T their covariance.

        mean_c = total_c / share_c,   covariance_c = square_c / share_c - mean_c mean_c^T

    share [K] P(y = c), total [K, d] E[1{y = c} f], square [K, d, d] E[1{y = c} f f^T], float64.
    A label with share 0 gets zeros. Raises DivergedError for numbers beyond `LARGEST` or NaN.
    """
    by = share.clamp(min=1e-300)
    seen = (share > 0).double()
    mean = total / by[:, None] * seen[:, None]
    covariance = square / by[:, None, None] * seen[:, None, None] - mean[:, :, None] * mean[:, None]
    sized = (mean.abs() <= LARGEST).all() and (covariance.abs() <= LARGEST**2).all()
    if not bool(sized):  # NaN fails the comparisons, too
        raise DivergedError(
            "the clients' class statistics are of features that are not finite, or beyond "
            f"{LARGEST:g}; lower the clients' lr"
        )
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    values = values * (values > ROUNDING * values.amax(1, keepdim=True))
    # Take the symmetric root, which does not depend on the arbitrary signs of eigenvectors.
    return mean, (vectors * values.sqrt()[:, None]) @ vectors.mT


def drawn(mean: Tensor, root: Tensor, draws: int, seed: int) -> Tensor:
    """Virtual features [K, draws, d] from each label's Gaussian, one random stream per label."""
    noise = [
        torch.randn(draws, mean.shape[1], dtype=torch.float64, generator=source)
        for source in (generator(seed, "virtual features", c) for c in range(len(mean)))
    ]
    return mean[:, None] + torch.stack(noise).to(mean.device) @ root.mT


def refitted(
    features: Tensor, shares: Tensor, ridge: float, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(W [K, d], b [K]) of softmax regression on features [K, m, d], labels weighted by shares [K].

        argmin  -sum_c (shares_c / m) sum_j log softmax(W f_cj + b)[c] + ridge/2 (||W||^2 + ||b||^2)

    The ridge makes the minimum unique; Newton's method reaches it from 0. fixed [K] is a given b,
    which is then not fitted and has no ridge. Raises DivergedError for features that are not
    finite.
    """
    labels, draws, width = features.shape
    # A column of ones stands for the bias; zeros if the bias is given.
    ones = features.new_full((labels, draws, 1), float(fixed is None))
    f = torch.cat([features, ones], 2).cpu().numpy()
    if not np.isfinite(f).all():
        raise DivergedError("the clients' class statistics are not finite; lower the clients' lr")
    counted = np.flatnonzero(shares.cpu().numpy() > 0)
    x, y = f[counted].reshape(-1, width + 1), np.repeat(counted, draws)
    given = np.zeros(labels) if fixed is None else fixed.double().cpu().numpy()
    rows = np.arange(len(y))
    w = np.repeat(shares.cpu().numpy()[counted] / draws, draws)

    def at(flat: Floats) -> tuple[Floats, Floats]:
        z = x @ flat.reshape(labels, width + 1).T + given
        return log_softmax(z, axis=1), softmax(z, axis=1)

    def joined(residual: Floats, flat: Floats) -> Floats:
        slope: Floats = ((residual * w[:, None]).T @ x).ravel() + ridge * flat
        return slope

    def value(flat: Floats) -> tuple[float, Floats]:
        """The objective and its gradient."""
        log_p, p = at(flat)
        loss = -float(w @ log_p[rows, y]) + ridge / 2 * float(flat @ flat)
        p[rows, y] -= 1.0
        return loss, joined(p, flat)

    def curvature(flat: Floats, along: Floats) -> Floats:
        """The Hessian of the objective times the vector `along`."""
        p = at(flat)[1]
        change = p * (x @ along.reshape(labels, width + 1).T)
        return joined(change - p * change.sum(1, keepdims=True), along)

    start, limits = np.zeros(labels * (width + 1)), {"maxiter": MOST_STEPS, "gtol": 1e-10}
    fit = minimize(value, start, jac=True, hessp=curvature, method="trust-ncg", options=limits)
    solved = torch.from_numpy(fit.x.reshape(labels, width + 1))
    return solved[:, :-1], solved[:, -1] if fixed is None else fixed
