"""What a user's program adds to an experiment: names of clients, a method, a loss, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedshift import recipes
from fedshift.client.objectives import Term
from fedshift.experiments.config.schema import Method
from fedshift.tasks.task import Task

# A function of (probabilities [n, K], labels [n]) of the target's test examples; gives a number.
Metric = Callable[[NDArray[np.float64], NDArray[np.int64]], float]


@dataclass(frozen=True, eq=False)
class Custom:
    """What an experiment has beyond its configuration; by default nothing.

    clients        names of the training clients [M], in order
    method         replaces the configured recipe
    loss           replaces the cross-entropy in the local objective
    schedule       a function of the round t, replaces the configured local learning rate
    metrics        the user's functions by name, measured wherever target accuracy is
    class_weights  [K], how much an example of each class counts in local training
    files          SHA-256 of the files that the configuration names, by path
    head           prefixes of the parameters that methods treat as the head; () means "head."
    mark           a hash of what no key of the configuration can hold; it tells checkpoints apart
    texts          more files for the run folder: their texts by name
    notes          sentences on the data that the user should read
    task           the task that a user's network is built for; None for one of the library's sets
    """

    clients: tuple[str, ...] = ()
    method: recipes.Recipe | None = None
    loss: Term | None = None
    schedule: Callable[[int], float] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    class_weights: Tensor | None = None
    head: tuple[str, ...] = ()
    mark: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    task: Task | None = None


def recipe_of(method: Method, custom: Custom) -> recipes.Recipe:
    """The method of an experiment: the user's, else the configured one."""
    return custom.method or recipes.recipe(method.name, method.options)
