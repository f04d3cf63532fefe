"""The fields of a task, with checks."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedshift.arguments import called, check_number, check_whole
from fedshift.errors import InputError, unknown
from fedshift.tasks.columns import Rules
from fedshift.tasks.names import Coded
from fedshift.tasks.rows import Inputs
from fedshift.tasks.target import Target

KINDS = ("classification", "regression", "multilabel")


@dataclass(frozen=True, eq=False, repr=False)
class TaskFields(ABC):
    """The fields of `fedshift.Task`: the rows as they were read, and how to cut them.

    inputs, labels, places (the client of each row) and values (numbers to predict) have an entry
    for each row. The last `outside` rows are a test set, which belongs to no client.
    """

    name: str
    kind: str
    clients: tuple[str, ...]
    target: Target
    seed: int
    inputs: Inputs = field(repr=False)
    labels: Coded = field(repr=False)
    places: Coded = field(repr=False)
    values: Tensor | None = None
    outside: int = 0
    validation: float = 0.2
    test: float = 0.2
    bins: int = 10
    rules: Rules = Rules()
    notes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    transform: Callable[[Any, torch.Generator], Any] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind", self.kind, KINDS)
        check_whole("seed", self.seed, 0)
        check_whole("bins", self.bins, 2)
        if self.transform is not None and not callable(self.transform):
            raise InputError(f"transform is {called(self.transform)}; give a function of (x, g)")
        for name in ("validation", "test"):
            share = getattr(self, name)
            check_number(name, share)
            if not 0 <= share < 1 or (name == "test" and share == 0):
                raise InputError(f"{name}={share}: give a share of each client's rows, 0.2 for 20%")
