"""Measurements of runs whose clients serve models of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.data import ClientData, Task
from fedshift.engine.run import Federation, Round, state_of
from fedshift.errors import FedshiftError
from fedshift.evaluation.scores import MOST_CLASSES, OwnScores, Score, confusion_of
from fedshift.evaluation.serving import (
    Served,
    accuracy,
    average_accuracy,
    own_accuracy,
    serve,
)
from fedshift.experiments.measures.distances import gradient_drift
from fedshift.experiments.measures.routing_details import details
from fedshift.model import Model
from fedshift.record.rounds import ServedMetrics
from fedshift.router.quality import calibration_error
from fedshift.router.route import Router
from fedshift.router.score import posterior, scores
from fedshift.tree import Params

# The gradient at which the refit of a router stops, see `refit`.
TOLERANCE = 1e-4
# Metrics that need a router, see `answers`.
ROUTED = ("routed_posterior", "routed_density", "mixture_accuracy")
# Metrics of the last round alone: those of a router fitted again (`scored`) and `gradient_drift`.
REFITS = (
    "refitted_accuracy", "refitted_router_accuracy", "refitted_ece", "moment_accuracy",
    "moment_router_accuracy", "moment_ece", "drift_class", "drift_client",
)  # fmt: skip


# Only in runs whose clients all have validation examples.
HELD_OUT = "validation_system_accuracy"


def serving_metrics() -> set[str]:
    """The names of all metrics that only such runs have."""
    return {f.name for f in fields(ServedMetrics)} | set(REFITS)


def whole(server: dict[str, Params], federation: Federation) -> bool:
    """Whether the server holds a complete model, with no part private to the clients."""
    return server.get("params", {}).keys() == federation.params.keys()


def unused(name: str, algorithm: Method, federation: Federation, task: Task) -> list[str]:
    """A sentence if clients train models of their own that the task never uses.

    name: the method's. Methods keep such a model in the part "personal" of a client's state.
    """
    if task.tests or "personal" not in state_of(algorithm, federation, {}, 0):
        return []
    inner = algorithm
    while hasattr(inner, "inner"):
        inner = inner.inner
    whose = f", which is {type(inner).__name__}'s" if inner is not algorithm else ""
    return [
        f"{name}: the target is served by the global model{whose}; the clients' own models are not "
        'used there, and not tested. With target = "clients" they are.'
    ]


def models(
    algorithm: Method, current: Round, federation: Federation
) -> tuple[tuple[Params, Params], ...]:
    """The (parameters, buffers) that every client serves after a round."""
    stage = algorithm.at(current.t)
    state = partial(state_of, algorithm, federation, current.states)
    return tuple(stage.model_for(current.server, state(i)) for i in range(len(federation.clients)))


def routable(current: Round, federation: Federation) -> Tensor:
    """Sizes n [M] of the clients that took part so far, and 0 for the others.

    With size 0 nothing is routed to a client. One that was never drawn has the first model, and the
    router has learned nothing about it.
    """
    has_state = torch.zeros(len(federation.clients), dtype=torch.bool)
    has_state[list(current.states)] = True
    return torch.where(has_state, federation.table["n"], 0.0)


def answers(served: Served, sizes: Tensor, client_logits: Tensor | None) -> dict[str, Tensor]:
    """The labels [n] that each rule gives the queries, by the name of its metric.

    sizes: see `routable`. client_logits: None without a router, which most rules need.
    """
    accuracies = {"vote_accuracy": served.voted(), "oracle_routed": served.routed(served.origin)}
    if client_logits is None:
        return accuracies
    believed = posterior(client_logits, sizes)
    density = scores(client_logits, sizes, "density")
    return accuracies | {
        "routed_posterior": served.routed(believed.argmax(1)),
        "routed_density": served.routed(density.argmax(1)),
        "mixture_accuracy": served.mixed(believed),
    }


def measure(
    t: int, served: Served, sizes: Tensor, taken: Tensor, shared: Tensor | None
) -> tuple[ServedMetrics, Tensor]:
    """(the metrics of round t, the system's answer to every query [n]).

    sizes   n [M]
    taken   [M], see `routable`
    shared  [n] the labels that the server's model gives, or None if it is not complete
    """
    per_client, z = own_accuracy(served), served.client_logits
    given = answers(served, taken, z)
    # Without a router, the system answers by a vote of all models.
    rule = "routed_posterior" if z is not None else "vote_accuracy"
    accuracies = {name: accuracy(labels, served.y) for name, labels in given.items()}
    right = math.nan if z is None else accuracy(scores(z, taken).argmax(1), served.origin)
    metrics = ServedMetrics(
        round=t,
        system_accuracy=accuracies[rule],
        average_accuracy=average_accuracy(per_client, sizes),
        worst_accuracy=float(np.nanmin(per_client.numpy())),
        global_accuracy=math.nan if shared is None else accuracy(shared, served.y),
        router_accuracy=right,
        **dict.fromkeys(ROUTED, math.nan) | accuracies,
    )
    return metrics, given[rule]


def score_of(given: Tensor, truth: Tensor, classes: int) -> Score:
    """Counts of given labels [n] against the truth [n].

    The loss is NaN: a system of several models gives labels, and no probabilities.
    """
    correct = torch.bincount(truth[given == truth], minlength=classes)
    total, predicted = (torch.bincount(v, minlength=classes) for v in (truth, given))
    confused = confusion_of(given, truth, classes) if classes <= MOST_CLASSES else None
    return Score(correct, total, predicted, math.nan, confused)


@dataclass(frozen=True, eq=False)
class Observed:
    """One evaluation of all clients' models: metrics, the system's score, and every answer.

    If models stay at their sites, answers is None, and sites [M] has the scores that clients sent.
    """

    metrics: ServedMetrics
    score: Score
    answers: Served | None
    sites: tuple[OwnScores, ...] = ()


def observe(algorithm: Method, current: Round, federation: Federation, task: Task) -> Observed:
    """Run all clients' models on all clients' test examples."""
    served = serve(algorithm.model, models(algorithm, current, federation), task.tests)
    shared = None
    if whole(current.server, federation):
        pair = (current.server["params"], current.server["buffers"])
        shared = serve(algorithm.model, [pair], [task.test]).labels[0]
    taken = routable(current, federation)
    metrics, given = measure(current.t, served, federation.table["n"], taken, shared)
    return Observed(metrics, score_of(given, served.y, len(task.classes)), served)


@dataclass(frozen=True, eq=False)
class LastRound:
    """What is measured once, after training: the numbers of REFITS, data for charts, sentences.

    routers: the refitted ones by the name of the fit. on_sites: the clients' models are not here.
    """

    refits: dict[str, float]
    details: dict[str, Any]
    notes: tuple[str, ...] = ()
    routers: Mapping[str, Router] = field(default_factory=dict)
    on_sites: bool = False


def last_round(
    algorithm: Method, current: Round, federation: Federation, task: Task, served: Served
) -> LastRound:
    """The measurements after a run's last round; served: the answers of all models."""
    shown = details(served, routable(current, federation), len(task.classes))
    if served.client_logits is None:
        return LastRound({}, shown)
    pairs = models(algorithm, current, federation)
    drift = gradient_drift(algorithm.model, pairs, federation)
    again = refit(algorithm, current, federation, task.test.x)
    numbers = scored(again, routable(current, federation), served)
    numbers |= held_out(algorithm.model, pairs, routable(current, federation), task)
    notes = (*advice(again.routers), *again.notes)
    return LastRound(drift | numbers, shown, notes, again.routers)


def held_out(
    model: Model, pairs: Sequence[tuple[Params, Params]], taken: Tensor, task: Task
) -> dict[str, float]:
    """System accuracy on all clients' validation examples, as "validation_system_accuracy".

    Each is answered by the client of largest posterior, as in `routed_posterior`. Options such as
    FedDRM's lam are chosen by this number, so it is over all clients, or is left out.
    """
    if not task.validation or not all(len(examples.y) for examples in task.validation):
        return {}
    served = serve(model, pairs, task.validation)
    labels = answers(served, taken, served.client_logits)["routed_posterior"]
    return {HELD_OUT: accuracy(labels, served.y)}


Make = Callable[[Sequence[ClientData]], Router]


class Refitted(NamedTuple):
    """The last round's router with its last layer fitted again, by the name of the fit.

    logits: of each, the client logits [n, M] for the test examples. notes: why a fit is missing.
    """

    routers: Mapping[str, Router]
    logits: dict[str, Tensor]
    notes: tuple[str, ...]


def refit(algorithm: Method, current: Round, federation: Federation, x: Tensor) -> Refitted:
    """Fit the router's last layer again, by `Router.refitted` and `Router.from_moments`.

    A fit that fails is noted, and does not fail the run. The first stops at gradients below 1e-4,
    when answers have long stopped changing.
    """
    # untrained: lam = 1 never trains the client branch, but a refit needs only its features.
    stage = algorithm.at(current.t)
    router = Router.of(stage, current.server, current.states, untrained=True)
    cap = federation.gate.max_weight
    logits = dict[str, Tensor]()

    def fit(name: str, make: Make) -> Router:
        made = make(federation.clients)
        logits[name] = made.logits(x)
        return made

    makes: dict[str, Make] = {
        "refitted": partial(router.refitted, tolerance=TOLERANCE, cap=cap),
        "moment": partial(router.from_moments, cap=cap),
    }
    made, notes = fitted({name: partial(fit, name, make) for name, make in makes.items()})
    return Refitted(made, logits, tuple(notes))


def fitted(fits: Mapping[str, Callable[[], Router]]) -> tuple[dict[str, Router], list[str]]:
    """The routers of the fits that succeed, and a sentence for each of the others."""
    made, notes = dict[str, Router](), list[str]()
    for name, fit in fits.items():
        try:
            made[name] = fit()
        except FedshiftError as e:
            notes.append(f"The router has no {name} layer: {e}.")
    return made, notes


def advice(routers: Mapping[str, Router]) -> list[str]:
    """A sentence on each router that was calibrated on held-out examples."""
    calibrations = {name: router.calibration for name, router in routers.items()}
    return [f"The {name} router: {text}." for name, text in calibrations.items() if text]


def scored(again: Refitted, sizes: Tensor, served: Served) -> dict[str, float]:
    """Accuracies of the last round with the refitted routers; sizes as in `routable`.

    refitted_accuracy, moment_accuracy          hard routing by the posterior
    refitted_router_..., moment_router_...      how often it names the right client
    refitted_ece, moment_ece                    calibration error of the posterior
    NaN where a fit failed: the run's other numbers stand. Source: `fedshift.router`.
    """
    numbers = dict.fromkeys(REFITS[:6], math.nan)
    for name, z in again.logits.items():
        given = answers(served, sizes, z)["routed_posterior"]
        right = accuracy(scores(z, sizes).argmax(1), served.origin)
        numbers[f"{name}_accuracy"] = accuracy(given, served.y)
        numbers[f"{name}_router_accuracy"] = right
        numbers[f"{name}_ece"] = calibration_error(posterior(z, sizes), served.origin)
    return numbers


def reasons(last: Mapping[str, Any]) -> list[str]:
    """Sentences on the serving metrics (fractions) of the last rounds; see `over_last`."""
    system, oracle = last["system_accuracy"], last["oracle_routed"]
    if math.isnan(system):
        return _own_reasons(last)
    # Models that differ at all hardly agree in all three numbers.
    if oracle == last["vote_accuracy"] == last["global_accuracy"]:
        return [f"All clients serve one model, which answers queries with {_percent(system)}."]
    average, rounds = _percent(last["average_accuracy"]), last.get("rounds", 1)
    weighted = f" ({average} where clients count by their training rows)"
    weighted *= average != _percent(oracle)
    over = f" (Means of the last {rounds} measured rounds.)" * (rounds > 1)
    if math.isnan(last["router_accuracy"]):
        sentences = [
            f"By its own client's model {_percent(oracle)} of all test rows are answered rightly"
            f"{weighted}; by the vote of all models, {_percent(system)}.{over}"
        ]
    else:
        sentences = [
            f"Sent to the client that it comes from, a query is answered with {_percent(oracle)}. "
            f"The router finds that client for {_percent(last['router_accuracy'])} and gets "
            f"{_percent(system)}: imperfect routing costs {100 * (oracle - system):.1f} points."
        ]
    if math.isnan(last["global_accuracy"]):
        sentences.append(
            "This method has no global model. Compare it with fedavg on the same task: routing is "
            "worth its cost only where it beats one model for all."
        )
    elif math.isnan(last["router_accuracy"]):
        shared = last["global_accuracy"]
        sentences.append(
            f"By the global model, {_percent(shared)}: {_points(shared - oracle)} by the clients' "
            f"own models, {_points(shared - system)} by their vote."
        )
    elif last["global_accuracy"] >= system:
        sentences.append(
            f"The global model alone gets {_percent(last['global_accuracy'])}: the clients' own "
            "models, with queries sent by this router, do not beat it here."
        )
    return sentences


def _own_reasons(last: Mapping[str, Any]) -> list[str]:
    """`reasons` for a run whose clients' models stayed at their sites."""
    if math.isnan(last["oracle_routed"]):
        return ["Every client's model stayed at its site, and none said how it does."]
    sentences = [
        f"Every client's model stayed at its site and answered that client's own test rows: "
        f"{_percent(last['oracle_routed'])} of all are right. Votes, and answers of the client "
        "that a router names, need all models in one place: simulate this file to measure them."
    ]
    if not math.isnan(last["router_accuracy"]):
        sentences.append(
            f"The router finds a row's client for {_percent(last['router_accuracy'])}."
        )
    if not math.isnan(last["global_accuracy"]):
        sentences.append(f"By the global model, {_percent(last['global_accuracy'])}.")
    return sentences


def _points(difference: float) -> str:
    """A difference of accuracies in words, to go before the other one: "3.0 points less than"."""
    size, way = f"{100 * abs(difference):.1f}", "more" if difference > 0 else "less"
    return "as many as" if size == "0.0" else f"{size} points {way} than"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def over_last(metrics: Sequence[ServedMetrics], rounds: int) -> dict[str, Any]:
    """Mean and standard deviation of each metric over the evaluated ones of the last rounds.

    The deviation divides by the number of rounds, under the metric's name and "_sd"; NaN for a
    single one. Wang et al. 2026 (FedDRM) report the last 50 rounds; the divisor is chosen, since
    they store only curves.
    """
    end = metrics[-1].round
    tail = [m for m in metrics if m.round > end - max(rounds, 1)]
    summary: dict[str, Any] = {"round": end, "rounds": len(tail)}
    for name in (f.name for f in fields(ServedMetrics) if f.name != "round"):
        values = np.array([getattr(m, name) for m in tail])
        spread = float(values.std()) if len(tail) > 1 else math.nan
        summary |= {name: float(values.mean()), f"{name}_sd": spread}
    return summary
