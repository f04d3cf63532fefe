"""Refit the client head on frozen features, from what clients send, in one of two ways (`Way`).

`refit` is the pooled logistic fit, from a loss and a gradient of each client in each round. The
other way is the discriminant of `moments.py`, from moments sent once. With frozen features the
logistic fit is convex. Local training would drift, because each client sees only its own id as a
label; sums of gradients do not. Shapes: N clients, n examples of one client, e client features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from fedshift.arguments import check_not_negative
from fedshift.errors import InputError, TrainingError
from fedshift.router.calibration import TEMPERATURES, Calibration, figures, tempered
from fedshift.router.moments import Moments, pooled
from fedshift.router.parts import HeldOutSums, OriginSums, Part, summed
from fedshift.router.score import ClientHead, shares

# How many gradient pairs L-BFGS stores (on the server): with 100 it needs half the rounds that it
# needs with 20.
MEMORY = 100
# Gradients below this may be out of reach: rounding of the loss hides any further decrease.
REACHABLE = 1e-6
# Scale of the intercepts in the search. As measured, 3 saves up to a third of the rounds if clients
# are nearly separable, and costs none otherwise; 10 is worse again.
BEND = 3.0

Fit = Callable[[Part, float], ClientHead]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
LOADINGS = (0.01, 0.1, 1.0)
LOADING = 0.01
# The tolerance in the search for a penalty: answers stop changing long before it is reached.
ROUGH = 1e-4


@dataclass(frozen=True, eq=False)
class Refit:
    """The fitted head, the rounds of communication, and the largest remaining gradient entry.

    The gradient is that of the objective, in nats, in the units of the search (`_Units`): at the
    start the curvature is 1 along each slope, and 9 along each intercept.
    """

    head: ClientHead
    rounds: int
    gradient: float


def refit(
    part: Part, *, penalty: float = 1e-4, tolerance: float = 1e-6, rounds: int = 2000
) -> Refit:
    """argmin of (1/N) sum_ij -log softmax(gamma + xi h_ij)[i] + penalty ||xi||^2, N = sum_i n_i.

    part       examples of all clients; a round asks every client for its `origin_sums`
    penalty    0 or more; intercepts are not penalised, so sum_ij softmax_l = n_l at the solution
    tolerance  of the largest gradient entry, see `Refit`
    rounds     largest number of rounds

    L-BFGS with gradients over all examples (as in FedSGD, one per round), so the result is the
    pooled multinomial logistic fit. gamma has mean 0 over clients with examples; the others get
    gamma = -inf. At penalty 0 there is no finite solution if clients can be separated without
    error; the head returned then has very large entries.

    Not in the FedDRM paper. Raises InputError for a negative penalty, and TrainingError if `rounds`
    are not enough.
    """
    check_not_negative("penalty", penalty)
    # The sum of all clients' moments sets the units of the search, and nothing else.
    units = _Units.of(Moments(*summed(part.moments())), part.sizes, penalty)
    total = float(part.sizes.sum())

    def loss(v: Floats) -> tuple[float, Floats]:
        head = units.head(v)
        sums = OriginSums(*summed(part.origin_sums(head)))
        value = float(sums.loss) / total + penalty * float(head.xi.square().sum())
        slope = torch.cat([sums.gamma[:, None], sums.xi], 1) / total
        slope[:, 1:] += 2.0 * penalty * head.xi
        return value, units.flat_gradient(slope)

    # ftol = 0: stop only by the gradient, because the loss stops changing much earlier.
    options = {"gtol": tolerance, "ftol": 0.0, "maxcor": MEMORY, "maxiter": rounds}
    solution = scipy.optimize.minimize(
        loss,
        np.zeros(units.size),
        jac=True,
        method="L-BFGS-B",
        options=options | {"maxfun": rounds},
    )
    gradient = float(np.abs(solution.jac).max())
    # `not <=`, because NaN must count as too large.
    if not gradient <= max(10 * tolerance, REACHABLE):
        raise TrainingError(
            f"the refit of the router stands at gradient {gradient:.1e} after {solution.nfev} "
            f"rounds; give more than rounds={rounds}, or a larger penalty than {penalty:g}"
        )
    return Refit(units.centred(solution.x), int(solution.nfev), gradient)


@dataclass(frozen=True, eq=False)
class _Units:
    """v [N, 1 + e] -> xi_i = U (slope_i * v_i,1:), gamma_i = log w_i + bend_i v_i,0 - xi_i mean.

    w_i = n_i/N; U [e, e] and s [e] are the axes and variances of all features together, and

        slope_ij = (w_i (1 - w_i) s_j + 2 penalty)^(-1/2),    bend_i = BEND (w_i (1 - w_i))^(-1/2).

    Then the objective's curvature along a slope at the start, xi = 0 and gamma = log w, is 1 for
    any features and penalty. In units of the features' standard deviations, features that hardly
    vary, or that nearly repeat one another, would need ten times the rounds or never converge.
    """

    log_share: Tensor
    mean: Tensor
    axes: Tensor
    slope: Tensor
    bend: Tensor

    @classmethod
    def of(cls, whole: Moments, sizes: Tensor, penalty: float) -> _Units:
        w, mean = shares(sizes), whole.sum / whole.n
        second = whole.square / whole.n
        # Along the eigenvectors of their covariance, features are uncorrelated.
        variance, axes = torch.linalg.eigh(second - torch.outer(mean, mean))
        # A smaller variance is rounding: keep the slope along such an axis at 0.
        varies = variance > 1e-13 * second.diagonal().max()
        odds = w * (1.0 - w)
        curvature = odds[:, None] * torch.where(varies, variance, 1.0) + 2.0 * penalty
        slope = torch.where(varies & (curvature > 0), curvature.clamp(min=1e-300).rsqrt(), 0.0)
        bend = BEND * torch.where(odds > 0, odds, 1.0).rsqrt()
        return cls(w.log(), mean, axes, slope, bend)

    @property
    def size(self) -> int:
        return len(self.log_share) * (1 + len(self.mean))

    def head(self, v: Floats) -> ClientHead:
        """The head that corresponds to the flat vector v of the search."""
        table = torch.from_numpy(v).reshape(len(self.log_share), -1)
        xi = (table[:, 1:] * self.slope) @ self.axes.T
        return ClientHead(self.log_share + self.bend * table[:, 0] - xi @ self.mean, xi)

    def flat_gradient(self, slope: Tensor) -> Floats:
        """The gradient [N, 1 + e] by (gamma, xi), converted to these units and flattened."""
        inner = ((slope[:, 1:] - slope[:, :1] * self.mean) @ self.axes) * self.slope
        flat: Floats = torch.cat([slope[:, :1] * self.bend[:, None], inner], 1).flatten().numpy()
        return flat

    def centred(self, v: Floats) -> ClientHead:
        """The head of v, with gamma of mean 0 over clients with examples."""
        head = self.head(v)
        present = torch.isfinite(self.log_share)
        # A constant in gamma has no effect; with mean 0 two fits can be compared.
        return ClientHead(head.gamma - head.gamma[present].mean(), head.xi)


@dataclass(frozen=True)
class Way:
    """A way to fit: a rough fit to try candidates, the exact fit, and the grid of candidates."""

    rough: Fit
    exact: Fit
    strengths: Sequence[float]
    temperatures: Sequence[float]


def penalised(penalty: float | None, tolerance: float, rounds: int) -> Way:
    """The way of `refit`, with this penalty, or for None the one with the least held-out loss."""
    if not 0.0 <= tolerance < math.inf or rounds < 1:
        raise InputError(
            f"tolerance={tolerance}, rounds={rounds}; give a finite tolerance of 0 or more, as "
            "1e-6, and 1 round or more"
        )

    def exact(part: Part, penalty: float, tolerance: float = tolerance) -> ClientHead:
        return refit(part, penalty=penalty, tolerance=tolerance, rounds=rounds).head

    def rough(part: Part, penalty: float) -> ClientHead:
        return exact(part, penalty, max(tolerance, ROUGH))

    grid = (PENALTIES, TEMPERATURES) if penalty is None else ((penalty,), (1.0,))
    return Way(rough, exact, *grid)


def discriminant(loading: float | None) -> Way:
    """The way of `Gaussians.head`, with this loading, or for None that of least held-out loss."""

    def fit(part: Part, loading: float) -> ClientHead:
        return pooled(part.moments(), loading).head()

    grid = (LOADINGS, TEMPERATURES) if loading is None else ((loading,), (1.0,))
    return Way(fit, fit, *grid)


def fit_again(way: Way, whole: Part, folds: Sequence[int]) -> tuple[ClientHead, Calibration | None]:
    """The head fitted to all examples, with the strength chosen on `folds`, and its measures.

    Of strengths and temperatures those with the smallest held-out loss are chosen; ties go to the
    first. A strength whose fit does not converge in some fold is left out; if none converges,
    raises the last TrainingError. Raises InputError if there are several candidates but nothing was
    held out.
    """
    if not folds and len(way.strengths) > 1:
        raise InputError(
            "no client has two examples, so none can be held out to choose by; give fresh=, "
            f"inputs of each client, or a strength, as {way.strengths[0]:g}"
        )
    if not folds:
        return way.exact(whole, way.strengths[0]), None

    def attempt(candidate: tuple[float | None, int]) -> Sequence[HeldOutSums] | TrainingError:
        """A candidate's held-out sums in one fold, or its fit's error; None: before the fit."""
        strength, k = candidate
        held_out = whole.of_fold(k, held_out=True)
        if strength is None:
            return held_out.held_out_sums(())
        part = whole.of_fold(k, held_out=False)
        try:
            head = way.rough(part, strength)
        except TrainingError as e:
            return e
        return held_out.held_out_sums([tempered(head, part.sizes, t) for t in way.temperatures])

    # All attempts in one call of `each`, so that their messages can be combined.
    tried = (*way.strengths, None)
    sent = iter(whole.clients.each(attempt, [(s, k) for s in tried for k in folds]))
    before, failed, best = None, list[TrainingError](), list[Calibration]()
    for strength in tried:
        replies = list(islice(sent, len(folds)))
        errors = [one for one in replies if isinstance(one, TrainingError)]
        sums = [s for one in replies if not isinstance(one, TrainingError) for s in one]
        failed += errors[:1]
        if strength is None:
            before = figures(sums)[0] if sums else None
        elif not errors:
            pairs = zip(figures(sums), way.temperatures, strict=True)
            best += [Calibration(None, after, strength, t) for after, t in pairs]
    if not best:
        raise failed[-1]
    # Count NaN as the worst: all comparisons with it are False.
    chosen = min(best, key=lambda c: c.after.loss if math.isfinite(c.after.loss) else math.inf)
    head = tempered(way.exact(whole, chosen.strength), whole.sizes, chosen.temperature)
    return head, replace(chosen, before=before)
