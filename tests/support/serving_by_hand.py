"""Served models and their metrics computed by hand with plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call

from fedshift.algorithms.method import Method
from fedshift.data import Task
from fedshift.engine.run import Federation, Round, run
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import method_of
from fedshift.experiments.measures.served import Observed, observe
from fedshift.experiments.task.preparing import Prepared, prepare
from support.by_hand import Array

Labels = NDArray[np.int64]
CLIENTS, CLASSES = 5, 10
TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mnist-mini", "validation": 0.1, "limit": 700},
    "shift": {
        "kind": "dirichlet-per-class", "beta": 0.5, "clients": CLIENTS, "target": "clients",
        "transform": "fashion",
    },
    "model": {"name": "mlp-projected", "hidden": [12, 8]},
    "seeds": {"run": 0},
    "training": {"rounds": 6, "steps": 6, "batch": 16, "lr": 0.1},
}  # fmt: skip


@cache
def prepared(method: str, transform: str = "fashion") -> Prepared:
    tables = TABLES | {"shift": TABLES["shift"] | {"transform": transform}}
    return prepare(validate(tables | {"method": {"name": method}}))


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Hand:
    """One round's models on all clients' test images [n], with plain arrays."""

    algorithm: Method
    federation: Federation
    task: Task
    last: Round

    @cached_property
    def observed(self) -> Observed:
        return observe(self.algorithm, self.last, self.federation, self.task)

    @cached_property
    def y(self) -> Labels:
        return torch.cat([t.y for t in self.task.tests]).numpy()

    @cached_property
    def origin(self) -> Labels:
        return np.repeat(np.arange(CLIENTS), [len(t) for t in self.task.tests])

    @cached_property
    def sizes(self) -> Array:
        """How many examples every client trains on."""
        return np.array([float(len(c.y)) for c in self.task.clients])

    @cached_property
    def routable(self) -> Array:
        """The same, with 0 for clients that never took part."""
        return self.sizes * [i in self.last.states for i in range(CLIENTS)]

    def outputs(self, params: Any, buffers: Any) -> dict[str, Array]:
        x, net = torch.cat([t.x for t in self.task.tests]), self.algorithm.model.net.eval()
        with torch.no_grad():
            out = functional_call(net, {**params, **buffers}, (x,))
        return {k: v.double().numpy() for k, v in out.items()}

    @cached_property
    def each(self) -> list[dict[str, Array]]:
        """The outputs of each client's model; for a client that never trained, of the first one."""
        stage, answers = self.algorithm.at(self.last.t), []
        for i, data in enumerate(self.federation.clients):
            first = self.algorithm.init_client(
                self.federation.params, self.federation.buffers, data
            )
            state = self.last.states.get(i, first)
            answers.append(self.outputs(*stage.model_for(self.last.server, state)))
        return answers

    @cached_property
    def labels(self) -> Labels:
        """[M, n]"""
        return np.stack([out["logits"].argmax(1) for out in self.each])

    @cached_property
    def z(self) -> Array:
        """Client logits [n, M]; minus infinity where nothing can be sent."""
        drawn = min(self.last.states)
        return np.where(self.routable > 0, self.each[drawn]["client_logits"], -np.inf)

    def right(self, given: Labels) -> float:
        return float(np.mean(given == self.y))

    def sent(self, client: Labels) -> Labels:
        """The labels where query b is answered by client[b]."""
        return np.array([self.labels[i, b] for b, i in enumerate(client)])

    def vote(self) -> Labels:
        counts = [np.bincount(column, minlength=CLASSES) for column in self.labels.T]
        return np.array([count.argmax() for count in counts])

    def mixture(self) -> Labels:
        share = softmax(self.z)
        mixed = sum(share[:, [i]] * softmax(self.each[i]["logits"]) for i in range(CLIENTS))
        return np.asarray(mixed).argmax(1)

    def density(self) -> Labels:
        with np.errstate(divide="ignore", invalid="ignore"):
            score = self.z - np.log(self.routable / self.routable.sum())
        return np.where(np.isfinite(score), score, -np.inf).argmax(1)

    def own_accuracies(self) -> Array:
        """Each client's accuracy on its own test images."""
        right = self.labels == self.y
        return np.array([right[i, self.origin == i].mean() for i in range(CLIENTS)])

    def metrics(self) -> dict[str, float]:
        accuracies, vote = self.own_accuracies(), self.right(self.vote())
        scores = {
            "average_accuracy": float(self.sizes / self.sizes.sum() @ accuracies),
            "worst_accuracy": float(accuracies.min()),
            "vote_accuracy": vote,
            "system_accuracy": vote,
            "oracle_routed": self.right(self.sent(self.origin)),
        }
        if "client_logits" not in self.each[0]:
            return scores
        hard = self.right(self.sent(self.z.argmax(1)))
        return scores | {
            "system_accuracy": hard,
            "routed_posterior": hard,
            "routed_density": self.right(self.sent(self.density())),
            "mixture_accuracy": self.right(self.mixture()),
            "router_accuracy": float(np.mean(self.z.argmax(1) == self.origin)),
        }


def played(method: str, cohort: int | None = None) -> Hand:
    return _played(method, cohort)


@cache
def _played(method: str, cohort: int | None) -> Hand:
    ready = prepared(method)
    config = validate(TABLES | {"method": {"name": method}})
    algorithm, federation = method_of(config.method, config.training, ready)(), ready.federation()
    *_, last = run(algorithm, federation, 1 if cohort else 6, cohort=cohort)
    return Hand(algorithm, federation, ready.task, last)
