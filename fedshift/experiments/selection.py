"""Choosing FedPALS' effective sample size by training one model per candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from numpy.typing import ArrayLike

from fedshift.data import Task
from fedshift.errors import InputError
from fedshift.experiments.config.schema import Selection
from fedshift.experiments.folder.outcome import Candidate, Choice, Outcome
from fedshift.experiments.measures.correcting import Corrected, Prior
from fedshift.server.pals import PalsWeights, pals_weights
from fedshift.server.pals_input import Fidelity


def candidates(
    label_counts: ArrayLike,
    target: ArrayLike,
    grid: Sequence[float],
    *,
    cap: float | None = None,
    fidelity: Fidelity = "squared",
) -> list[tuple[str, float, PalsWeights]]:
    """(label, ESS fraction, weights) of each candidate of the grid.

    All fractions that the weights of lambda = 0 already exceed are one candidate, since they give
    the same weights. Fractions that no weights under the cap can reach are left out.
    """
    results: list[tuple[str, float, PalsWeights]] = []
    # A cap can put large fractions out of reach; without one the largest possible is 1.
    largest = pals_weights(label_counts, target, lam=math.inf, cap=cap).ess_fraction
    for fraction in sorted(f for f in set(grid) if f <= largest + 1e-9):
        lam, ess = (0.0, None) if fraction == 0 else (None, fraction)
        solved = pals_weights(label_counts, target, lam=lam, ess=ess, cap=cap, fidelity=fidelity)
        label = "lambda=0" if fraction == 0 else f"ess={100 * fraction:g}%"
        # Fractions below that of lambda = 0 all give lambda = 0: one model is enough.
        if not any(solved.lam == other.lam for _, _, other in results):
            results.append((label, fraction, solved))
    if not results:
        raise InputError(
            f"no fraction of selection.grid can be reached: under this cap the largest ESS is "
            f"{largest:.3g}; add a smaller one, or 0 for lambda = 0"
        )
    return results


def choose(
    task: Task,
    selection: Selection,
    grid: Sequence[tuple[str, float, PalsWeights]],
    train_one: Callable[[str, float], Outcome],
    prior: Prior = "none",
) -> Choice:
    """Train every candidate, and note which one each selection rule picks after the last round.

    prior: unless "none", the corrected models are compared. Ties go to the larger ESS. Raises
    InputError if the configured rule needs examples that do not exist.
    """
    if selection.rule == "validation" and task.target_validation is None:
        raise InputError(
            'selection.rule = "validation" needs examples that follow the target, and there are '
            'none here; use "estimate", or keep some with shift.target = "drawn" or '
            "server.validation"
        )
    if selection.rule == "estimate" and not _can_estimate(task):
        raise InputError(
            'selection.rule = "estimate" needs validation examples of the target\'s labels, and no '
            "client holds any out; raise data.validation, or give method.ess a number"
        )
    done = tuple(Candidate(label, f, solved, train_one(label, f)) for label, f, solved in grid)
    scores = _corrected_scores() if prior != "none" else _scores()
    if task.kind == "regression":
        # Tasks of numbers have no validation examples that follow the target.
        scores["estimate"] = lambda c: c.outcome.final.merit
        scores["source"] = lambda c: -c.outcome.final.others["source_loss"]
        scores["oracle"] = lambda c: -c.outcome.final.target_loss
    picks = {}
    for rule, value in scores.items():
        # A rule whose examples are missing picks no candidate.
        measured = [c for c in done if not math.isnan(value(c))]
        if measured:
            # Rounded: sums of the same counts in another order are a tie.
            picks[rule] = max(measured, key=lambda c: (round(value(c), 12), c.ess)).label
    return Choice(selection.rule, done, picks, prior)


def _scores() -> dict[str, Callable[[Candidate], float]]:
    return {
        "estimate": lambda c: c.outcome.final.estimated_accuracy,
        "validation": lambda c: c.outcome.final.validation_accuracy,
        "source": lambda c: c.outcome.final.source_accuracy,
        "oracle": lambda c: c.outcome.final.target_accuracy,
    }


def _corrected_scores() -> dict[str, Callable[[Candidate], float]]:
    """`_scores` of the corrected models.

    "source" stays that of the uncorrected one: it is measured on the clients' own mix of labels,
    for which no prior has to be moved.
    """

    def of(c: Candidate) -> Corrected:
        assert c.outcome.corrected is not None  # `check_prior` has refused tasks without one
        return c.outcome.corrected

    return _scores() | {
        "estimate": lambda c: math.nan if (e := of(c).estimate) is None else e.accuracy,
        "validation": lambda c: of(c).validation_accuracy,
        "oracle": lambda c: of(c).test.accuracy,
    }


def _can_estimate(task: Task) -> bool:
    """Whether any client has a validation example with a label that the target has."""
    wanted = torch.nonzero(task.target).flatten()
    return any(bool(torch.isin(examples.y, wanted).any()) for examples in task.validation)
