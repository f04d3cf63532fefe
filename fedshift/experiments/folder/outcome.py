"""The result of an experiment: a trained model with its measurements, or one per candidate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedshift.algorithms.method import Method
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Traffic
from fedshift.estimate import AccuracyEstimate
from fedshift.evaluation.scores import Scored
from fedshift.experiments.config.schema import Config
from fedshift.experiments.folder.progress import Missed
from fedshift.experiments.measures.correcting import Corrected, Prior
from fedshift.experiments.measures.round_weights import WeightSums
from fedshift.experiments.measures.served import LastRound
from fedshift.experiments.task.preparing import Prepared
from fedshift.record import summary as record
from fedshift.record.rounds import Metrics, ServedMetrics
from fedshift.record.summary import Selection, SetRound
from fedshift.server.pals import PalsWeights
from fedshift.tree import Params


@dataclass(frozen=True, eq=False)
class Outcome:
    """A trained model and all that was measured on the way.

    weights      [M] over all clients; if some rounds were without some clients, the means over
                 the rounds
    sets         per evaluated round, for a method with label sets
    traffic      of the last round
    missed       counts of answers that did not come, or could not be used
    weight_sums  sums over the rounds' weights; None if all clients were in every round
    tests        scores on each client's own test set, if it is not classes that are predicted
    silent       clients that were asked to score this model, and sent no score
    corrected    the model with its prior moved to the target; None where no single model is used
    sizes_alone  True if clients registered other sizes than they were dealt, and no label counts
    """

    label: str
    params: Params
    buffers: Params
    weights: tuple[float, ...]
    metrics: tuple[Metrics, ...]
    test: Scored
    clients: tuple[Scored, ...]
    estimate: AccuracyEstimate
    federation: Federation
    last: Round
    served: tuple[ServedMetrics, ...] = ()
    at_end: LastRound | None = None
    sets: tuple[SetRound, ...] = ()
    traffic: Traffic = Traffic()
    missed: Missed = Missed()
    weight_sums: WeightSums | None = None
    tests: tuple[Scored, ...] = ()
    silent: tuple[int, ...] = ()
    sizes_alone: bool = False
    corrected: Corrected | None = None

    @property
    def final(self) -> Metrics:
        """The metrics of the round whose model is kept (`training.keep`)."""
        return next(m for m in reversed(self.metrics) if m.round == self.last.t)

    @property
    def best(self) -> Metrics | None:
        """The evaluated round of lowest validation loss (the first of equals): early stopping.

        The FedPALS paper keeps this model; None without validation examples that follow T.
        """
        return best_of(self.metrics)


def best_of(metrics: Iterable[Metrics]) -> Metrics | None:
    """The round of lowest validation loss, the first of equals; None where none has one."""
    # NaN compares as neither smaller nor larger, so min() would depend on the order.
    measured = [m for m in metrics if not math.isnan(m.validation_loss)]
    return min(measured, key=lambda m: m.validation_loss, default=None)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One ESS fraction of the grid (0 stands for lambda = 0) and the model trained with it.

    solved: the weights over all clients, from which a round with fewer clients departs.
    """

    label: str
    fraction: float
    solved: PalsWeights
    outcome: Outcome

    @property
    def ess(self) -> float:
        """The ESS in examples: a mean over the rounds if these had fewer than all clients."""
        sums = self.outcome.weight_sums
        return self.solved.ess if sums is None else sums.mean.ess

    @property
    def ess_fraction(self) -> float:
        """The ESS as a share of all examples, or of the examples of a round's cohort."""
        sums = self.outcome.weight_sums
        return self.solved.ess_fraction if sums is None else sums.mean.ess_fraction

    def estimates(self, prior: Prior) -> dict[str, float]:
        """The numbers that the rules compare: the corrected model's unless prior is "none"."""
        final, moved = self.outcome.final, self.outcome.corrected
        if prior == "none" or moved is None or moved.estimate is None:
            estimate, error = final.estimated_accuracy, final.estimated_se
        else:
            estimate, error = moved.estimate.accuracy, moved.estimate.standard_error
        checked = final.validation_accuracy
        if prior != "none" and moved is not None:
            checked = moved.validation_accuracy
        return {
            "estimated_accuracy": estimate, "estimated_se": error, "validation_accuracy": checked,
        }  # fmt: skip

    def corrected_accuracy(self, prior: Prior) -> float | None:
        """Accuracy of the corrected model on the test examples; None if prior is "none"."""
        moved = self.outcome.corrected
        return None if prior == "none" or moved is None else moved.test.accuracy


@dataclass(frozen=True, eq=False)
class Choice:
    """The candidates, and the label that each selector picks.

    "estimate"    target accuracy estimated from clients' validation counts; needs T only
    "validation"  accuracy on validation examples that follow T, where there are any
    "source"      accuracy on the clients' own pooled validation examples
    "oracle"      accuracy on the target's test set: cheating, for comparison only

    Unless prior is "none", all but "source" are accuracies of the corrected models.
    """

    rule: str
    candidates: tuple[Candidate, ...]
    picks: dict[str, str]
    prior: Prior = "none"

    @property
    def chosen(self) -> Candidate:
        """The candidate that the configured rule picks."""
        return next(c for c in self.candidates if c.label == self.picks[self.rule])

    def described(self) -> Selection:
        """The candidates and picks, for the run folder."""
        rows = tuple(
            record.Candidate(
                label=c.label,
                ess_fraction=c.ess_fraction,
                **c.estimates(self.prior),
                source_accuracy=c.outcome.final.source_accuracy,
                target_accuracy=c.outcome.final.target_accuracy,
                target_accuracy_corrected=c.corrected_accuracy(self.prior),
                losses=_losses(c.outcome.final),
            )
            for c in self.candidates
        )
        return Selection(
            rule=self.rule, chosen=self.chosen.label, picks=self.picks, candidates=rows
        )


def _losses(final: Metrics) -> dict[str, float]:
    """The losses that rules compare in regression; empty where there are accuracies."""
    if "estimated_loss" not in final.others:
        return {}
    names = ("estimated_loss", "estimated_loss_se", "source_loss")
    return {**{k: final.others[k] for k in names}, "target_loss": final.target_loss}


@dataclass(frozen=True, eq=False)
class Experiment:
    """A run's configuration, the task that it ran on, and its result."""

    config: Config
    prepared: Prepared
    algorithm: Method
    outcome: Outcome
    choice: Choice | None
