"""A classifier from class statistics alone: Gaussians of features, drawn from and fitted to."""

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
# Relative to a covariance's largest variance: what is less is rounding, whose root would not be.
ROUNDING = 1e-12
# Of a mean, and of a standard deviation. Beyond it the fit does not come to its minimum, or to an
# end; it is what a model that diverged sends, or a client that lies.
LARGEST = 1e6


def gaussians(share: Tensor, total: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    """(mean [K, d], root [K, d, d]) of each label's features f, root root^T their covariance.

        mean_c = total_c / share_c,   covariance_c = square_c / share_c - mean_c mean_c^T

    share [K] P(y = c), total [K, d] E[1{y = c} f], square [K, d, d] E[1{y = c} f f^T], float64.
    A label of share 0 has zeros. Raises DivergedError for numbers beyond `LARGEST`, or not finite.
    """
    by = share.clamp(min=1e-300)
    seen = (share > 0).double()
    mean = total / by[:, None] * seen[:, None]
    covariance = square / by[:, None, None] * seen[:, None, None] - mean[:, :, None] * mean[:, None]
    sized = (mean.abs() <= LARGEST).all() and (covariance.abs() <= LARGEST**2).all()
    if not bool(sized):  # so also of NaN
        raise DivergedError(
            "the clients' class statistics are of features that are not finite, or beyond "
            f"{LARGEST:g}; lower the clients' lr"
        )
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    values = values * (values > ROUNDING * values.amax(1, keepdim=True))
    # The symmetric root: it does not depend on the signs that eigenvectors happen to have.
    return mean, (vectors * values.sqrt()[:, None]) @ vectors.mT


def drawn(mean: Tensor, root: Tensor, draws: int, seed: int) -> Tensor:
    """Virtual features [K, draws, d] from each label's Gaussian; each label has its stream."""
    noise = [
        torch.randn(draws, mean.shape[1], dtype=torch.float64, generator=source)
        for source in (generator(seed, "virtual features", c) for c in range(len(mean)))
    ]
    return mean[:, None] + torch.stack(noise).to(mean.device) @ root.mT


def refitted(
    features: Tensor, shares: Tensor, ridge: float, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(W [K, d], b [K]) of the softmax regression on features [K, m, d] whose labels have shares.

        argmin  -sum_c (shares_c / m) sum_j log softmax(W f_cj + b)[c] + ridge/2 (||W||^2 + ||b||^2)

    The ridge makes the minimum one point, to which Newton's method comes from 0. fixed [K]: b,
    where it is not to be fitted; it then has no ridge. Raises DivergedError for features that are
    not finite.
    """
    labels, draws, width = features.shape
    # One column of ones more is the bias.
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
        log_p, p = at(flat)
        loss = -float(w @ log_p[rows, y]) + ridge / 2 * float(flat @ flat)
        p[rows, y] -= 1.0
        return loss, joined(p, flat)

    def curvature(flat: Floats, along: Floats) -> Floats:
        p = at(flat)[1]
        change = p * (x @ along.reshape(labels, width + 1).T)
        return joined(change - p * change.sum(1, keepdims=True), along)

    start, limits = np.zeros(labels * (width + 1)), {"maxiter": MOST_STEPS, "gtol": 1e-10}
    fit = minimize(value, start, jac=True, hessp=curvature, method="trust-ncg", options=limits)
    solved = torch.from_numpy(fit.x.reshape(labels, width + 1))
    return solved[:, :-1], solved[:, -1] if fixed is None else fixed
