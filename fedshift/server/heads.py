"""FedPAC's server: mixing weights for the clients' heads, and pooled class means."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedshift.server.cap import capped_columns
from fedshift.server.dual import NO_CAP, Floats, Problem, narrow, optimum
from fedshift.tree import Params

# Added to the diagonal of P_i, relative to its trace: makes alpha unique.
RIDGE = 1e-12
# Added to the variances, relative to the largest ||H_j||^2. Without it, the rounding of H_i - H_j
# would make equal clients differ if all variances are 0.
ROUNDING = 1e-30


def head_weights(variance: Tensor, means: Tensor, active: Tensor, cap: float = 1.0) -> Tensor:
    """alpha [C, C] float64, row i = argmin over the simplex of alpha' P_i alpha.

        P_i[j, l] = 1{j = l} V_j + <H_i - H_j, H_i - H_l>,    variance V [C], means H [C, ...]

    Xu, Tong and Huang 2023 (FedPAC), arXiv 2306.11867. Clients with `active` [C] False keep their
    head, alpha_i = e_i, and are not mixed into others. Since sum_j alpha_j = 1, the objective is

        ||H_i - sum_j alpha_j H_j||^2 + sum_j V_j alpha_j^2,

    the FedPALS problem with target H_i, rows H_j, sizes 1/V_j and lambda = 1, so that
    `fedshift.server.dual` solves it, exactly. 1e-12 times the trace of P_i is added
    to V_j, to make alpha unique. If P_i is 0, any alpha is as good, and a uniform one is returned.
    V and H are only claims: no head gets a share above the cap (or 1/C, if larger) in another
    client's mixture. The authors' code calls cvxpy, zeroes entries below 1e-3 and renormalises.
    """
    mix = torch.eye(len(variance), dtype=torch.float64)
    clients = torch.nonzero(active).flatten()
    if not len(clients):
        return mix
    rows = means[clients].double().flatten(1).numpy()
    spread = variance[clients].double().clamp(min=0.0).numpy()
    spread = spread + ROUNDING * (rows**2).sum(1).max()
    # Only distances matter. Centring keeps small ones exact, and C < K d, so that narrow rows hold
    # all of them.
    rows = narrow(rows - rows.mean(0))
    for row, client in enumerate(clients.tolist()):
        mix[client] = 0.0
        upper = np.full(len(spread), NO_CAP if cap >= 1.0 else max(cap, 1.0 / len(spread)))
        upper[row] = NO_CAP
        mix[client, clients] = torch.from_numpy(_weights(spread, rows - rows[row], upper))
    return mix


def _weights(variance: Floats, differences: Floats, upper: Floats) -> Floats:
    """argmin of ||differences' alpha||^2 + sum_j V_j alpha_j^2, alpha [C] at most `upper`."""
    trace = float(variance.sum() + (differences**2).sum())
    if trace == 0.0:
        return np.full(len(variance), 1.0 / len(variance))
    sizes = 1.0 / (variance / trace + RIDGE)
    problem = Problem(differences / np.sqrt(trace), sizes, upper)
    return optimum(problem, 1.0).weights


def pooled_prototypes(stacked: Params, cap: float = 1.0) -> Params:
    """c_k = sum_i n_ik mu_ik / sum_i n_ik over the cohort; mean mu [C, K, d], count n [C, K].

    This is the mean of the features of all examples of class k, computed by each client's own body.
    A class that no client of the cohort has gets zeros and count 0. Counts are only claims: if h
    clients have a class, none gets a share of its mean above the cap (or 1/h, if larger).
    """
    n = stacked["count"].double()
    if cap < 1.0:
        n = n.sum(0) * capped_columns(n / n.sum(0).clamp(min=1.0), cap, n > 0)
    total, count = (n[:, :, None] * stacked["mean"].double()).sum(0), n.sum(0)
    mean = total / count.clamp(min=1.0)[:, None]
    return {"mean": mean.to(stacked["mean"].dtype), "count": count.to(stacked["count"].dtype)}
