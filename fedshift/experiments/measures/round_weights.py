"""The weights of a run's rounds: the ESS and gap of each round, and means over all rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedshift.algorithms.method import Method, rows
from fedshift.engine.preflight.method import pals_of
from fedshift.engine.round import Round
from fedshift.server.label_weights import mass_ess
from fedshift.server.pals import effective_sample_size
from fedshift.tree import Params, Parts

Floats = NDArray[np.float64]


class Reach(NamedTuple):
    """The ESS of weights a over a cohort of N examples, and the gap to the target that they leave.

    ess = 1 / sum_i (a_i^2 / n_i) in examples, and ess_fraction = ess / N. gap = ||T - S^T a||_2 and
    l1 = ||T - S^T a||_1, with the cohort's label marginals S. If a method weighs examples by their
    labels, S^T a and the ESS are computed with these weights (`masses`).
    """

    ess: float
    ess_fraction: float
    gap: float
    l1: float


def registered(current: Round, table: Params) -> Params:
    """Sizes n [M] and label counts [M, K] as the clients registered them in this run.

    They differ from the `table` of the dealt data if the method lets clients draw other examples,
    or if clients of a federation bring other data. What clients did not register is taken from the
    table: usually the labels, which most methods do not ask for (`sizes_alone`).
    """
    return {**table, **{k: v for k, v in current.server.get("table", {}).items() if k in table}}


def sizes_alone(current: Round, table: Params) -> bool:
    """Whether clients registered sizes that differ from the `table`'s, and no labels."""
    sent = current.server.get("table", {})
    return "n" in sent and "labels" not in sent and not sent["n"].equal(table["n"])


def ess_of(weights: Floats, sizes: Floats) -> float:
    """`effective_sample_size`; NaN where it is undefined, which is no reason for a run to fail.

    It is undefined if no client has an example, or if a client without examples has a weight, as
    in a plain mean over clients.
    """
    used = weights > 0
    if not used.any() or (sizes[used] <= 0).any():
        return math.nan
    return effective_sample_size(weights, sizes)


def masses(
    algorithm: Method, server: Parts, ids: Tensor, weights: Tensor, labels: Tensor
) -> Tensor | None:
    """A_iy = a_i S_iy w_iy [C, K], divided by their sum: what each label of each client counts.

    w_iy is the weight of an example of label y at client i, labels [C, K] are the clients' counts.
    None for a method that does not weigh examples by labels, or if no example counts.
    """
    w = algorithm.label_weights(server, ids, weights)
    if w is None:
        return None
    A = weights[:, None] * labels / labels.sum(1, keepdim=True).clamp(min=1.0) * w
    return A / A.sum() if bool(A.any()) else None


def weighs_labels(algorithm: Method, current: Round) -> bool:
    """Whether the round's clients weigh their examples by labels."""
    ids, weights = current.cohort, current.weights
    return algorithm.label_weights(current.server, ids, weights) is not None


def reach(current: Round, table: Params, target: Tensor, algorithm: Method) -> Reach:
    """ESS and gap of the round's weights over its own cohort; T [K], table as in `registered`."""
    if not current.weights.any():
        return Reach(math.nan, math.nan, math.nan, math.nan)
    registers = registered(current, table)
    n, labels = (registers[name][current.cohort] for name in ("n", "labels"))
    weighed = masses(algorithm, current.server, current.cohort, current.weights, labels)
    if weighed is None:
        # clamp: a client without examples gets shares of zero, instead of 0/0.
        mixed = current.weights @ (labels / labels.sum(1, keepdim=True).clamp(min=1.0))
        ess = ess_of(current.weights.numpy(), n.numpy())
    else:
        mixed, ess = weighed.sum(0), mass_ess(weighed, labels)
    residual = target - mixed
    total = float(n.sum())
    fraction = ess / total if total > 0 else math.nan
    return Reach(ess, fraction, float(residual.norm()), float(residual.abs().sum()))


