"""Importance weights of a client's examples: ratios of a common density and the client's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.arguments import check_fields
from fedshift.client.local import Local
from fedshift.client.objectives import Term, View, batch_mean
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params

# (parameters of the common density, parameters of the client's own density)
Pair = tuple[Params, Params]
# Rows that a network scores at a time.
BLOCK = 256
# Bisection steps for log c: they shrink an interval of 1e4 nats, wider than the ratios of images
# need, to below 1e-14.
HALVINGS = 60


def _check_temper(name: str, temper: float) -> None:
    if not 0.0 < temper <= 1.0:
        raise InputError(f"{name} must be above 0 and at most 1, got {temper}")


Temper = Annotated[float, _check_temper]


@dataclass(frozen=True)
class NegativeLogDensity(Term):
    """-(1/B) sum_b w_b log q(x_b), in nats; log q [B] is the model's "log_density"."""

    def __call__(self, view: View) -> Tensor:
        return batch_mean(-view.out["log_density"], view.batch)


@dataclass(frozen=True)
class PairEntropy(Term):
    """(1/B) sum_b w_b (log(1 + e^{-z_b0}) + log(1 + e^{z_b1})) / 2, with logits z [B, 2].

    The cross-entropy of telling the first of each pair of vectors (label 1) from the second (0).
    """

    def __call__(self, view: View) -> Tensor:
        first, second = view.out["logits"].unbind(1)
        return batch_mean((F.softplus(-first) + F.softplus(second)) / 2, view.batch)


class Ratio(ABC):
    """An estimate of log p(x) - log q(x) up to a constant; p is common, q the client's own."""

    def phases(self) -> Mapping[str, Local]:
        """The local phases that the estimate trains with, by name."""
        return {}

    @abstractmethod
    def __call__(
        self, density: Model, pair: Pair, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Tensor, Tensor]:
        """(log ratio [n], a loss [] to report) for the densities p and q with these parameters."""


@dataclass(frozen=True)
class Direct(Ratio):
    """temper (log p(x) - log q(x)): the difference of the two log densities, tempered.

    Reports the mean of -log q. Two networks trained on the same images give log densities that
    differ by tens of nats, so that one example would get nearly all the weight; temper < 1 spreads
    it over several. Raises InputError unless temper is in (0, 1].
    """

    temper: Temper = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self, density: Model, pair: Pair, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Tensor, Tensor]:
        p, q = (scored(density, params, data.x)["log_density"] for params in pair)
        mask = live(data).to(q.dtype)
        loss = -total(q * mask) / total(mask)
        return self.temper * (p.double() - q.double()), loss


@dataclass(frozen=True)
class Known(Ratio):
    """log p(x) - log q_i(x) as it is: a control, for clients whose densities are known.

    of_client   a tensor [n_i] for each client, by its id, in the order of its examples; None where
                they are not known, which `required` refuses

    Nothing is estimated. Reports a loss of 0.
    """

    of_client: tuple[Tensor, ...] | None = field(default=None, repr=False, compare=False)

    def required(self) -> tuple[Tensor, ...]:
        """The log ratios. Raises InputError where they are not known."""
        if self.of_client is None:
            raise InputError(
                'estimator "true" needs log p(x) - log q_i(x) of every example, and the densities '
                'of these data are not known. Take a generated set such as "binary-world", or '
                'estimator "direct"; in Python give Setting(..., log_ratios=...)'
            )
        return self.of_client

    def of(self, data: ClientData) -> Tensor:
        """A client's log ratios [n]. Raises InputError unless each example has one, finite."""
        client, n, ratios = int(data.id), int(live(data).sum()), self.required()
        shape = list(ratios[client].shape) if client < len(ratios) else [0]
        if shape != [n]:
            count = f"{shape[0]} log ratios" if len(shape) == 1 else f"log ratios of shape {shape}"
            raise InputError(
                f"client {client} has {n} examples and {count}; give log_ratios one for "
                "each example of each client"
            )
        if not bool(torch.isfinite(ratios[client]).all()):
            raise InputError(
                f"client {client}: log_ratios has NaN or infinity; give finite log p(x) - log q(x)"
            )
        return ratios[client]

    def __call__(
        self, density: Model, pair: Pair, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Tensor, Tensor]:
        ratios = self.of(data).to(data.w.device, torch.float64)
        return F.pad(ratios, (0, len(data.x) - len(ratios))), torch.zeros_like(data.w[0])


