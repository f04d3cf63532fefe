"""A user's network, which an experiment file names as "net.py:Net"."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.experiments.config.python_names import is_python, load_python
from fedshift.model import Model, build
from fedshift.tasks.layout import Layout


class Shape(NamedTuple):
    """What a user's network is built for if there is no `fedshift.Task`.

    There is none for a data set of the library, nor for a run folder, which keeps only this of it.
    """

    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    kind: str = "classification"


class Unpacking(nn.Module):
    """A network of several inputs behind one input x [n, D], into which a layout packs them."""

    def __init__(self, net: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.net, self.layout = net, layout

    def forward(self, x: Tensor) -> Any:
        """The network's outputs for the inputs packed in x."""
        given = self.layout.unpack(x)
        out = self.net(*given) if isinstance(given, tuple) else self.net(given)
        return _as_column(out) if self.layout.targets else out


def _as_column(out: Any) -> Any:
    """Outputs [n], a number per example, as [n, 1]."""
    if isinstance(out, dict):
        return {k: _as_column(v) if k == "logits" else v for k, v in out.items()}
    return out[:, None] if isinstance(out, Tensor) and out.ndim == 1 else out


def packed(net: nn.Module, layout: Layout | None) -> nn.Module:
    """The network behind the packed input x of a layout; unchanged without a layout."""
    return net if layout is None else Unpacking(net, layout)


def custom_network(
    name: str, task: Any, seed: int, layout: Layout | None = None, *, freeze_norm: bool = False
) -> Model:
    """The network that `model.name` names, with first weights from `seed`.

    task: a `fedshift.Task` or a `Shape`; the user's class or function gets it. One that needs two
    arguments gets the input's shape and the number of outputs instead. layout: how x packs several
    inputs, or None. Raises InputError, with file and line, if the result is no torch.nn.Module.
    """
    named = load_python("model.name", name)
    if isinstance(named.value, nn.Module):
        raise InputError(
            f"{named.where} ({named.place}) is one network, and each run starts with its own; "
            f"expected {named.expects}"
        )
    outputs = len(task.outputs or task.classes)
    given = (task.input_shape, outputs) if named.needs == 2 else (task,)

    def make() -> nn.Module:
        return packed(named.call(lambda net: isinstance(net, nn.Module), *given), layout)

    return build(make, seed, freeze_norm=freeze_norm)


def placing(name: str) -> contextlib.AbstractContextManager[None]:
    """Within the block, errors get the file and line of the network, if it is a user's."""
    if not is_python(name):
        return contextlib.nullcontext()
    return load_python("model.name", name).placing()
