"""FedPALS weights of a cohort that also make up for what earlier rounds lacked of the target."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.server.pals import PalsWeights, pals_weights
from fedshift.server.weights import Pals
from fedshift.tree import Params


def check_rule(rule: Pals) -> None:
    """Raise InputError unless the rule's distance is squared: other debts would not add up."""
    if rule.fidelity != "squared":
        raise InputError(
            f'so_far adds up squared distances, got fidelity = "{rule.fidelity}"; leave out one of '
            "the two"
        )


def shares_of(table: Params) -> NDArray[np.float64]:
    """S [C, K], the clients' label shares; zeros for a client without examples."""
    labels = table["labels"].numpy()
    shares: NDArray[np.float64] = labels / np.maximum(labels.sum(1, keepdims=True), 1.0)
    return shares


def weights_so_far(
    rule: Pals, table: Params, debt: NDArray[np.float64], rounds: int
) -> PalsWeights:
    """argmin over the simplex of ||T + D - S^T a||^2 + t lam sum_i a_i^2 / n_i, in round t.

    D = sum_{s<t} (T - S_s^T a_s) is the debt of the t - 1 earlier rounds. Given their weights, a
    minimises t ||T - m||^2 + lam sum_s sum_i a_si^2 / n_i, where m is the mean mixture of all t
    rounds.

    rule    its lam is used as above; an ess is reached in this cohort by the smallest lam
    table   the cohort's "labels" [C, K], float64
    debt    D [K]
    rounds  t - 1; if it is 0, these are the rule's own weights, bit for bit

    This is our extension: the paper solves for T in every round. If all clients take part in every
    round, both are the same.
    """
    if not rounds:
        return rule.solved(table)
    labels = np.ascontiguousarray(table["labels"].numpy(), dtype=np.float64)
    sizes = labels.sum(1)
    target = np.asarray(rule.target, dtype=np.float64) + debt
    cap = rule.cap_among(int((sizes > 0).sum()))
    # Not as label counts: T + D may have negative entries, which no target of labels has.
    solve = partial(pals_weights, sizes, target, cap=cap, rows=shares_of(table))
    if rule.lam is not None:
        return solve(lam=(rounds + 1) * float(rule.lam))
    ess = float(rule.ess or 0.0)
    if not rule.strict and (largest := solve(lam=math.inf)).ess_fraction < ess:
        return largest
    return solve(ess=ess)
