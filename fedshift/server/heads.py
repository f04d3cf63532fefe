"""What FedPAC's server makes of heads and class means."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedshift.server.mixture import narrow
from fedshift.server.qp import minimise
from fedshift.server.simplex import NO_CAP, Floats, Problem
from fedshift.tree import Params

# What is added to the diagonal of P_i, relative to its trace, and
RIDGE = 1e-12
# relative to the largest ||H_j||^2, whose rounding would else tell equal clients apart.
ROUNDING = 1e-30


def head_quadratic(variance: Tensor, means: Tensor, client: int) -> Tensor:
    """P_i [C, C] float64, P_i[j, l] = 1{j = l} V_j + <H_i - H_j, H_i - H_l>.

    variance V [C], means H [C, ...]. A diagonal of variances plus a Gram matrix, so positive
    semidefinite. Xu, Tong and Huang 2023 (FedPAC), arXiv 2306.11867.
    """
    rows = means.double().flatten(1)
    apart = rows - rows[client]
    return torch.diag(variance.double()) + apart @ apart.T


def head_weights(variance: Tensor, means: Tensor, held: Tensor) -> Tensor:
    """alpha [C, C] float64, row i = argmin over the simplex of alpha' P_i alpha.

    P_i as in `head_quadratic`; clients that `held` [C] marks False give nothing, and keep their own
    head: alpha_i = e_i. Since sum_j alpha_j = 1 the objective is

        ||H_i - sum_j alpha_j H_j||^2 + sum_j V_j alpha_j^2,

    the FedPALS form with target H_i, rows H_j, sizes 1/V_j and lambda = 1, so that
    `fedshift.server.qp` solves it, exactly on the active set. To V_j is added 1e-12 times the trace
    of P_i, which makes alpha unique; where all is 0, any alpha is as good and alpha is uniform.
    The authors' code calls cvxpy, zeroes entries below 1e-3 and renormalises.
    """
    mix = torch.eye(len(variance), dtype=torch.float64)
    among = torch.nonzero(held).flatten()
    if not len(among):
        return mix
    rows = means[among].double().flatten(1).numpy()
    spread = variance[among].double().clamp(min=0.0).numpy()
    spread = spread + ROUNDING * (rows**2).sum(1).max()
    # Distances are all that counts: centred, so that small ones survive; narrowed, as C < K d.
    rows = narrow(rows - rows.mean(0))
    for at, client in enumerate(among.tolist()):
        mix[client] = 0.0
        mix[client, among] = torch.from_numpy(_weights(spread, rows - rows[at]))
    return mix


def _weights(variance: Floats, apart: Floats) -> Floats:
    """argmin over the simplex of ||apart' alpha||^2 + sum_j V_j alpha_j^2, [C]."""
    trace = float(variance.sum() + (apart**2).sum())
    if trace == 0.0:
        return np.full(len(variance), 1.0 / len(variance))
    sizes = 1.0 / (variance / trace + RIDGE)
    problem = Problem(apart / np.sqrt(trace), sizes, np.full_like(sizes, NO_CAP))
    return minimise(problem, 1.0).weights


def pooled_prototypes(stacked: Params) -> Params:
    """c_k = sum_i n_ik mu_ik / sum_i n_ik over the cohort; mean mu [C, K, d], count n [C, K].

    The mean of the features of all examples of class k, each taken by its client's own body. A
    class that nobody in the cohort has gets zeros and count 0.
    """
    n = stacked["count"].double()
    total, held = (n[:, :, None] * stacked["mean"].double()).sum(0), n.sum(0)
    mean = total / held.clamp(min=1.0)[:, None]
    return {"mean": mean.to(stacked["mean"].dtype), "count": held.to(stacked["count"].dtype)}
