"""The user's own metrics, computed on the target's test examples."""

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
from fedshift.evaluation.corrected import shifted
from fedshift.evaluation.serving import by_model
from fedshift.experiments.config.custom import Metric
from fedshift.experiments.config.user_code import file_of, place_of, raised
from fedshift.experiments.measures.served import serving_metrics
from fedshift.experiments.measures.task_scores import EXTRA, truth
from fedshift.model import Model
from fedshift.randomness import put_back, states, undrawn
from fedshift.record.rounds import ESTIMATES, Metrics
from fedshift.record.summary import Final
from fedshift.server.prior import Correction
from fedshift.tree import Params

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BATCH = 1000
# The arguments of a metric, by the kind of the task.
EXPECTED = {
    "classification": "(probabilities [n, K], labels [n])",
    "regression": "(predicted [n], true [n])",
    "multilabel": "(probabilities [n, L], labels [n, L])",
}


def check_metrics(metrics: Mapping[str, Metric], kind: str = "classification") -> None:
    """Raise InputError for a metric that is no function, or whose name results use already."""
    if not isinstance(metrics, Mapping):
        raise InputError(f'metrics is {called(metrics)}; give functions by name, as {{"auc": f}}')
    taken = {f.name for kind in (Metrics, Final) for f in fields(kind)} | serving_metrics()
    # Rounds and settings are chosen by these numbers: a metric of the same name would replace them.
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
                f'metrics["{name}"] is {called(metric)}; give a function of {EXPECTED[kind]} that '
                "returns one number"
            )


def answers(
    model: Model, params: Params, buffers: Params, x: Tensor, kind: str = "classification",
    correction: Correction | None = None,
) -> Tensor:  # fmt: skip
    """The model's answers for x [n, ...] in evaluation mode, in float64.

    They are probabilities of classes [n, K] or of labels [n, L], or numbers [n]. correction: is
    applied to the logits first.
    """

    def compute() -> Tensor:
        with torch.no_grad():
            parts = [model(params, buffers, x[s : s + BATCH])["logits"] for s in _starts(x)]
        out = torch.cat(parts).double()
        out = out if correction is None else shifted(out, correction)
        if kind == "regression":
            return out[:, 0]
        return out.sigmoid() if kind == "multilabel" else out.softmax(1)

    with undrawn(model.net):
        return compute()


def _starts(x: Tensor) -> range:
    return range(0, max(1, len(x)), BATCH)


def metric_values(
    metrics: Mapping[str, Metric],
    model: Model,
    pairs: Sequence[tuple[Params, Params]],
    tests: Sequence[Examples],
    task: Task,
) -> dict[str, float]:
    """Every metric on all test sets together; the i-th set is answered by the i-th model.

    NaN for a metric without a finite value. Raises InputError for a metric that fails or gives no
    number.
    """
    if not metrics:
        return {}
    parts = dict[int, Tensor]()
    for ids in by_model(pairs):
        x = torch.cat([tests[i].x for i in ids])
        sizes = [len(tests[i]) for i in ids]
        each = torch.split(answers(model, *pairs[ids[0]], x, task.kind), sizes)
        parts |= zip(ids, each, strict=True)
    p = torch.cat([parts[i] for i in range(len(tests))]).numpy()
    y = torch.cat([truth(task, one) for one in tests]).numpy()
    values = {name: _value(name, f, p.copy(), y.copy(), task) for name, f in metrics.items()}
    return {name: v if math.isfinite(v) else math.nan for name, v in values.items()}


def try_metrics(metrics: Mapping[str, Metric], model: Model, task: Task) -> None:
    """Call each metric before anything is trained; raise InputError for one that fails.

    It gets what it will get after training: the labels of all test rows, and the first model's
    answers. A few rows would not do, since a correct metric may fail on them. Generators that it
    draws from are put back, so that the trial does not change the run.
    """
    if not metrics:
        return
    before, examples = states(), task.test
    p = answers(model, *model.init(), examples.x, task.kind).numpy()
    y = truth(task, examples).numpy()
    try:
        for name, metric in metrics.items():
            value = _value(name, metric, p.copy(), y.copy(), task)
            if math.isinf(value):
                cure = "or NaN where it has none"
                raise InputError(f"{_named(name, metric)} gave {value}; {_due(task)}, {cure}")
    finally:
        put_back(before)


def _value(name: str, metric: Metric, p: Floats, y: Ints, task: Task) -> float:
    try:
        value = metric(p, y)
    except InputError as e:  # from a function named in a file; it says already what is expected
        arrays = f"arrays {p.shape} and {y.shape}"
        raise InputError(f"{_named(name, metric)} fails on {arrays}: {e}") from e
    except (Exception, SystemExit) as e:
        raise InputError(
            f"{_named(name, metric)} fails on arrays {p.shape} and {y.shape}: "
            f"{raised(e, file_of(metric))}; {_due(task)}"
        ) from e
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    if not is_number(value):
        raise InputError(f"{_named(name, metric)} gave {called(value)}; {_due(task)}")
    return float(value)


def _named(name: str, metric: Metric) -> str:
    place = place_of(metric)
    return f"metric {name} ({place})" if place else f"metric {name}"


def _due(task: Task) -> str:
    return f"a metric is a function of {EXPECTED[task.kind]} that returns one number"