@dataclass(frozen=True)
class Equal(Ratio):
    """0 for every example, so that all weigh 1.

    A control: the same rounds of density training, cohorts and batches as for the other estimates,
    but the inner method then trains without importance weights.
    """

    def __call__(
        self, density: Model, pair: Pair, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(data.w, dtype=torch.float64), torch.zeros_like(data.w[0])


@dataclass(frozen=True)
class Classified(Ratio):
    """temper log(h / (1 - h)) at s_q(x), h(s) the probability that s comes from p's network.

    s_p(x), s_q(x) [D] are the two densities' conditional probabilities sigmoid(z) for the same x;
    h is `net`, trained to tell s_p (label 1) from s_q (label 0) over the client's examples. Nguyen,
    Wu and Chang 2024 (FedDisk), arXiv 2401.02586, and its authors' code, which also takes h at
    s_q(x). Both classes have the same size, so no correction for it is needed. This is a heuristic:
    h compares two networks at the same points, not samples of p and q.

    Two copies of h are trained, one on the even rows and one on the odd, and each scores the rows
    that it was not trained on: a network that has seen a row tells its two vectors apart too well.
    (The authors score the training rows, and stop early; here all epochs are run.) Reports the mean
    training loss of the copies.

    Raises InputError unless temper is in (0, 1].
    """

    net: Model
    local: Local = Local(lr=1e-3, epochs=10, batch=100, optimizer="adam")
    temper: Temper = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def phases(self) -> Mapping[str, Local]:
        return {"ratio0": self.local}

    def __call__(
        self, density: Model, pair: Pair, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Tensor, Tensor]:
        answers = [scored(density, params, data.x)["logits"].sigmoid() for params in pair]
        odd = torch.arange(len(data.x), device=data.w.device) % 2 == 1
        halves = [
            self._train_net(torch.stack(answers, 1), rows, data, plans) for rows in (~odd, odd)
        ]
        of_even, of_odd = (scored(self.net, h, answers[1])["logits"] for h, _ in halves)
        loss = torch.stack([loss for _, loss in halves]).mean()
        return self.temper * torch.where(odd, of_even, of_odd).double(), loss

    def _train_net(
        self, pairs: Tensor, rows: Tensor, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Params, Tensor]:
        """(h, its mean loss) after training on the rows [n] marked True; pairs [n, 2, D]."""
        # Both halves start from the same weights, so that their answers can be compared.
        start = {k: v.to(pairs) for k, v in self.net.init()[0].items()}
        # Double weights, because only half of the rows count: the loss of a batch then has the
        # same size, on average, as over all rows.
        only = data._replace(x=pairs, w=2.0 * live(data).to(data.w.dtype) * rows)
        done = self.local(self.net, PairEntropy(), start, {}, {}, only, plans["ratio0"])
        return done.params, done.loss


def bounded(log_ratio: Tensor, mask: Tensor, low: Tensor, high: float) -> Tensor:
    """a [n] = clip(c r, low, high) with the c that makes their mean 1; 0 outside the mask. float64.

    r = e^log_ratio, log_ratio [n]; mask [n] bool, one at least; 0 < low [] <= 1 <= high. The mean
    is continuous in c and grows from low to high, so there is such a c, and a constant in log_ratio
    cancels. Equal ratios give exactly 1, and so does low = 1.

    Why these bounds: p = sum_j (n_j / N) q_j gives p / q_i >= n_i / N, and p / q_i has mean 1 under
    q_i. Our choice is one c that meets both: ratios that are clipped first and then divided by
    their mean can leave the bounds.
    """
    # float64 from the start: 1.1 rounded to float32 is above 1.1, and would exceed the bound.
    least, most = low.double(), torch.tensor(high, dtype=torch.float64, device=low.device)
    floor, ceiling = least.log(), most.log()
    top = log_ratio.double().masked_fill(~mask, -torch.inf).max()
    # In logarithms throughout: ratios of images exceed the largest float. Padding counts as 0.
    d = torch.where(mask, log_ratio.double() - top, 0.0)
    # log c is between: with `left` all entries are clipped to low, with `right` all to high.
    left, right, many = floor, ceiling - d.min(), total(mask.double())
    # Always the same number of steps: a test for stopping early would depend on values, and so on
    # the padding.
    for _ in range(HALVINGS):
        middle = (left + right) / 2
        small = total((d + middle).clamp(floor, ceiling).exp() * mask) <= many
        left, right = torch.where(small, middle, left), torch.where(small, right, middle)
    # Bisection is needed only to learn which entries are at a bound. For the others c has a closed
    # form, which has no bisection error.
    lowest, highest = mask & (d + left <= floor), mask & (d + left >= ceiling)
    free = mask & ~lowest & ~highest
    # Mask before exp, which may overflow for entries at the ceiling.
    r = (d - d.masked_fill(~free, -torch.inf).max()).masked_fill(~free, -torch.inf).exp()
    rest = many - least * lowest.sum() - most * highest.sum()
    # Clamp to the bounds themselves: exp(log(bound)) may differ from them in the last bit.
    inner = (rest * r / total(r)).clamp(least, most)
    bound = torch.where(highest, most, least)
    # low = 1 allows only ones (a client with all examples), where the above divides 0 by 0.
    return torch.where(floor < 0.0, torch.where(free, inner, bound), torch.ones_like(d)) * mask


def total(v: Tensor) -> Tensor:
    """The sum of v [n], n > 0, in row order, so that trailing zeros (padding) change no bit of it.

    torch's `sum` adds in an order that depends on n.
    """
    return v.cumsum(0)[-1]


def effective_size(weights: Tensor) -> Tensor:
    """ESS = (sum_j a_j)^2 / sum_j a_j^2 [] of weights [n] that are not all 0, in examples."""
    return total(weights.double()).square() / total(weights.double().square())


def live(data: ClientData) -> Tensor:
    """Which rows are examples and not padding, [n] bool."""
    return data.w != 0


def filled(data: ClientData) -> ClientData:
    """The client, padded to a multiple of `BLOCK` rows.

    The length of an array can change the last bit of what a kernel computes for an entry, and an
    example's weight must not depend on how much padding follows it.
    """
    short = -len(data.x) % BLOCK  # rows missing to the next multiple
    x, y, w = (torch.cat([v, v.new_zeros(short, *v.shape[1:])]) for v in data[:3])
    return ClientData(x, y, w, data.id)


def two_values(clients: Sequence[ClientData]) -> tuple[float, float] | None:
    """(low, high) if every input of every client is one of these two values; else None."""
    inputs = [c.x for c in clients if c.x.numel()]
    if not inputs or not all(x.is_floating_point() for x in inputs):
        return None
    low, high = (min(float(x.min()) for x in inputs), max(float(x.max()) for x in inputs))
    binary = low < high and all(bool(((x == low) | (x == high)).all()) for x in inputs)
    return (low, high) if binary else None


def scored(model: Model, params: Params, x: Tensor) -> Params:
    """The model's outputs for all rows of x [n, ...], without gradient, `BLOCK` rows at a time."""
    with torch.no_grad():
        parts = [model(params, {}, block) for block in torch.split(x, BLOCK)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
