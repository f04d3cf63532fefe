"""Networks as users give them to `fit`: a name, a module, or a function that makes one."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from fedshift.arguments import called
from fedshift.errors import InputError
from fedshift.experiments.config.custom_network import Shape, Unpacking, packed
from fedshift.model import Model, build
from fedshift.modules import check_network
from fedshift.tasks.layout import Layout
from fedshift.tasks.task import Task

ALIKE = (
    "Every seed starts from the weights that the given network had; give a function of the task "
    "to start each from weights of its own."
)


def first_model(
    net: Any, task: Task | Shape, seed: int, layout: Layout | None, *, freeze_norm: bool = False
) -> Model:
    """The network with its first weights: a copy of a module, or made by a function under `seed`.

    Raises InputError for any other object, and for a function that gives no module.
    """
    augment = None
    if isinstance(net, Model):
        net, freeze_norm, augment = net.net, freeze_norm or net.freeze_norm, net.augment
    if isinstance(net, nn.Module):
        check_network(net)  # before the copy, which has no hooks
        return Model(packed(copy.deepcopy(net), layout), freeze_norm, augment)
    if not callable(net):
        raise InputError(
            f"net is {called(net)}; give a torch.nn.Module, a function of the task that makes one, "
            'or a name such as "mlp"'
        )
    return build(lambda: packed(_made(net, task), layout), seed, freeze_norm=freeze_norm)


def inner(net: nn.Module) -> nn.Module:
    """The user's network, without the wrapper that unpacks its inputs."""
    return net.net if isinstance(net, Unpacking) else net


def _made(net: Callable[..., Any], task: Task | Shape) -> nn.Module:
    name = getattr(net, "__name__", type(net).__name__)
    count = _needs(net)
    if count > 1:
        raise InputError(
            f"net: {name} needs {count} arguments; give a function of the task alone, such as "
            f"lambda task: {name}(task.input_shape[0], len(task.classes))"
        )
    made = net(*[task][:count])
    if not isinstance(made, nn.Module):
        raise InputError(f"net: {name} returned {called(made)}; it must return a torch.nn.Module")
    return made


def _needs(net: Callable[..., Any]) -> int:
    """The number of arguments without a default; 1 if Python cannot tell."""
    try:
        parameters = inspect.signature(net).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in parameters)


def reference_of(net: Any) -> str | None:
    """ "module:Name" of what makes the network, if another process can import and call it.

    None if it is defined in a notebook, a script or a function, and for a module whose class needs
    arguments.
    """
    made = type(net) if isinstance(net, nn.Module) else net
    module, name = getattr(made, "__module__", None), getattr(made, "__qualname__", "")
    if isinstance(net, str) or module in (None, "__main__") or not name or "<" in name:
        return None
    # A class of torch can be called without what is in the module: nn.Sequential() has no layers.
    if isinstance(net, nn.Module) and (_needs(made) or module.startswith("torch.")):
        return None
    return f"{module}:{name}"


def referred(reference: str, task: Task | Shape, layout: Layout | None) -> Model | None:
    """The network of a reference; None if it cannot be made any more."""
    module, _, name = str(reference).partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:
        return None  # no network is made by Python's own modules: the folder is damaged or hostile
    try:
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        if target.__module__ != module:
            return None
        return first_model(target, task, 0, layout)
    except (Exception, SystemExit):  # another version of the user's module may raise anything
        return None
