"""Networks that are chains of linear layers and ReLUs, with a gradient in closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, cast

from torch import nn

from fedshift.errors import UnfitError
from fedshift.model import Model

# Attributes in which a module stores its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Chained(Protocol):
    """A network with a method that lists the modules which, applied in turn, give its logits."""

    def chain(self) -> Sequence[nn.Module]: ...


class Layer(NamedTuple):
    """z = a W^T + b, the names of W and b (or None), and whether a ReLU follows."""

    weight: str
    bias: str | None
    relu: bool


def layers_of(model: Model, dims: int) -> tuple[Layer, ...]:
    """The layers of a model for inputs x [n, ...] of `dims` dimensions.

    Raises UnfitError, with the reason, unless the network is an `nn.Sequential` (or `Chained`) of
    `nn.Flatten`, `nn.Linear` and `nn.ReLU` (subclasses are refused), each ReLU after a linear
    layer, the last layer linear. Hooks, shared parameters, parameters outside of these layers,
    buffers and augmentation are refused, too: the closed form would ignore them.
    """
    if model.augment is not None:
        raise not_dense("the model augments its inputs")
    names = {id(v): k for k, v in model.net.named_parameters()}
    layers: list[Layer] = []
    flat = dims <= 2  # vectors need no Flatten
    for module in _modules(model.net):
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif type(module) is nn.Linear and flat:
            bias = None if module.bias is None else names[id(module.bias)]
            layers.append(Layer(names[id(module.weight)], bias, relu=False))
        elif type(module) is nn.ReLU and layers:
            layers[-1] = layers[-1]._replace(relu=True)
        else:
            kind = type(module).__name__
            raise not_dense(f"the network has {kind} where only Flatten, Linear or ReLU may be")
    # Every parameter must appear exactly once: a shared one would need the sum of two gradients.
    used = [name for layer in layers for name in layer[:2] if name is not None]
    if sorted(used) != sorted(names.values()):
        raise not_dense("layers share parameters, or the network has others beside its layers")
    if not layers or layers[-1].relu or any(True for _ in model.net.buffers()):
        raise not_dense("the network does not end with a linear layer, or has buffers")
    return tuple(layers)


def _modules(net: nn.Module) -> Iterator[nn.Module]:
    """The modules of a chain in order, with nested chains expanded."""
    if any(getattr(net, name, True) for name in HOOKS):
        raise not_dense(f"{type(net).__name__} has hooks")
    if type(net) is nn.Sequential:
        inner: Sequence[nn.Module] = tuple(net)
    # Ask the class: on an instance, nn.Module searches long before it misses an attribute.
    elif hasattr(type(net), "chain") and _of_one_class(net):
        inner = cast(Chained, net).chain()
    else:
        yield net
        return
    for module in inner:
        yield from _modules(module)


def _of_one_class(net: nn.Module) -> bool:
    """Whether `chain` and `forward` come from one class.

    A subclass that overrides `forward` alone computes something that `chain` does not describe.
    """
    chain, forward = (
        next(kind for kind in type(net).__mro__ if name in vars(kind))
        for name in ("chain", "forward")
    )
    return chain is forward


def not_dense(why: str) -> UnfitError:
    """The error for something that cannot be trained densely, with the reason."""
    return UnfitError(
        f"the backend dense trains chains of linear layers and ReLUs by plain SGD alone: {why}. "
        "Use the backend stacked, loop or workers"
    )
