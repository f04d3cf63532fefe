"""What a run says of the weights of its clients' examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.weighing import (
    BEST,
    LEFT_OUT,
    Estimate,
    centred,
    notes,
    rounds_for_all,
    unweighed,
)
from fedshift.client.importance import Direct, Equal, Known, bounded, live, two_values
from fedshift.data import ClientData
from fedshift.engine.round import Round
from fedshift.experiments.config.schema import Training
from fedshift.tree import Parts


def importance(server: Parts) -> dict[str, Any] | None:
    """Effective sizes of the clients' example weights, in examples and as a share of n; [M] each.

    None for a method that weighs no examples, null for clients that have not weighed theirs.
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
    algorithm: Algorithm,
    last: Round,
    training: Training,
    clients: Sequence[ClientData] = (),
    log_ratios: Sequence[Tensor] | None = None,
) -> list[str]:
    """Sentences on the ESS under example weights, and on its use; empty without weights.

    log_ratios: the true ones [n_i] of each client, where they are known
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
        texts += [compared(disk, last, clients, log_ratios)]
    return [
        f"Example weights leave {sum(weighed.values()) / len(weighed):.0%} of a client's effective "
        f"sample size on average, least at client {least}: {weighed[least]:.0%}.{missing}",
        *(f"{text[0].upper()}{text[1:]}." for text in texts if text),
        *idle,
    ]


def untrained(name: str, algorithm: Algorithm, rounds: int) -> list[str]:
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


def compared(
    disk: FedDisk, last: Round, clients: Sequence[ClientData], log_ratios: Sequence[Tensor]
) -> str:
    """A sentence: how the log weights in use follow the true ones, under the same bounds.

    Clients that have no weights, or have 1 in place of them, are left out; "" where none remains.
    """
    of = last.server["importance"]
    shares = zip(of["ess"].tolist(), of["estimated"].tolist(), strict=True)
    # In a federation of machines the weights stay with the clients.
    used = [
        i for i, (ess, estimated) in enumerate(shares)
        if 0 < ess <= estimated and "importance" in last.states.get(i, {})
    ]  # fmt: skip
    pairs = [_log_weights(disk, last, clients[i], log_ratios[i]) for i in used]
    if not pairs:
        return ""
    true, estimated = (centred(side) for side in zip(*pairs, strict=True))
    return Estimate(true, estimated).sentence(differing(disk, clients))


def _log_weights(
    disk: FedDisk, last: Round, data: ClientData, log_ratio: Tensor
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A client's log weights [n_i], true and used."""
    client, rows = int(data.id), live(data).cpu()
    n = last.server["importance"]["n"]
    everything = torch.ones(len(log_ratio), dtype=torch.bool)
    true = bounded(log_ratio, everything, (n[client] / n.sum()).cpu(), disk.most)
    a = last.states[client]["importance"]["a"].cpu()[rows]
    return true.log().numpy(), a.double().log().numpy()


def _disk(algorithm: Any) -> FedDisk | None:
    """The method that weighs examples, or the one within it; None where there is none."""
    if algorithm is None or isinstance(algorithm, FedDisk):
        return algorithm
    return _disk(getattr(algorithm, "inner", None))


def _cure(disk: FedDisk, last: Round, training: Training) -> str:
    """Advice where clients were in no weighing round; "" where all were, or rounds are to come."""
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
