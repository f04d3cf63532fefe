"""What a run folder says about a run: its summary, and what is needed to get it again."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data import Examples
from fedshift.engine.trial import pals_of
from fedshift.evaluation.scores import Scored
from fedshift.experiments.config.custom import recipe_of
from fedshift.experiments.folder.outcome import Experiment, Outcome
from fedshift.experiments.measures import correcting, label_sets, served
from fedshift.experiments.measures.caps import beyond, cap_named, free_weights
from fedshift.experiments.measures.correcting import Corrected
from fedshift.experiments.measures.distances import measured_shift
from fedshift.experiments.measures.example_weights import importance, importance_sentences
from fedshift.experiments.measures.measuring import few_tests
from fedshift.experiments.measures.played import Played, ess_of, reach, weighs_labels
from fedshift.experiments.measures.stopping import sentences
from fedshift.experiments.task.feature_shift import grey_note, look_names, shifts_features
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

PACKAGES = ("fedshift", "torch", "numpy", "scipy", "pydantic", "safetensors")
CURVE = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05)


def summary(experiment: Experiment) -> Summary:
    """The run in one object: weights, ESS, distances, final accuracies, and why."""
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
        # lambda = 0 is the closest mixture: its distance is that of the clients' hull.
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
        missing=outcome.missed._asdict() if _missing_answers(outcome) else None,
        selection=None if experiment.choice is None else experiment.choice.described(),
        why=(
            *_reasons(experiment, last, by_size @ rows, weights @ rows),
            *_method_notes(experiment, sets),
            *_missing_answers(outcome),
            *_only_clients_know(outcome, task.test),
        ),
    )


def _label_shares(counts: Floats) -> Floats:
    """Each client's label shares [M, K]; zeros, not 0/0, for a client without examples."""
    shares: Floats = counts / np.maximum(counts.sum(1, keepdims=True), 1.0)
    return shares


def _reasons(
    experiment: Experiment, last: dict[str, Any] | None, mixed: Floats, used: Floats
) -> list[str]:
    if last is not None:
        return _serving_reasons(experiment, last)
    return _shift_reasons(experiment, mixed, used)


def _shift_reasons(experiment: Experiment, mixed: Floats, used: Floats) -> list[str]:
    """`reasons` of a task with one test set."""
    task, unmeasured = experiment.prepared.task, experiment.outcome.estimate.unmeasured_mass
    if experiment.config.data.validation == 0 and unmeasured >= 1 - 1e-9:
        unmeasured = 0.0  # no estimate was requested
    done = experiment.outcome
    if weighs_labels(experiment.algorithm, done.last):
        table = done.federation.table
        used = correcting.mixture(experiment.algorithm, done.weights, done.last, table)
    shares = (task.target.tolist(), mixed.tolist(), used.tolist())
    rest = "it is of the others" if task.kind == "regression" else "it counts them as wrong"
    few = few_tests(done.test, task.classes, shares[0])
    return [*reasons(task.classes, *shares, unmeasured, rest), *few]


def _serving_reasons(experiment: Experiment, last: dict[str, Any]) -> list[str]:
    """Sentences on models that clients serve, on refits that failed, and on grey images."""
    prepared, at_end = experiment.prepared, experiment.outcome.at_end
    grey = grey_note(experiment.config.shift, prepared.task.clients[0].x, prepared.seeds.split)
    failed = at_end.notes if at_end else ()
    return [*served.reasons(last), *failed, *([grey] if grey else [])]


def _method_notes(experiment: Experiment, sets: LabelSets | None) -> list[str]:
    """Sentences on models and options without effect, absent labels, example weights, stopping."""
    outcome, task = experiment.outcome, experiment.prepared.task
    name = recipe_of(experiment.config.method, experiment.prepared.custom).name
    return [
        *served.unused(name, experiment.algorithm, outcome.federation, task),
        *_needless_ess(experiment),
        *_undefined_ess(outcome.played),
        *_beyond_cap(experiment),
        *(label_sets.sentences(sets, task.classes, experiment.algorithm) if sets else ()),
        *_example_weights(experiment),
        *sentences(experiment.config.training, outcome.metrics, outcome.final.round),
        *_not_correctable(experiment),
    ]


def _example_weights(experiment: Experiment) -> list[str]:
    training, ready = experiment.config.training, experiment.prepared
    return importance_sentences(
        experiment.algorithm, experiment.outcome.last, training, ready.task.clients,
        ready.log_ratios,
    )  # fmt: skip


