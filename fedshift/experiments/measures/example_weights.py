"""How far a method that weighs examples has changed them: effective sizes, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.method import Method
from fedshift.algorithms.weighing import (
    BEST,
    LEFT_OUT,
    compare_log_weights,
    notes,
    rounds_for_all,
    unweighed,
)
from fedshift.client.importance import Direct, Equal, Known, two_values
from fedshift.data import ClientData
from fedshift.engine.round import Round
from fedshift.experiments.config.schema import Training
from fedshift.tree import Parts


def importance(server: Parts) -> dict[str, Any] | None:
    """Effective sample sizes under the clients' example weights, in examples and as a share of n.

    Lists [M] with None for clients that have not weighed theirs. None for a method without weights.
    """
    recorded = server.get("importance")
    if recorded is None:
        return None
    pairs = list(zip(recorded["ess"].tolist(), recorded["n"].tolist(), strict=True))
    return {
        "ess": [ess or None for ess, _ in pairs],
        "share": [min(1.0, ess / n) if ess else None for ess, n in pairs],
    }


def importance_sentences(
    algorithm: Method,
    last: Round,
    training: Training,
    clients: Sequence[ClientData] = (),
    log_ratios: Sequence[Tensor] | None = None,
) -> list[str]:
    """Sentences on the ESS under example weights, with advice; [] for a method without weights.

    log_ratios: the true log p(x) - log q_i(x) [n_i] of each client, if they are known
    """
    disk, measured = _disk(algorithm), importance(last.server)
    if measured is None or disk is None:
        return []
    if isinstance(disk.ratio, Equal):
        return ["Every example weighs 1: this is the control, without estimated weights."]
    idle = [text for text in (_untrained(disk, training.rounds),) if text]
    weighed = {i: share for i, share in enumerate(measured["share"]) if share is not None}
    cure = _cure(disk, last, training)
    if not weighed:
        return [f"No client has weighed its examples: all count alike{cure}.", *idle]
    least, left = min(weighed, key=lambda i: weighed[i]), len(unweighed(last.server["importance"]))
    those = (
        "1 client has not weighed its" if left == 1 else f"{left} clients have not weighed their"
    )
    missing = f" {those} examples, which count alike{cure}." if left else ""
    texts = notes(last.server["importance"], weighed)
    if log_ratios is not None and not isinstance(disk.ratio, Known):
        estimate = compare_log_weights(last.server, last.states, clients, log_ratios, disk.most)
        texts += [estimate.sentence(differing(disk, clients))] if estimate else []
    return [
        f"Example weights leave {sum(weighed.values()) / len(weighed):.0%} of a client's effective "
        f"sample size on average, least at client {least}: {weighed[least]:.0%}.{missing}",
        *(f"{text[0].upper()}{text[1:]}." for text in texts if text),
        *idle,
    ]


def untrained(name: str, algorithm: Method, rounds: int) -> list[str]:
    """A sentence where the first of a run's rounds train no model; name: the method's."""
    disk = _disk(algorithm)
    text = "" if disk is None or isinstance(disk.ratio, Equal) else _untrained(disk, rounds)
    return [f"{name}: {text[0].lower()}{text[1:]}"] if text else []


def _untrained(disk: FedDisk, rounds: int) -> str:
    trains = max(0, rounds - disk.rounds_before_inner)
    return (
        f"The first {rounds - trains} of {rounds} rounds fit densities and weigh examples, and "
        f"{trains} train the model. FedAvg trains in all {rounds}: a fair rival trains in as few, "
        'as feddisk with estimator = "equal" does.'
    )


def differing(disk: FedDisk, clients: Sequence[ClientData]) -> list[str]:
    """Those of `BEST` that differ from a method's settings."""
    pair, clips = two_values(clients), disk.reach == 1.0  # a Bernoulli density clips
    image = any(c.x.ndim > 2 for c in clients)
    automatic = clips and disk.span == pair if pair else clips == image
    has = (isinstance(disk.ratio, Direct), getattr(disk.ratio, "temper", 1.0) == 1.0, automatic)
    return [text for text, so in zip(BEST, has, strict=True) if not so]


def _disk(algorithm: Any) -> FedDisk | None:
    """The method itself, or the one that it wraps, if that weighs examples; else None."""
    if algorithm is None or isinstance(algorithm, FedDisk):
        return algorithm
    return _disk(getattr(algorithm, "inner", None))


def _cure(disk: FedDisk, last: Round, training: Training) -> str:
    """Advice if some clients were in no weighing round; "" if all were, or more rounds follow."""
    of = last.server["importance"]
    left = len(unweighed(of))
    if not left or last.t < disk.rounds_before_inner:
        return ""
    drawn = 1.0 if training.cohort is None else training.cohort / len(of["n"])
    rounds = rounds_for_all(disk.weighing, left, drawn)
    return (
        f": give method.weighing_rounds = {rounds} and training.rounds = "
        f"{training.rounds + rounds - disk.weighing}, so that all are drawn in "
        f"{100 * (1 - LEFT_OUT):.0f} % of runs"
    )
