"""Local objectives: terms that add up to the loss of one batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.arguments import Positive, called, check_fields, check_kind, check_number
from fedshift.data import Batch, ClientData, label_counts
from fedshift.errors import InputError, check_name
from fedshift.model import Model
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts, split, sq_norm, sub


@sketched
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

    Divides by the number of rows, not by sum_b w_b: importance weights have mean 1 over a client,
    and dividing by their sum in each batch would bias the estimate.
    """
    if _plain(per_example, batch):
        return per_example.mean()  # the same bits with one operation instead of three
    return (per_example * batch.w).sum() / batch.size


def _plain(per_example: Tensor, batch: Batch) -> bool:
    """Whether `batch_mean` is a plain mean: all importances are 1, and no type is promoted."""
    return batch.even and per_example.dtype == batch.w.dtype


def adjusted_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """-(1/B) sum_b w_b log softmax(z_b)[y_b] [] of logits z [B, K], for terms that change them."""
    return batch_mean(F.cross_entropy(logits, batch.y, reduction="none"), batch)


def check_value(value: object, term: object) -> None:
    """Raise InputError unless the value of a term or an objective is a tensor of one number."""
    if not isinstance(value, Tensor) or value.ndim:
        given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else called(value)
        raise InputError(
            f"{called(term)} gave {given} for a batch; a term gives one number, a 0-d tensor: "
            "batch_mean(losses, view.batch) of losses [B]"
        )


class Term(ABC):
    """A summand of the local loss. Terms add with `+` and scale with `c * term`."""

    @abstractmethod
    def __call__(self, view: View) -> Tensor:
        """The term's value for one batch, a 0-d tensor."""

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        """Parts of client state that the term needs, from the first model, then after each round.

        The term reads them in `view.context` under the same names.
        """
        return {}

    def hear(self, server: Parts) -> Parts:
        """Parts of the server's state that the term needs on the client, this round.

        `server` is that state, with the part "cohort" (id [C], weight [C]) added. The term reads
        what this returns in `view.context` under the same names.
        """
        return {}

    def summands(self) -> tuple[Term, ...]:
        """The terms that this one adds up, without their factors; (self,) if it is not a sum."""
        return (self,)

    def trains_router(self) -> bool:
        """True if it learns which client an example comes from, as `ClientEntropy` does.

        A sum does if any of its terms does.
        """
        return any(term.trains_router() for term in self.summands() if term is not self)

    def reads_features(self) -> bool:
        """True if it reads the network's "features", as `Contrastive` does, or a summand does."""
        return any(term.reads_features() for term in self.summands() if term is not self)

    def reads_classes(self) -> bool:
        """True if it, or a summand, works only where labels are classes.

        False for `CrossEntropy`, because a task without classes puts its own loss in its place.
        """
        return any(term.reads_classes() for term in self.summands() if term is not self)

    def reads_data(self) -> bool:
        """Whether the value depends on the client's examples; if not, it cannot train alone."""
        return True

    def __add__(self, other: Term) -> Term:
        check_kind("what is added to a Term", other, Term, "give one, such as Proximal(0.1)")
        # Flatten nested sums, so that equal objectives compare equal: (a + b) + c == a + (b + c).
        return Sum((*_summands(self), *_summands(other)))

    def __rmul__(self, scale: float) -> Term:
        check_number("the factor of a Term", scale)
        if not math.isfinite(scale):
            raise InputError(f"the factor of a Term must be finite, got {scale}")
        return Scaled(self, float(scale))

    __mul__ = __rmul__


def _summands(term: Term) -> tuple[Term, ...]:
    return term.terms if isinstance(term, Sum) else (term,)


