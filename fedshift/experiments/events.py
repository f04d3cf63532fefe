"""The events of a run, as its listeners and events.jsonl get them."""

from __future__ import annotations

import math
from typing import Any

from fedshift.engine.checks.gate import Dropped
from fedshift.engine.run import Round
from fedshift.engine.traffic import Traffic
from fedshift.experiments.engines import Engine
from fedshift.experiments.evaluation import Evaluation
from fedshift.experiments.folder.progress import Progress
from fedshift.experiments.listeners import Listener
from fedshift.record.rounds import Metrics


def start_event(label: str, done: Progress, rounds: int) -> dict[str, Any]:
    """A run that begins, or goes on after the round that `after` names."""
    event = {"event": "start", "run": label, "rounds": rounds}
    return event if done.after is None else event | {"after": done.after.t}


def round_event(
    label: str, current: Round, rounds: int, seconds: float, traffic: Traffic
) -> dict[str, Any]:
    """A round that has been trained; its evaluation is an event of its own."""
    # Some engines count no bytes.
    counted = {} if traffic == Traffic() else {"bytes_down": traffic.down, "bytes_up": traffic.up}
    return {
        "event": "round",
        "run": label,
        "round": current.t,
        "rounds": rounds,
        "train_loss": current.loss,
        "clients": list(current.trained),
        "seconds": seconds,
        **counted,
    }


def report_drops(engine: Engine, label: str, current: Round, listen: Listener) -> None:
    """Pass on an event for each client that dropped out, unless the engine has done so already."""
    for one in () if engine.tells_drops else current.dropped:
        listen(dropped_event(label, current.t, one))


def dropped_event(label: str, t: int, one: Dropped) -> dict[str, Any]:
    """A client that dropped out of round t, and why."""
    return {"event": "dropped", "run": label, "round": t, **one._asdict()}


def evaluation_event(label: str, measures: Metrics, scores: Evaluation) -> dict[str, Any]:
    """The numbers of an evaluated round, and how many clients sent a score if some did not."""
    numbers = measures.numbers() | _served_accuracies(scores)
    of, silent = len(scores.clients), len(scores.silent)
    some = {"scored_by": f"{of - silent} of {of} clients"} if silent else {}
    return {"event": "evaluation", "run": label, **numbers, **some}


def _served_accuracies(scores: Evaluation) -> dict[str, float]:
    """Accuracy of all models as a system, and their mean accuracy; {} without client test sets."""
    if scores.served is None:
        return {}
    metrics = scores.served.metrics
    shown = {"average_accuracy": metrics.average_accuracy}
    # Models that stay at their sites are not tested as a system: only each one alone.
    if math.isnan(metrics.system_accuracy):
        return shown
    return {"system_accuracy": metrics.system_accuracy, **shown}