@dataclass(frozen=True, eq=False)
class WeightSums:
    """Sums over the rounds' weights, for runs whose rounds do not all have the same clients.

    Skipped rounds do not count.

    shares     [M] sums of a_i; a round in which a client is missing adds 0
    reached    sums of each measure over the rounds in which it is defined
    defined    how many these are, by measure: weights on a client without examples have no ESS
    lams       the least and the largest lambda, for a method with FedPALS' programme
    certified  in how many rounds its weights are certified
    unneeded   in how many rounds its option `ess` has no effect
    """

    rounds: int = 0
    shares: Floats = field(default_factory=lambda: np.zeros(0))
    reached: Reach = Reach(0.0, 0.0, 0.0, 0.0)
    defined: tuple[int, ...] = (0, 0, 0, 0)
    lams: tuple[float, float] | None = None
    certified: int = 0
    unneeded: int = 0

    def after(self, current: Round, algorithm: Method, table: Params, target: Tensor) -> WeightSums:
        """These sums with one more round added; a skipped round changes nothing."""
        if current.skipped:
            return self
        # A copy, because the sums before this round must not change.
        shares = self.shares.copy() if self.rounds else np.zeros(len(table["n"]))
        shares[current.cohort.numpy()] += current.weights.numpy()
        here = reach(current, table, target, algorithm)
        # Each measure is counted on its own: a round without an ESS still has a gap.
        defined = [not math.isnan(v) for v in here]
        sums = (a + b if d else a for a, b, d in zip(self.reached, here, defined, strict=True))
        summed = replace(
            self,
            rounds=self.rounds + 1,
            shares=shares,
            reached=Reach(*sums),
            defined=tuple(n + d for n, d in zip(self.defined, defined, strict=True)),
        )
        rule = pals_of(algorithm)
        if rule is None:
            return summed
        solved = rule.solved(rows(current.server, current.cohort))
        low, high = self.lams or (solved.lam, solved.lam)
        return replace(
            summed,
            lams=(min(low, solved.lam), max(high, solved.lam)),
            certified=self.certified + solved.certified,
            unneeded=self.unneeded + bool(solved.note),
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """[M]: every client's mean weight."""
        return tuple((self.shares / self.rounds).tolist())

    @property
    def mean(self) -> Reach:
        """The mean of each measure over the rounds in which it is defined; NaN if in none."""
        pairs = zip(self.reached, self.defined, strict=True)
        return Reach(*(v / n if n else math.nan for v, n in pairs))

    @property
    def with_ess(self) -> int:
        """In how many rounds the ESS is defined."""
        return self.defined[0]

    @property
    def lam(self) -> float | None:
        """The lambda of all rounds; None if rounds differ in it, as with `ess`, or have none."""
        return self.lams[0] if self.lams and self.lams[0] == self.lams[1] else None

    def facts(self) -> dict[str, Any]:
        """All fields as values that JSON can hold, with the same numbers to the last bit.

        Numbers that may be NaN or infinite are written as text, since JSON has no such numbers.
        """
        return {
            "rounds": self.rounds,
            "shares": self.shares.tolist(),
            "reached": [str(v) for v in self.reached],
            "known": list(self.defined),
            "lams": None if self.lams is None else [str(lam) for lam in self.lams],
            "certified": self.certified,
            "unneeded": self.unneeded,
        }


def weight_sums_of(facts: Mapping[str, Any]) -> WeightSums:
    """The inverse of `WeightSums.facts`."""
    low_and_high = facts["lams"]
    return WeightSums(
        facts["rounds"],
        np.array(facts["shares"], dtype=np.float64),
        Reach(*(float(v) for v in facts["reached"])),
        tuple(facts.get("known", [facts["rounds"]] * len(facts["reached"]))),
        None if low_and_high is None else (float(low_and_high[0]), float(low_and_high[1])),
        facts["certified"],
        facts["unneeded"],
    )


def describe_weights(
    current: Round, table: Params, target: Tensor, algorithm: Method
) -> dict[str, Any]:
    """The part of a round's event on its weights; {} if all clients took part.

    It says which clients dropped out and why, and how far from the target the mixture of the others
    is. For a skipped round: the reason, and the gap of the clients that would have taken part.
    """
    lost = bool(current.dropped or current.skipped)
    if not lost and len(current.cohort) == len(table["n"]):
        return {}
    if not current.weights.any():  # no client has an example, so there is no mixture
        return {"dropped": [one._asdict() for one in current.dropped], "skipped": current.skipped}
    of = reach(current, table, target, algorithm)
    facts: dict[str, Any] = {"gap": of.gap}
    if lost:
        facts = {"dropped": [one._asdict() for one in current.dropped], "gap": of.gap}
    if current.skipped:
        return facts | {"skipped": current.skipped}
    weights = {"cohort": current.cohort.tolist(), "weights": current.weights.tolist()}
    return facts | weights | {"ess": of.ess, "ess_fraction": of.ess_fraction}
