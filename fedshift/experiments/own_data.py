"""From data of one's own, which are cut and encoded already, to what an experiment runs on."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedshift.data import Task
from fedshift.datasets import Dataset
from fedshift.experiments.config import Config
from fedshift.experiments.networks import network
from fedshift.experiments.own import Own, recipe_of
from fedshift.experiments.prepared import Prepared
from fedshift.experiments.settings import gate_of
from fedshift.model import Model
from fedshift.outputs import check_classes


class Built(Protocol):
    """What is needed of `fedshift.tasks.Built`."""

    @property
    def task(self) -> Task:
        """The federation and its target."""

    @property
    def data(self) -> Dataset:
        """The training rows, from which the oracle draws."""

    @property
    def pool(self) -> NDArray[np.int64]:
        """Row numbers there that nothing is held out of."""

    @property
    def digest(self) -> str:
        """SHA-256 of the content and of how it was cut."""


def prepare_built(
    config: Config, built: Built, model: Model | None = None, own: Own = Own()
) -> Prepared:
    """The experiment on these data; model: the first one, else the network of [model].

    Raises InputError for a network that does not fit the data.
    """
    task, seeds = built.task, config.seeds.resolved()
    x, classes = task.clients[0].x[:2], len(task.classes)
    if model is None:
        routed = len(task.clients) if recipe_of(config, own).traits.router else None
        model = network(config.model, tuple(x.shape[1:]), classes, seeds.init, routed)
    check_classes(model, x, classes)
    target = tuple(task.target.tolist())
    gate = gate_of(config.training, target)
    return Prepared(
        task, model, seeds, built.data, built.pool, built.digest, target, gate=gate, own=own
    )
