"""Local objectives: terms that add up to the loss of one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.data import Batch, ClientData
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params, Parts, sq_norm, sub


class View(NamedTuple):
    """All that a loss term may look at.

    params   the parameters being trained (whole model)
    out      what the model gave for the batch: "logits" [B, K], "features" [B, d] where it has them
    context  the client's state and the round's constants; `context["anchor"]` is the model as
             received this round, `context["anchor_buffers"]` its buffers
    """

    model: Model
    params: Params
    out: Params
    batch: Batch
    context: Parts


def batch_mean(per_example: Tensor, batch: Batch) -> Tensor:
    """(1/size) sum_b w_b l_b over the rows that are not padding; per_example [B] -> [].

    Divides by the number of rows and not by sum_b w_b: importance weights have mean 1 over a
    client, and dividing by their sum in each batch would bias the estimate.
    """
    return (per_example * batch.w).sum() / batch.size


class Term(ABC):
    """A summand of the local loss. Terms add with `+` and scale with `c * term`."""

    @abstractmethod
    def __call__(self, view: View) -> Tensor:
        """The term's value for one batch, a 0-d tensor."""

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        """Parts of client state that the term needs: from the first model, then after each round.

        The term finds them in `view.context` under the same names.
        """
        return {}

    def __add__(self, other: Term) -> Term:
        return Sum((*_summands(self), *_summands(other)))

    def __rmul__(self, scale: float) -> Term:
        return Scaled(float(scale), self)


def _summands(term: Term) -> tuple[Term, ...]:
    return term.terms if isinstance(term, Sum) else (term,)


@dataclass(frozen=True)
class Sum(Term):
    """sum_k term_k."""

    terms: tuple[Term, ...]

    def __call__(self, view: View) -> Tensor:
        return torch.stack([term(view) for term in self.terms]).sum()

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        kept = (term.remember(params, buffers, data) for term in self.terms)
        return {name: part for parts in kept for name, part in parts.items()}


@dataclass(frozen=True)
class Scaled(Term):
    """scale * term."""

    scale: float
    term: Term

    def __call__(self, view: View) -> Tensor:
        return self.scale * self.term(view)

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return self.term.remember(params, buffers, data)


@dataclass(frozen=True)
class CrossEntropy(Term):
    """-(1/B) sum_b w_b log softmax(z_b)[y_b], with logits z [B, K] and labels y [B]."""

    def __call__(self, view: View) -> Tensor:
        loss = F.cross_entropy(view.out["logits"], view.batch.y, reduction="none")
        return batch_mean(loss, view.batch)


@dataclass(frozen=True)
class Proximal(Term):
    """(mu/2) ||theta - theta_t||^2 over all trainable parameters, theta_t the model received.

    Li et al. 2020 (FedProx), Equation 2. Squared norm as in the paper; several public codes use
    the norm without the square, which pulls with constant size and is undefined at theta_t.
    Buffers take no part. Raises InputError unless mu > 0: leave the term out for mu = 0, so that
    the objective is FedAvg's bit for bit.
    """

    mu: float

    def __post_init__(self) -> None:
        if not 0.0 < self.mu < float("inf"):
            raise InputError(f"Proximal mu must be a positive number, got {self.mu}")

    def __call__(self, view: View) -> Tensor:
        return self.mu / 2 * sq_norm(sub(view.params, view.context["anchor"]))
