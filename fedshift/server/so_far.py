"""FedPALS weights of a cohort for what earlier rounds have not mixed."""

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
    """Raise InputError for a rule whose distance is not squared: debts of rounds would not add."""
    if rule.fidelity != "squared":
        raise InputError(
            f'so_far adds up squared distances, got fidelity = "{rule.fidelity}"; leave out one of '
            "the two"
        )


def shares_of(table: Params) -> NDArray[np.float64]:
    """S [C, K], a client's label shares; zeros for a client without examples."""
    labels = table["labels"].numpy()
    shares: NDArray[np.float64] = labels / np.maximum(labels.sum(1, keepdims=True), 1.0)
    return shares


def weights_so_far(
    rule: Pals, table: Params, debt: NDArray[np.float64], rounds: int
) -> PalsWeights:
    """argmin over the simplex of ||T + D - S^T a||^2 + t lam sum_i a_i^2 / n_i, in round t.

    D = sum_{s<t} (T - S_s^T a_s) is the debt of the t - 1 rounds before. Given their weights, a
    minimises t ||T - m||^2 + lam sum_s sum_i a_si^2 / n_i, m the mean mixture of the t rounds.

    table   the cohort's "labels" [C, K], float64
    debt    D [K]; rounds: t - 1. Without any, these are the rule's own weights, bit for bit
    rule    its lam counts as above; its ess is reached in this cohort by the smallest lam

    Ours: the paper solves for T in every round. With all clients in every round it is the same.
    """
    if not rounds:
        return rule.solved(table)
    labels = np.ascontiguousarray(table["labels"].numpy(), dtype=np.float64)
    sizes = labels.sum(1)
    target = np.asarray(rule.target, dtype=np.float64) + debt
    cap = rule.cap_among(int((sizes > 0).sum()))
    solve = partial(pals_weights, sizes, target, cap=cap, rows=shares_of(table))
    if rule.lam is not None:
        return solve(lam=(rounds + 1) * float(rule.lam))
    ess = float(rule.ess or 0.0)
    if not rule.strict and (largest := solve(lam=math.inf)).ess_fraction < ess:
        return largest
    return solve(ess=ess)
