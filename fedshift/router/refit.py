"""Fit the client head again, on frozen features, from sums that the clients send.

With the features frozen the fit is convex. Training drifts, because a client sees one client label
only; sums of gradients do not. Shapes: N clients, n examples of one client, e client features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from fedshift.errors import InputError, TrainingError
from fedshift.router.head import ClientHead
from fedshift.router.score import shares

# Gradient pairs that L-BFGS remembers, on the server: 100 take half the rounds that 20 take.
MEMORY = 100
# Rounding of the loss can hide further decrease from here on, whatever tolerance is asked for.
REACHABLE = 1e-6

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Spread(NamedTuple):
    """What a client sends before the first round: n [], sum_b h_b [e], sum_b h_b^2 [e]."""

    n: Tensor
    sum: Tensor
    square: Tensor


class OriginSums(NamedTuple):
    """What a client sends in one round of the refit: loss [], its gradient gamma [N], xi [N, e]."""

    loss: Tensor
    gamma: Tensor
    xi: Tensor


Ask = Callable[[ClientHead], OriginSums]


def spread(features: Tensor) -> Spread:
    """The sums over one client's features h [n, e], float64."""
    h = features.double()
    return Spread(torch.tensor(float(len(h)), dtype=h.dtype), h.sum(0), h.square().sum(0))


def origin_sums(head: ClientHead, features: Tensor, client: int) -> OriginSums:
    """sum_b -log softmax(z(h_b))[client] over a client's features h [n, e], and its gradient."""
    h = features.double()
    logs = head(h).log_softmax(1)
    slope = logs.exp()
    slope[:, client] -= 1.0
    return OriginSums(-logs[:, client].sum(), slope.sum(0), slope.T @ h)


@dataclass(frozen=True, eq=False)
class Refit:
    """The head found, the rounds of communication it took, and the largest gradient entry left.

    The gradient is that of the mean loss in nats, by intercept and by slope per standard deviation
    of a feature.
    """

    head: ClientHead
    rounds: int
    gradient: float


def refit(
    ask: Ask,
    sizes: Tensor,
    whole: Spread,
    *,
    penalty: float = 1e-4,
    tolerance: float = 1e-6,
    rounds: int = 2000,
) -> Refit:
    """argmin of (1/N) sum_ij -log softmax(gamma + xi h_ij)[i] + penalty ||xi||^2, N = sum_i n_i.

    ask        one round: sends a head to every client and returns the sum of what they send back
    sizes      n [N]
    whole      the sum of all clients' `spread`; it only sets the units of the search
    penalty    0 or more; the intercepts are free, so sum_ij softmax_l = n_l at the solution
    tolerance  of the largest gradient entry, see `Refit`
    rounds     at most so many

    L-BFGS on gradients over all examples (FedSGD's, one per round), so that the result is the
    pooled multinomial logistic fit. gamma has mean 0 over clients with examples; the others get
    gamma = -inf. At penalty 0, clients that can be told apart without error have no finite
    solution, and what is returned is far out.

    Not in the FedDRM paper. Raises InputError for a negative penalty, and TrainingError where
    `rounds` do not suffice.
    """
    if not 0.0 <= penalty < float("inf"):
        raise InputError(f"penalty must be 0 or more, got {penalty}")
    view, total = _Units.of(whole, sizes), float(sizes.sum())

    def loss(v: Floats) -> tuple[float, Floats]:
        head = view.head(v)
        value, slope = _penalised(ask(head), head, total, penalty)
        return value, view.pulled(slope)

    options = {"gtol": tolerance, "ftol": 0.0, "maxcor": MEMORY, "maxiter": rounds}
    found = scipy.optimize.minimize(
        loss, np.zeros(view.size), jac=True, method="L-BFGS-B", options=options | {"maxfun": rounds}
    )
    left = float(np.abs(found.jac).max())
    if left > max(10 * tolerance, REACHABLE):
        raise TrainingError(
            f"the refit of the router stands at gradient {left:.1e} after {found.nfev} rounds; "
            f"give more than rounds={rounds}, or a larger penalty than {penalty:g}"
        )
    return Refit(view.centred(found.x), int(found.nfev), left)


def refit_locally(
    features: Sequence[Tensor],
    *,
    penalty: float = 1e-4,
    tolerance: float = 1e-6,
    rounds: int = 2000,
) -> Refit:
    """`refit` with all clients in this process: features[i] is client i's h [n_i, e]."""
    sent = [spread(h) for h in features]
    sizes = torch.stack([s.n for s in sent])

    def ask(head: ClientHead) -> OriginSums:
        return OriginSums(*_summed(origin_sums(head, h, i) for i, h in enumerate(features)))

    whole = Spread(*_summed(sent))
    return refit(ask, sizes, whole, penalty=penalty, tolerance=tolerance, rounds=rounds)


def _summed(replies: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.stack(part).sum(0) for part in zip(*replies, strict=True)]


def _penalised(
    sums: OriginSums, head: ClientHead, total: float, penalty: float
) -> tuple[float, Tensor]:
    """The objective, and its gradient [N, 1 + e] in (gamma, xi)."""
    value = float(sums.loss) / total + penalty * float(head.xi.square().sum())
    slope = torch.cat([sums.gamma[:, None], sums.xi], 1) / total
    slope[:, 1:] += 2.0 * penalty * head.xi
    return value, slope


@dataclass(frozen=True, eq=False)
class _Units:
    """v [N, 1 + e] -> xi = v_1: / sd, gamma = log(n / N) + v_0 - xi mean: features standardised.

    Without it features of unequal means and scales take 4 to 30 times the rounds; those of a
    LayerNorm take as many.
    """

    log_share: Tensor
    mean: Tensor
    sd: Tensor

    @classmethod
    def of(cls, whole: Spread, sizes: Tensor) -> _Units:
        mean = whole.sum / whole.n
        variance = whole.square / whole.n - mean.square()
        # A unit that is off in all examples has no variance; its slope stays 0 in any unit.
        return cls(shares(sizes).log(), mean, torch.where(variance > 0, variance, 1.0).sqrt())

    @property
    def size(self) -> int:
        return len(self.log_share) * (1 + len(self.mean))

    def head(self, v: Floats) -> ClientHead:
        table = torch.from_numpy(v).reshape(len(self.log_share), -1)
        xi = table[:, 1:] / self.sd
        return ClientHead(self.log_share + table[:, 0] - xi @ self.mean, xi)

    def pulled(self, slope: Tensor) -> Floats:
        """The gradient [N, 1 + e] in (gamma, xi), in these units and flat."""
        inner = (slope[:, 1:] - slope[:, :1] * self.mean) / self.sd
        flat: Floats = torch.cat([slope[:, :1], inner], 1).flatten().numpy()
        return flat

    def centred(self, v: Floats) -> ClientHead:
        head = self.head(v)
        held = torch.isfinite(self.log_share)
        return ClientHead(head.gamma - head.gamma[held].mean(), head.xi)