def _not_correctable(experiment: Experiment) -> list[str]:
    """Sentences on a correction that was asked for, where it cannot help or does harm."""
    moved, prepared = experiment.outcome.corrected, experiment.prepared
    if moved is None or experiment.config.training.prior == "none":
        return []
    target, plain = prepared.task.target.tolist(), experiment.outcome.estimate
    return correcting.sentences(moved, plain, prepared.task.classes, target)


def _missing_answers(outcome: Outcome) -> list[str]:
    rounds = outcome.metrics[-1].round
    sentence = outcome.missed.sentence(rounds, outcome.played is not None)
    return [sentence] if sentence else []


def _only_clients_know(outcome: Outcome, test: Examples) -> list[str]:
    """Sentences on what clients of a federation have not sent."""
    lines = []
    if test.scorer and outcome.at_end is None and outcome.test.n < len(test):
        lines.append(
            f"The final model was tested on {outcome.test.n:,} of {len(test):,} test examples: the "
            "others are at clients that did not answer."
        )
    if outcome.silent:
        whose, count = ", ".join(map(str, outcome.silent)), len(outcome.clients)
        lines.append(
            f"The estimate is of {count - len(outcome.silent)} of {count} clients: none of the "
            f"following measured the final model: {whose}."
        )
    if outcome.sizes_alone:
        lines.append(
            "Sizes are those that clients registered. They register no labels for this method: "
            "label counts, and what is made of them (gap, curve, hull distance), are of the "
            "examples that the experiment deals."
        )
    return lines


def _label_sets(experiment: Experiment) -> LabelSets | None:
    outcome = experiment.outcome
    return label_sets.described(experiment.algorithm, outcome.last.server, outcome.sets)


def _differences(experiment: Experiment, counts: Floats) -> Differences | None:
    """How far clients are apart, where more than their labels differs."""
    if not shifts_features(experiment.config.shift):
        return None
    prepared = experiment.prepared
    measured = measured_shift(prepared.task, counts, prepared.seeds.split)
    return Differences(**measured, looks=_looks(experiment))


def _looks(experiment: Experiment) -> tuple[str, ...] | None:
    config, ready = experiment.config, experiment.prepared
    if config.data.source is not None:
        return None  # the clients' names say it
    return look_names(config.shift, config.data.name, len(ready.task.clients), ready.seeds.split)


def _importance(outcome: Outcome) -> Importance | None:
    measured = importance(outcome.last.server)
    return None if measured is None else Importance(**measured)


def _final(outcome: Outcome) -> Final:
    final = outcome.final
    served = vars(outcome.served[-1]) if outcome.served else {}
    # Bytes per client in the last round; an engine that does not count them has none.
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
    """What only tasks without classes have; empty for the others."""
    rows = [s.others for s in scores]
    if not all(rows):
        return {}
    exact = () if math.isnan(sum(s.accuracy for s in scores if s.n)) else ("accuracy",)
    each = {name: tuple(s.accuracy for s in scores) for name in exact}
    return each | {name: tuple(row[name] for row in rows) for name in rows[0]}


