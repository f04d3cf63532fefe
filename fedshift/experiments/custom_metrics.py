"""Metrics of one's own, on the target's test examples."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.arguments import called, is_number
from fedshift.data import Examples, Task
from fedshift.errors import InputError, shown
from fedshift.experiments.custom import Metric
from fedshift.experiments.measuring import EXTRA, truth
from fedshift.experiments.served import measured
from fedshift.model import Model
from fedshift.record.rounds import ESTIMATES, Metrics
from fedshift.record.summary import Final
from fedshift.repeating import repeatable
from fedshift.tree import Params

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BATCH = 1000


def check_metrics(metrics: Mapping[str, Metric], kind: str = "classification") -> None:
    """Raise InputError for what is no function, or a name that results use for another number."""
    if not isinstance(metrics, Mapping):
        raise InputError(f'metrics is {called(metrics)}; give functions by name, as {{"auc": f}}')
    taken = {f.name for kind in (Metrics, Final) for f in fields(kind)} | measured()
    # What runs are chosen by is no user's, whatever is predicted.
    taken |= {*EXTRA[kind], *ESTIMATES}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w-]*", name):
            raise InputError(
                f'metrics: the name "{shown(str(name))}" must be letters, digits, _ and -, and '
                "begin with a letter"
            )
        if name in taken or name.startswith("sets_"):
            raise InputError(f'metrics: results have another number named "{name}"; rename yours')
        if not callable(metric):
            raise InputError(
                f'metrics["{name}"] is {called(metric)}; give a function of (probabilities [n, K], '
                "labels [n]) that returns a number"
            )


def answers(
    model: Model, params: Params, buffers: Params, x: Tensor, kind: str = "classification"
) -> Tensor:
    """What the model says in evaluation mode, in float64, of x [n, ...].

    Probabilities of classes [n, K] or of labels [n, L], or numbers [n].
    """

    def compute() -> Tensor:
        with torch.no_grad():
            parts = [model(params, buffers, x[s : s + BATCH])["logits"] for s in _starts(x)]
        out = torch.cat(parts).double()
        if kind == "regression":
            return out[:, 0]
        return out.sigmoid() if kind == "multilabel" else out.softmax(1)

    return repeatable(compute)


def _starts(x: Tensor) -> range:
    return range(0, max(1, len(x)), BATCH)


def metric_values(
    metrics: Mapping[str, Metric],
    model: Model,
    pairs: Sequence[tuple[Params, Params]],
    tests: Sequence[Examples],
    task: Task,
) -> dict[str, float]:
    """Every metric on all test sets together, each answered by the model of its place.

    Raises InputError for a metric that fails, or gives no number.
    """
    if not metrics:
        return {}
    both = list(zip(pairs, tests, strict=True))
    p = torch.cat([answers(model, *pair, one.x, task.kind) for pair, one in both]).numpy()
    y = torch.cat([truth(task, one) for one in tests]).numpy()
    return {name: _value(name, metric, p.copy(), y.copy()) for name, metric in metrics.items()}


def _value(name: str, metric: Metric, p: Floats, y: Ints) -> float:
    try:
        value = metric(p, y)
    except Exception as e:
        raise InputError(
            f"metric {name} fails on probabilities {p.shape} and labels {y.shape}: "
            f"{type(e).__name__}: {e}"
        ) from e
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if not is_number(value):
        raise InputError(f"metric {name} gave {called(value)}; it must return one number")
    return float(value) if math.isfinite(value) else math.nan
