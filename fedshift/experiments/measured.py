"""What is measured of a round's models, and where: here, on a GPU, or at the clients' sites."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.algorithms.base import Algorithm
from fedshift.data import Task
from fedshift.engine.run import Federation, Round
from fedshift.experiments.config.custom import Metric
from fedshift.experiments.engines import Engine, OnSites, evaluating
from fedshift.experiments.measures.served import LastRound, last_round
from fedshift.experiments.own_scores import evaluate_on_sites, last_round_on_sites
from fedshift.experiments.training import Evaluation, evaluate


def measure_round(
    algorithm: Algorithm, federation: Federation, task: Task, engine: Engine,
    metrics: Mapping[str, Metric], current: Round,
) -> Evaluation:  # fmt: skip
    """The scores after a round: here, or by what clients say whose models stay with them."""
    if isinstance(engine, OnSites) and engine.on_sites:
        return evaluate_on_sites(engine, algorithm, current, federation, task)
    with evaluating(engine):
        return evaluate(algorithm, current, federation, task, metrics, engine.measured(current))


def measure_at_end(
    algorithm: Algorithm, current: Round, federation: Federation, task: Task, scores: Evaluation,
    engine: Engine,
) -> LastRound | None:  # fmt: skip
    """Measurements of the last round only, where clients serve their own models."""
    if scores.served is None:
        return None
    if scores.served.answers is None:
        assert isinstance(engine, OnSites)  # they alone leave the answers where they are
        return last_round_on_sites(engine, algorithm, current, federation, scores.served)
    with evaluating(engine):
        return last_round(algorithm, current, federation, task, scores.served.answers)
