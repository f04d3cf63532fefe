"""FedDisco's weight rule: sizes, reduced by how far a client's labels are from given shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.arguments import NotNegative, check_fields
from fedshift.errors import InputError, check_name
from fedshift.real import numbers
from fedshift.server.shares import label_shares
from fedshift.server.weights import BySize
from fedshift.sketch import sketched
from fedshift.tree import Params

Distance = Literal["kl", "l2"]


@sketched
@dataclass(frozen=True)
class Disco:
    """a_i = r_i / sum_j r_j,  r_i = max(0, n_i/N - a d_i + b), over the cohort's clients.

    d_i is the distance of the client's label shares S_i [K] to `towards` [K], divided by the sum of
    the cohort's distances. A client without examples gets 0. With a = b = 0 it is `BySize`, bit for
    bit.

    distance  "kl": sum_c S_ic log(S_ic / towards_c); "l2": the norm of the difference

    >>> import torch
    >>> from fedshift.server.discrepancy import Disco
    >>> labels = torch.tensor([[50.0, 50.0], [100.0, 0.0]])
    >>> rule = Disco((0.5, 0.5), a=0.4, b=0.1)
    >>> [round(w, 3) for w in rule({"n": labels.sum(1), "labels": labels}).tolist()]
    [0.75, 0.25]

    Ye et al. 2023, "FedDisco: federated learning with discrepancy-aware collaboration", arXiv
    2305.19229; d is divided by its sum as in the authors' code, also for "l2". Raises InputError
    for a or b below 0, for shares that do not sum to 1 or whose number is not that of the clients'
    labels, for "kl" with a share of 0, and for a cohort in which all r_i are 0.
    """

    towards: tuple[float, ...]
    a: NotNegative = 0.5
    b: NotNegative = 0.1
    distance: Distance = "kl"
    needs = ("n", "labels")

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("distance of FedDisco", self.distance, ("kl", "l2"))
        label_shares(self.towards, "towards")
        if self.distance == "kl" and not (numbers(self.towards) > 0).all():
            raise InputError(
                'FedDisco\'s distance "kl" is infinite for clients that hold a label whose share '
                'in the target is 0, as here; give distance = "l2"'
            )

    def __call__(self, table: Params) -> Tensor:
        by_size = BySize()(table)
        if not self.a and not self.b:
            return by_size
        rest = by_size - self.a * self.distances(table["labels"]) + self.b
        # A client without examples gets no weight, however large b is.
        rest = torch.where(table["n"] > 0, rest.clamp(min=0.0), 0.0)
        if not rest.sum() > 0:
            raise InputError(
                f"FedDisco's weights are 0 for all {len(rest)} clients of a cohort: a = {self.a:g} "
                f"times their distances is more than their sizes and b = {self.b:g} make up for. "
                "Lower a, below 1 some client always has a weight, or raise b"
            )
        return rest / rest.sum()

    def distances(self, labels: Tensor) -> Tensor:
        """d [C] of clients with these label counts [C, K]; sum 1, or all 0 if all distances are."""
        if len(self.towards) != labels.shape[1]:  # a single share would be broadcast to all labels
            raise InputError(
                f"FedDisco's distances are to shares of {len(self.towards)} labels, and clients "
                f"have {labels.shape[1]}; give a share for each label"
            )
        towards = torch.tensor(numbers(self.towards).tolist(), dtype=labels.dtype)
        shares = labels / labels.sum(1, keepdim=True).clamp(min=1e-300)
        if self.distance == "kl":
            # clamp: rounding may make it slightly negative.
            distance = torch.xlogy(shares, shares / towards).sum(1).clamp(min=0.0)
        else:
            distance = (shares - towards).norm(dim=1)
        # Clients without examples must not enter the sum.
        distance = torch.where(labels.sum(1) > 0, distance, 0.0)
        return distance / distance.sum() if distance.sum() > 0 else distance