class Checked(Term):
    """A term that is a dataclass: its fields must fit their annotations, else InputError."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Sum(Checked):
    """sum_k term_k."""

    terms: tuple[Term, ...]

    def __call__(self, view: View) -> Tensor:
        values = [term(view) for term in self.terms]
        for term, value in zip(self.terms, values, strict=True):
            check_value(value, term)
        return torch.stack(values).sum()

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        memories = (term.remember(params, buffers, data) for term in self.terms)
        return {name: part for parts in memories for name, part in parts.items()}

    def hear(self, server: Parts) -> Parts:
        heard = (term.hear(server) for term in self.terms)
        return {name: part for parts in heard for name, part in parts.items()}

    def summands(self) -> tuple[Term, ...]:
        return tuple(one for term in self.terms for one in term.summands())

    def reads_data(self) -> bool:
        return any(term.reads_data() for term in self.terms)


@dataclass(frozen=True)
class Around(Checked):
    """A term around another one, which needs what that one needs."""

    term: Term

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return self.term.remember(params, buffers, data)

    def hear(self, server: Parts) -> Parts:
        return self.term.hear(server)

    def summands(self) -> tuple[Term, ...]:
        return self.term.summands()

    def reads_data(self) -> bool:
        return self.term.reads_data()


@dataclass(frozen=True)
class Scaled(Around):
    """scale * term."""

    scale: float = 1.0

    def __call__(self, view: View) -> Tensor:
        return self.scale * self.term(view)

    def summands(self) -> tuple[Term, ...]:
        # Factor 0 removes the term from the loss, so what it would need does not count.
        return super().summands() if self.scale else ()

    def reads_data(self) -> bool:
        return bool(self.scale) and super().reads_data()


@dataclass(frozen=True)
class CrossEntropy(Term):
    """-(1/B) sum_b w_b log softmax(z_b)[y_b], with logits z [B, K] and labels y [B]."""

    def __call__(self, view: View) -> Tensor:
        logits = view.out["logits"]
        if _plain(logits, view.batch):  # the gradient has the same bits with half the operations
            return F.cross_entropy(logits, view.batch.y)
        return adjusted_entropy(logits, view.batch)


@dataclass(frozen=True)
class Proximal(Checked):
    """(mu/2) ||theta - theta_t||^2 over all trainable parameters, theta_t the model received.

    Li et al. 2020 (FedProx), Equation 2. The norm is squared, as in the paper; in several public
    codes it is not, so that the pull has constant size and is undefined at theta_t. Buffers are
    left out. Raises InputError unless mu > 0: leave the term out for mu = 0, so that the objective
    is FedAvg's bit for bit.

    free   name prefixes of parameters that are left out of the norm
    """

    mu: Positive
    free: tuple[str, ...] = ()

    def reads_data(self) -> bool:
        return False

    def __call__(self, view: View) -> Tensor:
        params = split(view.params, self.free)[1] if self.free else view.params
        return self.mu / 2 * sq_norm(sub(params, {k: view.context["anchor"][k] for k in params}))


Restriction = Literal["indicator", "frequency"]


@dataclass(frozen=True)
class RestrictedSoftmax(Checked):
    """-(1/B) sum_b w_b log softmax(a * z_b)[y_b], with a [K] from the labels that a client has.

        "indicator"   a_c = 1 where the client has examples of c, else alpha
        "frequency"   a_c = (1 - alpha) p_c / max p + alpha, p the client's label frequencies

    Li and Zhan 2021, "FedRS: federated learning with restricted softmax for label distribution
    non-IID data", KDD. The paper has the first mode, the authors' code (FedRepo) the second. That
    code overwrites a at every step, so that 1 - a shrinks by 1 - alpha per step; here a stays the
    same. The whole logit is scaled, bias included; the authors' classifier has no bias. The logit
    of a missing label becomes alpha z_c, not minus infinity. Replaces `CrossEntropy`, in training
    only.

    classes is K. Raises InputError unless 0 <= alpha < 1: for alpha = 1 use `CrossEntropy`.
    """

    classes: int
    alpha: float = 0.5
    mode: Restriction = "indicator"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.alpha < 1.0:
            raise InputError(
                f"RestrictedSoftmax alpha must be in [0, 1), got {self.alpha}; "
                "alpha = 1 is CrossEntropy"
            )
        check_name("mode of RestrictedSoftmax", self.mode, ("indicator", "frequency"))

    def scale(self, counts: Tensor) -> Tensor:
        """a [K] for a client with these label counts [K]."""
        # `where`, not indexing: within vmap the number of labels differs between clients.
        if self.mode == "indicator":
            # A tensor of ones: of two plain numbers `where` would round alpha to torch's default.
            return torch.where(counts > 0, torch.ones_like(counts), self.alpha)
        return (1.0 - self.alpha) * counts / counts.max().clamp(min=1.0) + self.alpha

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {"softmax": {"scale": self.scale(label_counts(data, self.classes))}}

    def __call__(self, view: View) -> Tensor:
        logits = view.out["logits"]
        scaled = logits * view.context["softmax"]["scale"].to(logits.dtype)
        return adjusted_entropy(scaled, view.batch)


@dataclass(frozen=True)
class Contrastive(Checked):
    """(mu/B) sum_b w_b l_b,  l = -log(e^{s(z, z_g)/tau} / (e^{s(z, z_g)/tau} + e^{s(z, z_p)/tau})).

    s is the cosine; z, z_g, z_p [B, d] are the "features" of the model in training, of the model
    received and of the client's model after its last round. Li, He and Song 2021,
    "Model-contrastive federated learning" (MOON), arXiv 2103.16257, Section 3.3. There z is the
    output of a projection head: a model that has one should return it as "features".

    z_g and z_p are computed in evaluation mode, with their own buffers, without gradient. Before a
    client's first round its previous model is the initial one; so in round 1 z_g = z_p, and the
    term is mu log 2 with gradient exactly 0. In the authors' code the term is 0 in round 1, and
    the previous model of a client that is drawn later for the first time is a random network.
    Each client stores one more model (and buffers); its messages do not grow.

    Raises InputError unless mu > 0 and tau > 0 (leave the term out for mu = 0), and for a model
    without "features".
    """

    mu: Positive = 1.0
    tau: Positive = 0.5

    def reads_features(self) -> bool:
        return True

    def remember(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        return {"previous": params, "previous_buffers": buffers}

    def __call__(self, view: View) -> Tensor:
        # One product gives the difference of both cosines: s(z, z_g) - s(z, z_p) = u . (u_g - u_p)
        # for vectors u of unit length.
        pull = _direction(view, "anchor") - _direction(view, "previous")
        # log(1 + e^-x), x the difference of the cosines, does not overflow, and is exactly log 2
        # where z_g equals z_p.
        closer = (_unit(view.out) * pull).sum(1) / self.tau
        return self.mu * batch_mean(F.softplus(-closer), view.batch)


def _direction(view: View, which: str) -> Tensor:
    """z / ||z|| [B, d] of another model on the same batch."""
    params, buffers = view.context[which], view.context[f"{which}_buffers"]
    with torch.no_grad():
        return _unit(view.model(params, buffers, view.batch.x))


def _unit(out: Params) -> Tensor:
    if "features" not in out:
        raise InputError(
            f'Contrastive compares "features", and this model returns {sorted(out)}; '
            'let its forward return {"features": z, "logits": ...}'
        )
    # eps: a zero vector (all units off) stays 0 instead of becoming 0 / 0.
    return F.normalize(out["features"].flatten(1), dim=1, eps=1e-8)
