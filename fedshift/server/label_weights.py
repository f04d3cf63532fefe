"""Weights of examples by their labels: the target's risk from clients of any labels.

Weights a [C] of clients and w [C, K] of their examples give label y of client i the mass
A_iy = a_i S_iy w_iy. The loss is the target's in expectation where sum_i A_iy = T_y, and of all
such masses A_iy = T_y n_iy / n_y has the largest effective sample size (n_y = sum_i n_iy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.server.shares import label_shares
from fedshift.server.weights import BySize
from fedshift.sketch import sketched
from fedshift.tree import Params


def masses(labels: Tensor, target: Tensor) -> Tensor:
    """A [C, K]: A_iy = T_y n_iy / n_y, for label counts n_iy [C, K] and T [K]; float64.

    A label that none of these clients has is left out, and T is rescaled to the others. All 0 if no
    label is left.

    >>> import torch
    >>> from fedshift.server.label_weights import masses
    >>> masses(torch.tensor([[30.0, 0.0], [10.0, 5.0]]), torch.tensor([0.8, 0.2])).tolist()
    [[0.6000000000000001, 0.0], [0.2, 0.2]]
    """
    n, T = labels.double().sum(0), target.double()
    T = torch.where(n > 0, T, 0.0)
    # The clamps turn 0 / 0 into 0.
    return T / T.sum().clamp(min=1e-300) * (labels / n.clamp(min=1e-300))


def ratios(labels: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """w [C, K] with a_i S_iy w_iy = `masses`, for clients' weights a [C].

    w_iy = T_y n_i / (a_i n_y). With a_i = n_i / n it is T_y / p_y, where p are the pooled label
    shares: importance weighting. With a_i = sum_y A_iy its mean over a client's examples is 1. It
    is 0 for labels that the client lacks, and if a_i = 0.
    """
    mean = weights.double()[:, None] * labels
    n = labels.double().sum(1, keepdim=True)
    return torch.where(mean > 0, masses(labels, target) * n / mean.clamp(min=1e-300), 0.0)


def node_ratios(labels: Tensor, target: Tensor) -> Tensor:
    """w [C, K] = T_y / S_iy, S_i the client's label shares; 0 for labels that it lacks."""
    S = labels.double() / labels.double().sum(1, keepdim=True).clamp(min=1.0)
    return torch.where(S > 0, target.double() / S.clamp(min=1e-300), 0.0)


def mass_ess(mass: Tensor, labels: Tensor) -> float:
    """ESS = 1 / sum_iy A_iy^2 / n_iy in examples, for masses A [C, K] that sum to 1.

    For `masses` it is 1 / sum_y T_y^2 / n_y, and at least the ESS of FedPALS at lambda = 0 if
    clients can be mixed into T. NaN if a label without examples has mass, or if no label has any.
    """
    used = mass > 0
    if not used.any() or bool((labels[used] <= 0).any()):
        return math.nan
    return float(1.0 / (mass[used].square() / labels[used]).sum())


def check_reached(labels: Tensor, target: Tensor) -> None:
    """Raise InputError if no client has an example of any label of the target."""
    if not bool((labels.sum(0)[target > 0] > 0).any()):
        raise InputError(
            "no client has an example of a label that the target has, and no weight makes up for "
            "examples that are not there; give another target"
        )


@sketched
@dataclass(frozen=True)
class JointLabels:
    """a_i = sum_y T_y n_iy / n_y: a client's share of the target's labels; a weight rule.

    Use it with `LabelWeights`, which weighs the examples within each client. If no client of a
    cohort has a label of the target, weights are by size.

    >>> import torch
    >>> from fedshift.server.label_weights import JointLabels
    >>> labels = torch.tensor([[30.0, 0.0], [10.0, 10.0], [0.0, 80.0]])
    >>> JointLabels((1.0, 0.0))({"n": labels.sum(1), "labels": labels}).tolist()
    [0.75, 0.25, 0.0]
    """

    target: tuple[float, ...]
    needs = ("n", "labels")

    def __post_init__(self) -> None:
        check_fields(self)
        label_shares(self.target)

    def __call__(self, table: Params) -> Tensor:
        mass = masses(table["labels"], torch.tensor(self.target, dtype=torch.float64)).sum(1)
        return mass / mass.sum() if bool(mass.any()) else BySize()(table)
