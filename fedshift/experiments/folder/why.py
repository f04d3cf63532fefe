"""The sentences on a run that its summary.json has under "why"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshift.data import Examples
from fedshift.engine.preflight.method import pals_of
from fedshift.experiments.config.custom import recipe_of
from fedshift.experiments.folder.outcome import Experiment, Outcome
from fedshift.experiments.measures import correcting, label_sets, served
from fedshift.experiments.measures.caps import beyond, cap_named, free_weights
from fedshift.experiments.measures.example_weights import importance_sentences
from fedshift.experiments.measures.round_weights import WeightSums, weighs_labels
from fedshift.experiments.measures.stopping import sentences
from fedshift.experiments.measures.task_scores import few_tests
from fedshift.experiments.task.feature_shift import grey_note
from fedshift.record.summary import LabelSets

Floats = NDArray[np.float64]


def explain(
    experiment: Experiment, last: dict[str, Any] | None, sets: LabelSets | None, mixed: Floats,
    used: Floats,
) -> tuple[str, ...]:  # fmt: skip
    """All sentences on a run.

    last, sets: as in the summary. mixed, used [K]: the label mix that sample-size weights train on,
    and that of the weights in use.
    """
    outcome = experiment.outcome
    return (
        *_reasons(experiment, last, mixed, used),
        *_method_notes(experiment, sets),
        *missing_answers(outcome),
        *_only_clients_know(outcome, experiment.prepared.task.test),
    )


def _reasons(
    experiment: Experiment, last: dict[str, Any] | None, mixed: Floats, used: Floats
) -> list[str]:
    if last is not None:
        return _serving_reasons(experiment, last)
    return _shift_reasons(experiment, mixed, used)


def _shift_reasons(experiment: Experiment, mixed: Floats, used: Floats) -> list[str]:
    """Sentences on the labels that the weights train too little, and on small test sets."""
    task, unmeasured = experiment.prepared.task, experiment.outcome.estimate.unmeasured_mass
    if experiment.config.data.validation == 0 and unmeasured >= 1 - 1e-9:
        unmeasured = 0.0  # no validation examples were asked for, so nothing is missing
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
    """Sentences on options without effect, absent labels, example weights and early stopping."""
    outcome, task = experiment.outcome, experiment.prepared.task
    name = recipe_of(experiment.config.method, experiment.prepared.custom).name
    return [
        *served.unused(name, experiment.algorithm, outcome.federation, task),
        *_needless_ess(experiment),
        *_undefined_ess(outcome.weight_sums),
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
    """Sentences on a prior correction that was asked for, if it cannot help or does harm."""
    moved, prepared = experiment.outcome.corrected, experiment.prepared
    if moved is None:
        return []
    single = correcting.single_answer(moved, prepared.task.classes)
    if experiment.config.training.prior == "none":
        return single
    target, plain = prepared.task.target.tolist(), experiment.outcome.estimate
    return [*single, *correcting.sentences(moved, plain, prepared.task.classes, target)]


def missing_answers(outcome: Outcome) -> list[str]:
    """A sentence on answers that rounds lacked, if any did."""
    rounds = outcome.metrics[-1].round
    sentence = outcome.missed.sentence(rounds, outcome.weight_sums is not None)
    return [sentence] if sentence else []


def _only_clients_know(outcome: Outcome, test: Examples) -> list[str]:
    """Sentences on scores and counts that clients of a federation have not sent."""
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


def _undefined_ess(sums: WeightSums | None) -> list[str]:
    """A sentence if the ESS is undefined in some rounds."""
    # If it is undefined in all, the summary has no ESS that a sentence would have to explain.
    if sums is None or not 0 < sums.with_ess < sums.rounds:
        return []
    return [
        f"The mean ESS is that of {sums.with_ess} of {sums.rounds} rounds: in the others a "
        "client without examples had a weight."
    ]


def _needless_ess(experiment: Experiment) -> list[str]:
    """A sentence if option `ess` has no effect, because the closest mixture has more already."""
    rule, sums = pals_of(experiment.algorithm), experiment.outcome.weight_sums
    if rule is None or rule.ess is None:
        return []
    wish = f"Asked for an ESS of {100 * rule.ess:.3g} %"
    if sums is not None:
        often = f"{sums.unneeded} of {sums.rounds} rounds"
        return [
            f"{wish}: in {often} the closest mixture of the cohort (lambda = 0) already has more; "
            "there ess changes nothing."
        ] * bool(sums.unneeded)
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
    names = experiment.config.data.clients  # names of sites; None where clients have numbers
    return [f"{f'Client {i}' if names is None else names[i]}: {why}." for i, why in odd]


def reasons(
    classes: Sequence[str],
    target: Sequence[float],
    mixed: Sequence[float],
    used: Sequence[float],
    unmeasured: float = 0.0,
    rest: str = "it counts them as wrong",
) -> list[str]:
    """Why weights matter here: which of the target's labels sample-size weights train too little.

    mixed [K]   the label mix that sample-size weights train on
    used [K]    the mix of the weights in use
    unmeasured  the mass of those labels of T that have no validation example
    rest        what the estimate does with these, as the end of a sentence

    A label is named if sample-size weights give it a share that is more than 0.02 below T's.
    Labels that no client has get a sentence of their own, since no weights can help there.
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
