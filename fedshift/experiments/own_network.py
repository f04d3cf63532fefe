"""A network of the user's, which an experiment file names as "net.py:Net"."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from fedshift.experiments.python_names import load_python
from fedshift.model import Model, build


class Shape(NamedTuple):
    """What a network is made for, where there is no `fedshift.Task`: of a set of the library's."""

    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    outputs: tuple[str, ...] = ()


def own_network(name: str, task: Any, seed: int) -> Model:
    """The network that `model.name` names, first weights from `seed`.

    task: a `fedshift.Task`, or a `Shape`. The name's class or function gets it, or, where it needs
    two arguments, the input's shape and the number of outputs. Raises InputError, with file and
    line, where no torch.nn.Module comes of it.
    """
    named = load_python(
        "model.name",
        name,
        "a class or function of the task (or of its input shape and number of outputs) that gives "
        "a torch.nn.Module",
    )
    outputs = len(task.outputs or task.classes)
    given = (task.input_shape, outputs) if named.needs == 2 else (task,)
    return build(lambda: named.call(lambda net: isinstance(net, nn.Module), *given), seed)
