"""How good a router is: accuracy, calibration, and the gain from refusing queries.

Shapes: B queries of known origin [B] (client ids), N clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.arguments import called, check_number
from fedshift.errors import InputError
from fedshift.shifts.measures import auc
from fedshift.sketch import sketched


def client_accuracy(chosen: Tensor, origin: Tensor) -> float:
    """The share of queries that are sent to the client they come from; chosen [B], or [B, k].

    With k columns one of them must be right. A refused query counts as wrong. Wang et al. 2026
    (FedDRM).
    """
    _check(len(chosen), origin)
    # ABSTAIN is -1 and matches no client.
    columns = chosen if chosen.ndim == 2 else chosen[:, None]
    return float((columns == origin[:, None]).any(1).double().mean())


def brier(probabilities: Tensor, origin: Tensor) -> float:
    """(1/B) sum_b sum_i (r_i(x_b) - 1[i = origin_b])^2, in [0, 2]; probabilities r [B, N]."""
    _check_probabilities(probabilities, origin)
    clients = probabilities.shape[1]
    if int(origin.min()) < 0 or int(origin.max()) >= clients:
        odd = int(origin[(origin < 0) | (origin >= clients)][0])
        raise InputError(f"origin holds {odd}; with {clients} columns it is 0 to {clients - 1}")
    truth = torch.nn.functional.one_hot(origin.long(), clients)
    return float((probabilities.double() - truth).square().sum(1).mean())


def calibration_error(probabilities: Tensor, origin: Tensor, bins: int = 15) -> float:
    """ECE: sum_g (B_g / B) |accuracy_g - mean confidence_g|, groups by confidence max_i r_i.

    The groups are `bins` intervals of equal width that include their upper ends. Guo et al. 2017,
    arXiv 1706.04599, Equation 3.
    """
    return float(calibration_gaps(probabilities, origin, bins).abs().sum() / len(origin))


def calibration_gaps(probabilities: Tensor, origin: Tensor, bins: int = 15) -> Tensor:
    """sum_(b in g) (1[right_b] - confidence_b) of each group g [bins]: they add over clients."""
    _check_probabilities(probabilities, origin)
    if bins < 1:
        raise InputError(f"bins must be 1 or more, got {bins}")
    confidence, best = probabilities.double().max(1)
    # ceil: intervals include their upper ends. clamp: confidence 0 goes to the first one.
    group = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gap = (best == origin).double() - confidence
    return torch.bincount(group, weights=gap, minlength=bins)


def pairwise_auc(scores: Tensor, origin: Tensor) -> Tensor:
    """P(d(x) > d(x')) + P(=)/2, d = s_i - s_j, x from client i, x' from client j; [N, N] float64.

    It is symmetric; 1/2 means that the router cannot distinguish the two clients' queries. NaN on
    the diagonal and if a client has no query. It does not depend on sizes, priors or prices.
    Mann-Whitney; Hand and Till 2001 use it for several classes.
    """
    _check(len(scores), origin)
    s, client = scores.detach().cpu().double().numpy(), origin.cpu().numpy()
    clients = s.shape[1]
    table = np.full((clients, clients), np.nan)
    for i in range(clients):
        for j in range(i):
            # Priors add constants to scores, which do not change the order of margins.
            margin = s[:, i] - s[:, j]
            table[i, j] = table[j, i] = auc(margin[client == i], margin[client == j])
    return torch.from_numpy(table)


@sketched
@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error among the queries that are answered (risk [B]), by their share (coverage [B])."""

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """AURC = (1/B) sum_k risk at coverage k/B; smaller is better."""
        return float(self.risk.mean())


def risk_coverage(confidence: Tensor, wrong: Tensor) -> RiskCoverage:
    """Risk (1/k) sum of errors among the k most confident, k = 1..B; confidence, wrong [B].

    Ties in confidence get the expected risk in random order, so that the curve does not depend on
    the order of queries. For novelty, pass its negative. Geifman, Uziel and El-Yaniv 2019, arXiv
    1805.08206.
    """
    _check_vector("confidence", confidence)
    _check_vector("wrong", wrong)
    _check(len(confidence), wrong)
    # np.unique sorts ascending, so the most confident come first.
    doubt = -confidence.detach().cpu().double().numpy()
    errors = wrong.detach().cpu().double().numpy()
    _, group, members = np.unique(doubt, return_inverse=True, return_counts=True)
    mean = np.bincount(group, weights=errors) / members
    k = np.arange(1, len(doubt) + 1)
    risk = np.repeat(mean, members).cumsum() / k
    return RiskCoverage(torch.from_numpy(k / len(k)), torch.from_numpy(risk))


def threshold(confidence: Tensor, coverage: float) -> float:
    """The largest t for which at least this share of queries has confidence >= t.

    Use it for `min_posterior` with held-out posteriors, and for `max_novelty` as minus the
    threshold of minus the novelty. Raises InputError unless 0 < coverage <= 1, and for confidences
    that are no vector of numbers.
    """
    check_number("coverage", coverage)
    _check_vector("confidence", confidence)
    if not 0.0 < coverage <= 1.0 or not len(confidence):
        raise InputError(
            f"coverage {coverage} of {len(confidence)} queries; give at least one query and a "
            "coverage in (0, 1]"
        )
    # 1e-9: a product that rounding puts just above a whole number must not count as one more.
    k = max(int(np.ceil(coverage * len(confidence) - 1e-9)), 1)
    return float(confidence.sort(descending=True).values[k - 1])


def _check_vector(name: str, value: object) -> None:
    """Raise InputError unless it is a tensor [B] without NaN."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is {called(value)}; give torch.as_tensor(...) of it")
    if value.ndim != 1:
        raise InputError(f"{name} has the shape {tuple(value.shape)}; give one number per query")
    if bool(value.isnan().any()):
        raise InputError(f"{name}[{int(value.isnan().nonzero()[0])}] is NaN; give numbers")


def _check_probabilities(given: object, origin: Tensor) -> None:
    """Raise InputError unless they are probabilities [B, N] with an origin [B]."""
    if not isinstance(given, Tensor) or given.ndim != 2:
        what = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else called(given)
        raise InputError(f"probabilities are {what}; give a tensor [B, N], a row per query")
    _check(len(given), origin)
    # NaN passes: a diverged router has nothing else.
    if bool(((given < -1e-6) | (given > 1 + 1e-6)).any()):
        raise InputError(
            f"probabilities go from {float(given.min()):.4g} to {float(given.max()):.4g}, beyond 0 "
            "to 1; give those of a softmax, as router.route(x).probabilities, and no logits"
        )


def _check(queries: int, origin: Tensor) -> None:
    if not isinstance(origin, Tensor):
        raise InputError(f"origin is {called(origin)}; give torch.as_tensor(...) of it")
    if not queries or origin.shape != (queries,):
        raise InputError(
            f"{queries} queries and truth of shape {tuple(origin.shape)}; give one per query, "
            "and at least one"
        )
