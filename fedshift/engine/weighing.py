"""FedPALS weights of a run, looked at before its first round."""

from __future__ import annotations

import warnings

import torch

from fedshift.algorithms.base import Algorithm, rows
from fedshift.errors import NeedlessWarning
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from fedshift.tree import Parts


def pals_of(algorithm: Algorithm) -> Pals | None:
    """The FedPALS rule by which a method weighs, also of one that is wrapped; None: it has none."""
    combine, inner = (getattr(algorithm, name, None) for name in ("combine", "inner"))
    if isinstance(combine, Mean):
        return combine.weights if isinstance(combine.weights, Pals) else None
    return None if inner is None else pals_of(inner)


def warn_of_ess(algorithm: Algorithm, server: Parts, clients: int) -> None:
    """Warn where an ESS fraction is asked for that lambda = 0 has already, over all clients.

    Where rounds draw some of the clients, each has weights of its own, and nothing is said.
    """
    rule = pals_of(algorithm)
    if rule is not None and rule.ess is not None:
        note = rule.solved(rows(server, torch.arange(clients))).note
        if note:
            warnings.warn(note, NeedlessWarning, stacklevel=3)
