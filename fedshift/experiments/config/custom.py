"""What a user adds to an experiment: names of clients, a method, a loss, metrics."""

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

# (probabilities [n, K], labels [n]) -> a number, on the target's test examples.
Metric = Callable[[NDArray[np.float64], NDArray[np.int64]], float]


@dataclass(frozen=True, eq=False)
class Custom:
    """What an experiment has beyond its configuration; as it stands here, nothing.

    clients        names of the training clients [M], in order
    method         in place of the configured recipe
    loss           in place of the cross-entropy, in the local objective
    schedule       the local learning rate of round t, in place of the configured one
    metrics        by name, measured wherever target accuracy is
    class_weights  [K], the importance of an example of each class in local training
    files          SHA-256 of the files that the configuration names, by path
    head           prefixes of the parameters that some methods treat apart; () for "head."
    mark           what tells a run with these from others: checkpoints have it, too
    texts          to leave in the run folder, by name of the file
    notes          what its user should know of the data
    task           what a network of the user's is made for; None for a set of the library
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
