"""Test whether clients' gradients fit the label counts that they claim.

Under label shift the expected gradient of client i is a mixture of gradients per label,

    E[g_i] = sum_y S_i(y) g_y,

S_i being its label marginal. g_y is fitted to the other clients' gradients and claims, and the
residual of g_i is compared with its sampling variance. A misfit means that claim and gradient are
inconsistent. It does not prove a lie: the claim may be false, but P(X | Y) may also differ at this
client, or the gradient may be forged. A client that forges both consistently is not detected, and
with secure aggregation, which hides single gradients, no client is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError

Floats = NDArray[np.float64]
Verdict = Literal["consistent", "inconsistent", "untested"]
# The largest part of a marginal, in L1, that may lie outside the span of the others' marginals.
OUTSIDE = 1e-6


@dataclass(frozen=True)
class Finding:
    """The result for one client: its misfit (about 1 if it is sampling noise), and its p value.

    p is the chance of at least this misfit for a client whose claim is true; NaN if the others'
    labels do not span this client's.
    """

    client: int
    misfit: float
    p: float
    verdict: Verdict


@dataclass(frozen=True, eq=False)
class _Halves:
    """What the test needs of the gradients; made from the two halves of each client's examples.

    Inner products of mean gradients [M, M], square norms of their noise [M], label marginals,
    sizes.
    """

    products: Floats
    noise: Floats
    rows: Floats
    sizes: Floats
    spread: float
    freedom: float


def audit_marginals(
    first: Floats, second: Floats, label_counts: Floats, *, level: float = 0.01
) -> tuple[Finding, ...]:
    """Test each client's claimed label counts [M, K] against its gradients at one common model.

    `first` and `second` [M, d] are mean gradients over two halves of a client's examples, drawn
    at random within each label: with different labels in the halves, what the claim explains would
    count as noise.
    With g_i = (a_i + b_i) / 2, its noise e_i = (a_i - b_i) / 2 and the least-squares weights h_ij
    by which the others predict i (each weighted by n_j),

        misfit_i = ||g_i - sum_j h_ij g_j||^2 / (||e_i||^2 + sum_j h_ij^2 ||e_j||^2),

    of mean 1 for true claims. p follows from F(f, 1.5 f) where f = (tr C)^2 / tr C^2 is estimated
    from products of different clients' noise (Satterthwaite), C being the covariance of one
    example's gradient. `level` is the share of false alarms per client. The client that fits worst
    is put aside and the others are tested again, until all that are left fit. One false claim then
    does not make honest clients look bad. At most half of the clients are put aside. There must be
    more clients than labels. Raises InputError for tables of other shapes, for fewer than
    three clients and for a level outside (0, 0.5).

    The model and the test are the library's own; the residual against fitted per-label gradients is
    related to BOBA (Bao, Wu and He 2024, arXiv 2208.12932), which projects on the same simplex.
    """
    halves = _halves(first, second, label_counts, level)
    aside: set[int] = set()
    while True:
        p, misfit = _test_all(halves, aside)
        failing = [i for i in range(len(p)) if i not in aside and p[i] < level]
        if not failing or len(aside) >= len(p) // 2:
            break
        # One at a time: until it is put aside, a false claim spoils the fit of honest clients.
        aside.add(min(failing, key=lambda i: (p[i], -misfit[i])))
    return tuple(
        Finding(i, float(misfit[i]), float(p[i]), _verdict(float(p[i]), level))
        for i in range(len(p))
    )


def _verdict(p: float, level: float) -> Verdict:
    if np.isnan(p):
        return "untested"
    return "inconsistent" if p < level else "consistent"


def _halves(first: Floats, second: Floats, label_counts: Floats, level: float) -> _Halves:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    counts = np.asarray(label_counts, np.float64)
    if a.ndim != 2 or a.shape != b.shape or counts.ndim != 2 or len(counts) != len(a):
        raise InputError(
            f"gradients {a.shape} and {b.shape} and label counts {counts.shape}; they must be "
            "[M, d], [M, d] and [M, K]"
        )
    if len(a) < 3:
        raise InputError(f"{len(a)} clients; a client can be tested against two others at least")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("gradients must be finite; audit an earlier model")
    sizes = counts.sum(1)
    if not np.isfinite(counts).all() or (counts < 0).any() or (sizes <= 0).any():
        raise InputError("label counts must be finite and >= 0, and no client may be empty")
    if not 0.0 < level < 0.5:
        raise InputError(f"level={level}; allowed: more than 0, less than 0.5")
    # What both halves share is signal; half of their difference has the variance of the mean's
    # noise, whatever the signal is.
    mean, noise = (a + b) / 2.0, (a - b) / 2.0
    rows, noise_squares = counts / sizes[:, None], (noise**2).sum(1)
    return _Halves(mean @ mean.T, noise_squares, rows, sizes, *_noise(noise, sizes))


def _noise(noise: Floats, sizes: Floats) -> tuple[float, float]:
    """(tr C, (tr C)^2 / tr C^2) of one example's gradient, over all clients together."""
    # The noise of a mean over n examples has covariance C / n; times n, all estimate the same C.
    scaled = noise * np.sqrt(sizes)[:, None]
    products = scaled @ scaled.T
    spread = float(np.mean(np.diag(products)))
    # E (e_i . e_j)^2 = tr C^2 only for i and j that differ: a square also has (tr C)^2 in it.
    others = products[~np.eye(len(products), dtype=bool)]
    squared = float(np.mean(others**2))
    return spread, max(1.0, spread**2 / squared) if squared > 0 else 1.0


def _test_all(halves: _Halves, aside: set[int]) -> tuple[Floats, Floats]:
    """(p [M], misfit [M]) of every client against the others that are not put aside."""
    # Imported here, because it takes a tenth of the time in which a client's process starts, and
    # most processes do not need it.
    from scipy.stats import f

    clients = len(halves.sizes)
    p, misfit = np.full(clients, np.nan), np.full(clients, np.nan)
    # A client's noise estimate has f degrees of freedom, the pooled one many more. The mean of both
    # is taken to have 1.5 f, not 4 f: the noises of clients differ, and 1.5 f keeps the level.
    pooled = halves.spread / halves.sizes
    noise = (halves.noise + pooled) / 2.0
    for i in range(clients):
        others = [j for j in range(clients) if j != i and j not in aside]
        weights = _prediction_weights(halves, i, others)
        if weights is None:
            continue
        expected = noise[i] + float((weights**2) @ noise[others])
        rows = [i, *others]
        signed = np.concatenate([[1.0], -weights])
        # ||g_i - sum_j h_j g_j||^2 from inner products: gradients may have millions of entries.
        rest = float(signed @ halves.products[np.ix_(rows, rows)] @ signed)
        misfit[i] = max(rest, 0.0) / max(expected, np.finfo(np.float64).tiny)
        p[i] = f.sf(misfit[i], halves.freedom, 1.5 * halves.freedom)
    return p, misfit


def _prediction_weights(halves: _Halves, i: int, others: list[int]) -> Floats | None:
    """h [M'] with S_i = sum_j h_j S_j, by least squares weighted by size; None if there is none."""
    rows, root = halves.rows[others], np.sqrt(halves.sizes[others])
    # Weighted least squares: larger clients have less noisy gradients.
    inverse = np.linalg.pinv(rows * root[:, None], rcond=1e-8)
    weights: Floats = halves.rows[i] @ inverse * root
    # A label that only this client claims cannot be predicted from the others.
    if np.abs(weights @ rows - halves.rows[i]).sum() > OUTSIDE:
        return None
    return weights
