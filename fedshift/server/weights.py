"""Weight rules: from the server's table of a cohort to weights on the simplex.

A rule reads what clients have registered, `table["n"]` [C] and, if it needs it, `table["labels"]`
[C, K], both float64; it never reads what they claim with an update. It returns weights [C] in
float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.real import number, numbers
from fedshift.server.pals import PalsWeights, pals_weights
from fedshift.server.pals_input import Fidelity, check_setting
from fedshift.server.shares import label_shares
from fedshift.sketch import sketched
from fedshift.tree import Params


class Weights(Protocol):
    """table of the cohort -> weights [C], non-negative and summing to 1."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of the table that the rule reads: "n", "labels"."""

    def __call__(self, table: Params) -> Tensor: ...


@dataclass(frozen=True)
class BySize:
    """a_i = n_i / sum_j n_j over the cohort. McMahan et al. 2017, Algorithm 1.

    >>> import torch
    >>> from fedshift.server.weights import BySize
    >>> BySize()({"n": torch.tensor([100.0, 300.0])}).tolist()
    [0.25, 0.75]
    """

    needs = ("n",)

    def __call__(self, table: Params) -> Tensor:
        total = table["n"].sum()
        if not total > 0:
            raise InputError("no client of this cohort has any example; weights are undefined")
        if not math.isfinite(total):
            raise InputError(
                "the clients' numbers of examples are no finite numbers, or sum to more than a "
                f"number can hold; the largest is {float(table['n'].max()):.4g}"
            )
        return table["n"] / total  # float64, as the table is


@dataclass(frozen=True)
class Uniform:
    """a_i = 1/C over the cohort."""

    needs = ("n",)

    def __call__(self, table: Params) -> Tensor:
        return torch.full_like(table["n"], 1.0 / len(table["n"]))


@sketched
@dataclass(frozen=True)
class Pals:
    """FedPALS: argmin over the simplex of ||T - S^T a||^2 + lam sum_i a_i^2 / n_i.

    Solved for every cohort, with a fixed `lam`, or with the smallest lam that reaches `ess` (a
    fraction of the cohort's examples). See `fedshift.pals_weights` for arguments and solver.

    strict  True raises InputError if the cap or `ess` cannot be met in a cohort. False relaxes
            them: the cap becomes at least 1/C, and `ess` the largest ESS possible under the cap

    >>> import torch
    >>> from fedshift.server.weights import Pals
    >>> labels = torch.tensor([[80.0, 20.0], [20.0, 80.0]])
    >>> weights = Pals((0.5, 0.5), lam=0)({"n": labels.sum(1), "labels": labels})
    >>> weights.numpy().round(3).tolist()
    [0.5, 0.5]
    """

    target: tuple[float, ...]
    lam: float | None = None
    ess: float | None = None
    cap: float | None = None
    fidelity: Fidelity = "squared"
    strict: bool = True
    needs = ("n", "labels")

    def __post_init__(self) -> None:
        # Check ranges before types: these messages say which values are allowed.
        check_setting(self.lam, self.ess, self.cap, self.fidelity)
        check_fields(self)
        label_shares(self.target)

    def __call__(self, table: Params) -> Tensor:
        # Copy: the array is cached and read-only, but a tensor that shares it could be written to.
        return torch.tensor(self.solved(table).weights.tolist(), dtype=torch.float64)

    def solved(self, table: Params) -> PalsWeights:
        """The weights [C] with their lambda, their ESS and whether they are proved optimal."""
        # The cache below needs arguments that can be hashed, hence bytes, floats and tuples.
        labels = np.ascontiguousarray(table["labels"].numpy(), dtype=np.float64)
        lam, ess = (None if value is None else number(value) for value in (self.lam, self.ess))
        cap = self.cap_among(int((labels.sum(1) > 0).sum()))
        rule = tuple(numbers(self.target).tolist()), lam, ess, cap, self.fidelity, self.strict
        return _solve_cached(labels.tobytes(), labels.shape, *rule)

    def cap_among(self, clients: int) -> float | None:
        """The cap in a cohort with this number of clients with examples; None without a cap."""
        if self.cap is None or self.strict:
            return None if self.cap is None else number(self.cap)
        return max(number(self.cap), 1.0 / max(clients, 1))


@lru_cache(maxsize=1)
def _solve_cached(
    labels: bytes, shape: tuple[int, ...], target: tuple[float, ...],
    lam: float | None, ess: float | None, cap: float | None, fidelity: Fidelity, strict: bool,
) -> PalsWeights:  # fmt: skip
    """Weights for a table of label counts; cached for when the same cohort comes again at once.

    The solver takes milliseconds, as long as training in a small federation.
    """
    counts = np.frombuffer(labels).reshape(shape)
    solve = partial(pals_weights, counts, target, cap=cap, fidelity=fidelity)
    if not strict and ess is not None and (largest := solve(lam=math.inf)).ess_fraction < ess:
        solved = largest
    else:
        solved = solve(lam=lam, ess=ess)
    solved.weights.setflags(write=False)  # cached: later callers get the same array
    return solved


# --------------------------------------------------------------------------- over rounds


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
