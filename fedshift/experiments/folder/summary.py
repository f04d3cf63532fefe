"""From a finished experiment to its summary.json."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.engine.preflight.method import pals_of
from fedshift.evaluation.scores import Scored
from fedshift.experiments.config.custom import recipe_of
from fedshift.experiments.folder.outcome import Experiment, Outcome
from fedshift.experiments.folder.why import explain, missing_answers
from fedshift.experiments.measures import label_sets, served
from fedshift.experiments.measures.correcting import Corrected
from fedshift.experiments.measures.distances import measured_shift
from fedshift.experiments.measures.example_weights import importance
from fedshift.experiments.measures.round_weights import ess_of, reach, weighs_labels
from fedshift.experiments.task.feature_shift import look_names, shifts_features
from fedshift.record.summary import (
    Cohorts,
    CurvePoint,
    Differences,
    Final,
    Importance,
    LabelSets,
    RouterDetails,
    Serving,
    Summary,
)
from fedshift.server.pals import ess_curve, pals_weights
from fedshift.server.weights import Pals
from fedshift.tree import size_in_bytes

Floats = NDArray[np.float64]

# Packages whose versions can change the numbers of any run; lock.json records them.
PACKAGES = ("fedshift", "torch", "numpy", "scipy", "pydantic", "safetensors")
# The ESS fractions at which the curve of ESS against distance gets a point.
CURVE = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)


def summary(experiment: Experiment) -> Summary:
    """The run in one object: weights, ESS, distances, final accuracies, and sentences on them."""
    task, outcome = experiment.prepared.task, experiment.outcome
    counts, sizes = (outcome.federation.table[name].numpy() for name in ("labels", "n"))
    rows, target = _label_shares(counts), task.target.numpy()
    weights, by_size = np.asarray(outcome.weights), sizes / sizes.sum()
    last, sets = _last(experiment), _label_sets(experiment)
    return Summary(
        fedshift=package_version("fedshift"),
        name=experiment.config.name,
        method=recipe_of(experiment.config.method, experiment.prepared.custom).name,
        dataset=experiment.config.data.name,
        kind=None if task.kind == "classification" else task.kind,  # type: ignore[arg-type]
        classes=tuple(task.classes),
        target=tuple(target.tolist()),
        label_counts=tuple(map(tuple, counts.astype(int).tolist())),
        weights=outcome.weights,
        fedavg_weights=tuple(by_size.tolist()),
        **_weight_facts(experiment, weights, sizes, target - weights @ rows),
        # lambda = 0 gives the closest mixture, so its distance is that to the clients' hull.
        hull_distance=pals_weights(counts, target, lam=0.0).distance,
        cohorts=_cohorts(experiment),
        curve=_curve(experiment, counts, target),
        unmeasured_mass=outcome.estimate.unmeasured_mass,
        final=_final(outcome),
        best=outcome.best,
        corrected=None if outcome.corrected is None else outcome.corrected.described(),
        last=last,
        serving=_serving(experiment),
        label_sets=sets,
        differences=_differences(experiment, counts),
        importance=_importance(outcome),
        missing=outcome.missed._asdict() if missing_answers(outcome) else None,
        selection=None if experiment.choice is None else experiment.choice.described(),
        why=explain(experiment, last, sets, by_size @ rows, weights @ rows),
    )


def _label_shares(counts: Floats) -> Floats:
    """Each client's label shares [M, K]; zeros for a client without examples, instead of 0/0."""
    shares: Floats = counts / np.maximum(counts.sum(1, keepdims=True), 1.0)
    return shares


def _label_sets(experiment: Experiment) -> LabelSets | None:
    outcome = experiment.outcome
    return label_sets.described(experiment.algorithm, outcome.last.server, outcome.sets)


def _differences(experiment: Experiment, counts: Floats) -> Differences | None:
    """How far the clients are apart; None if they differ in nothing but their labels."""
    if not shifts_features(experiment.config.shift):
        return None
    prepared = experiment.prepared
    measured = measured_shift(prepared.task, counts, prepared.seeds.split)
    return Differences(**measured, looks=_looks(experiment))


def _looks(experiment: Experiment) -> tuple[str, ...] | None:
    """What sets each client's inputs apart, in words; None if nothing does."""
    config, ready = experiment.config, experiment.prepared
    if config.data.source is not None:
        return None  # the clients' names say where their inputs come from
    return look_names(config.shift, config.data.name, len(ready.task.clients), ready.seeds.split)


def _importance(outcome: Outcome) -> Importance | None:
    measured = importance(outcome.last.server)
    return None if measured is None else Importance(**measured)


def _final(outcome: Outcome) -> Final:
    final = outcome.final
    served = vars(outcome.served[-1]) if outcome.served else {}
    # Bytes per client in the last round; some engines do not count them.
    down, up = outcome.traffic.each() if outcome.traffic.clients else (None, None)
    first = {"params": outcome.federation.params, "buffers": outcome.federation.buffers}
    return Final(
        round=final.round,
        target_accuracy=final.target_accuracy,
        target_loss=final.target_loss,
        target_macro_f1=final.target_macro_f1,
        target_recall=tuple(outcome.test.recall),
        recall_estimate=tuple(outcome.estimate.recall),
        estimated_accuracy=final.estimated_accuracy,
        estimated_se=final.estimated_se,
        validation_accuracy=final.validation_accuracy,
        validation_loss=final.validation_loss,
        source_accuracy=final.source_accuracy,
        **_corrected_numbers(outcome.corrected),
        others={
            **{name: value for name, value in served.items() if name != "round"},
            **(outcome.at_end.refits if outcome.at_end else {}),
            **label_sets.final_values(outcome.sets),
            **final.others,
        },
        bytes_down=down,
        bytes_up=up,
        bytes_model=size_in_bytes(first),
        client_accuracy=tuple(s.accuracy for s in outcome.clients),
        client_metrics=_client_metrics(outcome.tests or outcome.clients),
    )