def _last(experiment: Experiment) -> dict[str, Any] | None:
    """How the clients' models served over the last rounds; None for a task with one test set."""
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
    """Lambda, ESS and distances of the weights: over all clients, or as the rounds had them."""
    played = experiment.outcome.played
    if played is not None:
        of = played.mean
        return {
            "lam": played.lam,
            "ess": of.ess,
            "ess_fraction": of.ess_fraction,
            "distance": of.gap,
            "l1_distance": of.l1,
            "certified": None if played.lams is None else played.certified == played.rounds,
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
    """How many clients a round draws, and over how many rounds the weights are means."""
    played, drawn = experiment.outcome.played, experiment.config.training.cohort
    draws = experiment.config.training.draws(len(experiment.outcome.weights))
    if played is None or drawn is None or not draws:
        return None
    return Cohorts(clients=drawn, rounds=played.rounds)


def _undefined_ess(played: Played | None) -> list[str]:
    """A sentence if some rounds have no ESS, else none."""
    # With an ESS in no round the summary has none, which needs no sentence.
    if played is None or not 0 < played.with_ess < played.rounds:
        return []
    return [
        f"The mean ESS is that of {played.with_ess} of {played.rounds} rounds: in the others a "
        "client without examples had a weight."
    ]


def _needless_ess(experiment: Experiment) -> list[str]:
    """A sentence if `ess` asks for less than there is, else none."""
    rule, played = pals_of(experiment.algorithm), experiment.outcome.played
    if rule is None or rule.ess is None:
        return []
    wish = f"Asked for an ESS of {100 * rule.ess:.3g} %"
    if played is not None:
        often = f"{played.unneeded} of {played.rounds} rounds"
        return [
            f"{wish}: in {often} the closest mixture of the cohort (lambda = 0) already has more; "
            "there ess changes nothing."
        ] * bool(played.unneeded)
    solved = rule.solved(experiment.outcome.federation.table)
    return [
        f"{wish}: the closest mixture (lambda = 0) already has {100 * solved.ess_fraction:.3g} %, "
        "so ess changes nothing."
    ] * bool(solved.note)


def _beyond_cap(experiment: Experiment) -> list[str]:
    """A sentence for each client whose claims would give it more than the cap."""
    algorithm, last = experiment.algorithm, experiment.outcome.last
    cap = cap_named(experiment.config.method, experiment.config.training)
    if cap is None or cap >= 1.0 or "n" not in last.server.get("table", {}):
        return []
    odd = beyond(free_weights(algorithm.at(last.t), last.server), last.server["table"]["n"], cap)
    names = experiment.config.data.clients  # of sites, as tables have them
    return [f"{f'Client {i}' if names is None else names[i]}: {why}." for i, why in odd]


def _curve(experiment: Experiment, counts: Floats, target: Floats) -> tuple[CurvePoint, ...]:
    """ESS against distance under the method's cap and fidelity, from the largest ESS down."""
    # For a method without the programme: the curve that FedPALS would have by default.
    rule = pals_of(experiment.algorithm) or Pals(tuple(target.tolist()), lam=0.0)
    cap = rule.cap_among(int((counts.sum(1) > 0).sum()))
    solve = partial(pals_weights, counts, target, cap=cap, fidelity=rule.fidelity)
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
        # A source tree on the path is not installed. The package, which is imported by now, names
        # its version; an import of it from here would be a circle.
        return getattr(sys.modules.get(package), "__version__", None)


def reasons(
    classes: Sequence[str],
    target: Sequence[float],
    mixed: Sequence[float],
    used: Sequence[float],
    unmeasured: float = 0.0,
    rest: str = "it counts them as wrong",
) -> list[str]:
    """Why weights matter here: which of the target's labels sample-size weights train too little.

    `mixed` [K] is the label mix that sample-size weights train on, `used` [K] the mix of the
    weights in use. Labels are named where sample-size weights miss more than 0.02 of T; those that
    no client has are named apart, since no weights can help there. `unmeasured` is the mass of T
    whose recall no validation example measures;
    rest: what the estimate then is.
    """
    absent = [y for y, t in enumerate(target) if t > 0 and mixed[y] == 0]
    short = [y for y, t in enumerate(target) if t - mixed[y] > 0.02 and y not in absent]
    # fsum is exact: whether there is a sentence must not depend on the order of the classes.
    surplus = math.fsum(m for m, t in zip(mixed, target, strict=True) if t == 0)
    sentences = []
    if absent:
        mass = 100 * math.fsum(target[y] for y in absent)
        named = ", ".join(f'"{classes[y]}"' for y in absent)
        sentences.append(
            f"No client has any example of {named}, {mass:.0f} % of the target: no weights can "
            "make up for that."
        )
    if short:
        named = ", ".join(
            f'"{classes[y]}" ({100 * target[y]:.0f} % of the target, {100 * mixed[y]:.0f} % in '
            f"FedAvg, {100 * used[y]:.0f} % here)"
            # The five that miss most: a sentence with a hundred labels is not read.
            for y in sorted(short, key=lambda y: mixed[y] - target[y])[:5]
        )
        sentences.append(f"Sample-size weights train too little on {named}.")
    if surplus > 0.02:
        sentences.append(
            f"{100 * surplus:.0f} % of what FedAvg trains on are labels that the target never sees."
        )
    if unmeasured > 0:
        sentences.append(
            f"The estimate leaves out {100 * unmeasured:.0f} % of the target: labels of which no "
            f"client holds a validation example; {rest}."
        )
    return sentences or ["Sample-size weights already mix to the target's labels: little to gain."]
