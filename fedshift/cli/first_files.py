"""The two files that `fedshift init` writes: an experiment on a table, and its network."""

from __future__ import annotations

import json
import re

import torch

from fedshift.experiments.config.data import Data
from fedshift.tasks.building import Built
from fedshift.tasks.task import Task

CONFIG, NET = "experiment.toml", "net.py"

_CONFIG = """\
# Made by `fedshift init`. Every key: docs/configuration.md
name = {name}

[data]
source = {source}   # paths are relative to this file
client = {client}   # the column that says whose row it is
label = {label}   # the column to predict
{more}target = {target}   # where the model is used: a client, label shares, "pooled", "clients"
validation = {validation!r}   # share of each client's rows to choose by
test = {test!r}         # share for testing, where no client is the target

[model]
name = "net.py:Net"

[method]
{method}

[training]
rounds = 30
epochs = 1         # of each client per round
batch = 32
{steps}

[seeds]
run = 0
"""
_AWARE = """\
name = "fedpals"
ess = "auto"       # tries several effective sample sizes and keeps the best\
"""
# Adam for regression, because its steps do not grow with the numbers to predict, as SGD's do.
_OF_NUMBERS, _OF_CLASSES = 'optimizer = "adam"\nlr = 0.01', "lr = 0.1"
_PLAIN = 'name = "fedavg"    # `fedshift methods` lists all'

_NET = '''\
"""The network of {config}. Change it as you like: it is called once for each run."""

import math

from torch import Tensor, nn


class Net(nn.Module):
    """task.input_shape is the shape of one example, task.classes are the labels' names.

    task.outputs are the numbers to predict, where these are no classes.
    """

    def __init__(self, task):
        super().__init__()
        inputs = math.prod(task.input_shape)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU())
        self.head = nn.Linear(64, len(task.outputs or task.classes))

    def forward(self, x: Tensor) -> Tensor:
        return {answer}
'''


def config_text(data: Data, task: Task) -> str:
    """An experiment on the task that [data] describes; its paths are relative to its file."""
    more = {k: v for k, v in data.task_keys.items() if k not in ("client", "label", "target")}
    # FedPALS weighs clients by their labels; in regression, and without a label shift, FedAvg is
    # the method to begin with.
    aware = task.kind == "classification" and task.target.kind not in ("pooled", "clients")
    # The name becomes that of the run folder, in which no other characters are allowed.
    name = re.sub(r"[^\w.+=-]+", "-", task.name).strip("-.")[:80]
    return _CONFIG.format(
        name=_text(name or "run"),
        source=_text(data.source),
        client=_text(data.client),
        label=_text(data.label),
        more="".join(f"{key} = {json.dumps(v, ensure_ascii=False)}\n" for key, v in more.items()),
        validation=data.validation,
        test=data.test,
        target=_target(data.target),
        steps=_OF_NUMBERS if task.kind == "regression" else _OF_CLASSES,
        method=_AWARE if aware else _PLAIN,
    )


def net_text(built: Built) -> str:
    """A network with one hidden layer, for any task whose inputs are a single tensor.

    In regression its output is scaled by the sd and shifted by the mean of the clients' numbers.
    """
    answer = "self.head(self.body(x))"
    if built.task.kind == "regression":
        due = torch.cat([client.x[:, -1] for client in built.task.clients]).double()
        mean, sd = float(due.mean()), float(due.std(correction=0)) or 1.0
        answer = f"{answer} * {sd:.4g} + {mean:.4g}  # their sd and mean at the clients"
    return _NET.format(config=CONFIG, answer=answer)


def _target(target: object) -> str:
    """A target in TOML: label shares as an inline table, all else as text."""
    if not isinstance(target, dict):
        return _text(target)
    return f"{{{', '.join(f'{_text(label)} = {share!r}' for label, share in target.items())}}}"


def _text(value: object) -> str:
    return json.dumps(str(value), ensure_ascii=False)  # TOML writes text as JSON does