def _corrected_numbers(of: Corrected | None) -> dict[str, float]:
    if of is None:
        return {}
    numbers = {
        "target_accuracy_corrected": of.test.accuracy, "target_loss_corrected": of.test.loss,
    }  # fmt: skip
    if of.estimate is not None:
        numbers["estimated_accuracy_corrected"] = of.estimate.accuracy
        numbers["estimated_se_corrected"] = of.estimate.standard_error
    return numbers


def _client_metrics(scores: Sequence[Scored]) -> dict[str, tuple[float, ...]]:
    """The scores by client that only tasks without classes have; {} for classification."""
    rows = [s.others for s in scores]
    if not all(rows):
        return {}
    # In regression there is no accuracy: it is NaN for every client with examples.
    exact = () if math.isnan(sum(s.accuracy for s in scores if s.n)) else ("accuracy",)
    each = {name: tuple(s.accuracy for s in scores) for name in exact}
    return each | {name: tuple(row[name] for row in rows) for name in rows[0]}


def _last(experiment: Experiment) -> dict[str, Any] | None:
    """The serving metrics over the last rounds; None for a task with one test set."""
    outcome = experiment.outcome
    if outcome.at_end is None:
        return None
    averaged = served.over_last(outcome.served, experiment.config.training.evaluate_last)
    return {**averaged, **outcome.at_end.refits}


def _serving(experiment: Experiment) -> Serving | None:
    """Accuracy by client and class at the end; None for a task with one test set."""
    at_end = experiment.outcome.at_end
    if at_end is None:
        return None
    router = at_end.details["router"]
    details = {**at_end.details, "router": None if router is None else RouterDetails(**router)}
    return Serving(looks=_looks(experiment), **details)


def _weight_facts(
    experiment: Experiment, weights: Floats, sizes: Floats, residual: Floats
) -> dict[str, Any]:
    """Lambda, ESS and distances of the weights; means if rounds had fewer than all clients."""
    sums = experiment.outcome.weight_sums
    if sums is not None:
        of = sums.mean
        return {
            "lam": sums.lam,
            "ess": of.ess,
            "ess_fraction": of.ess_fraction,
            "distance": of.gap,
            "l1_distance": of.l1,
            "certified": None if sums.lams is None else sums.certified == sums.rounds,
        }
    rule = pals_of(experiment.algorithm)
    solved = None if rule is None else rule.solved(experiment.outcome.federation.table)
    gap, l1 = float(np.linalg.norm(residual)), float(np.abs(residual).sum())
    ess = ess_of(weights, sizes)
    if weighs_labels(experiment.algorithm, experiment.outcome.last):
        task, table = experiment.prepared.task, experiment.outcome.federation.table
        ess, _, gap, l1 = reach(experiment.outcome.last, table, task.target, experiment.algorithm)
    return {
        "lam": None if solved is None else solved.lam,
        "ess": ess,
        "ess_fraction": ess / sizes.sum(),
        "distance": gap,
        "l1_distance": l1,
        "certified": None if solved is None else solved.certified,
    }


def _cohorts(experiment: Experiment) -> Cohorts | None:
    """The size of a round's cohort, and the number of rounds behind the mean weights."""
    sums, drawn = experiment.outcome.weight_sums, experiment.config.training.cohort
    draws = experiment.config.training.draws(len(experiment.outcome.weights))
    if sums is None or drawn is None or not draws:
        return None
    return Cohorts(clients=drawn, rounds=sums.rounds)


def _curve(experiment: Experiment, counts: Floats, target: Floats) -> tuple[CurvePoint, ...]:
    """ESS against distance under the method's cap and fidelity, from the largest ESS down."""
    # For a method that is not FedPALS: the curve that FedPALS would have with default options.
    rule = pals_of(experiment.algorithm) or Pals(tuple(target.tolist()), lam=0.0)
    cap = rule.cap_among(int((counts.sum(1) > 0).sum()))
    solve = partial(pals_weights, counts, target, cap=cap, fidelity=rule.fidelity)
    # The two ends of the curve: sample-size weights, and the closest mixture.
    first, last = solve(lam=np.inf), solve(lam=0.0)
    inner = [f for f in CURVE if last.ess_fraction < f < first.ess_fraction - 1e-9]
    between = ess_curve(counts, target, inner, cap=cap, fidelity=rule.fidelity)
    return tuple(
        CurvePoint(
            lam=point.lam,
            ess_fraction=point.ess_fraction,
            distance=float(np.linalg.norm(point.residual)),
            l1=float(np.abs(point.residual).sum()),
        )
        for point in (first, *between, last)
    )


@cache
def package_version(package: str) -> str | None:
    """The installed version, None where the package is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        # The package may be a source tree on the path, which is not installed. Then its module
        # says the version. It is looked up in sys.modules, since importing it here is a circle.
        return getattr(sys.modules.get(package), "__version__", None)
