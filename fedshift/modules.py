"""Facts on a module: its tensors, and whether its layers draw, normalise, or are trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fedshift.arguments import called
from fedshift.errors import InputError, nearest, shown
from fedshift.kernels.torch_private import within_vmap
from fedshift.tree import Params

# Types of tensors that can be averaged, sent and kept; not float8, nor those of quantised layers.
KINDS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64,
}  # fmt: skip
DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def check_network(net: object) -> None:
    """Raise InputError unless it is a network with initialised, dense tensors."""
    if not isinstance(net, nn.Module):
        cure = f"; give an object of it, {net.__name__}(...)" if isinstance(net, type) else ""
        raise InputError(f"Model(net) must be given an nn.Module, got {called(net)}{cure}")
    for name, trained in net.named_parameters():
        # Training puts other tensors in the parameters' place, whose gradients no hook would see.
        if trained._backward_hooks or getattr(trained, "_post_accumulate_grad_hooks", None):
            raise InputError(
                f'the network\'s "{name}" has a hook on its gradient, which would not act in '
                "training: remove it, and fix parameters by requires_grad=False"
            )
    for name, v in (*net.named_parameters(), *net.named_buffers()):
        if isinstance(v, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise InputError(
                f'the network\'s "{name}" has no shape yet (lazy layers): call net(x[:2]) once, '
                "before Model(net)"
            )
        if v.dtype not in KINDS or v.layout != torch.strided:
            form = "sparse" if v.layout != torch.strided else v.dtype
            raise InputError(
                f'the network\'s "{name}" is {form}; parameters and buffers must be dense, of type '
                "float16 to float64, bfloat16, complex, bool or integer. Another kind of constant "
                "can be a plain attribute of its module"
            )


def names_of(net: nn.Module) -> dict[str, str]:
    """The name of each tensor of the network by its path, such as "body.0.weight".

    A tensor that several modules share has several paths, and one name.
    """
    # By id: of tied weights only one path is listed without duplicates.
    names = {id(v): k for k, v in (*net.named_parameters(), *net.named_buffers())}
    # Module by module, since one that is used twice has two paths, and is to be filled once.
    return {
        path: names[id(v)]
        for prefix, module in net.named_modules()
        for path, v in (
            *module.named_parameters(prefix, recurse=False, remove_duplicate=False),
            *module.named_buffers(prefix, recurse=False, remove_duplicate=False),
        )
    }


def misfit(names: Collection[str], tensors: Params) -> InputError:
    """The error for tensors that do not fit a network; names the first unknown or missing one."""
    some = ", ".join(list(dict.fromkeys(names))[:8])
    for name in tensors:
        if name not in names:
            return InputError(
                f'the network has no parameter or buffer "{shown(name)}"; it has {some}.'
                f"{nearest(name, names)}"
            )
    missing = next(name for name in names if name not in tensors)
    return InputError(
        f'"{missing}" is missing among the parameters and buffers given; the network has '
        f"{some}: give all of them, as model.init() has them"
    )


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is one of torch's batch normalisation layers."""
    return isinstance(module, NORMS)


def is_random(module: nn.Module) -> bool:
    """Whether it is a dropout layer, or one with a positive `dropout` (RNNs, attention)."""
    # An attribute of that name may also be a layer, which is looked at by itself.
    rate = getattr(module, "dropout", 0.0)
    return isinstance(module, DROPOUTS) or (isinstance(rate, float) and rate > 0)


def fixed_in(net: nn.Module) -> frozenset[str]:
    """Names of the parameters whose `requires_grad` is False."""
    return frozenset(k for k, v in net.named_parameters() if not v.requires_grad)


def is_frozen(layer: nn.Module) -> bool:
    """Whether it has parameters, and none whose `requires_grad` is True."""
    flags = [v.requires_grad for v in layer.parameters()]
    return bool(flags) and not any(flags)


def passing(net: nn.Module) -> list[Tensor]:
    """Intermediate results that layers store as attributes (`weight_norm` its product).

    The next pass computes them again. `copy.deepcopy` refuses them, because they have a graph.
    """
    kept = (v for module in net.modules() for v in vars(module).values() if isinstance(v, Tensor))
    return [v for v in kept if within_vmap(v) or v.grad_fn is not None]


def check_own(net: nn.Module, outputs: Iterable[Tensor], leaves: Iterable[Tensor]) -> None:
    """Raise InputError if a network used its own tensors instead of the leaves that it was given.

    outputs: those of a `functional_call`, with their graph. It replaces tensors where modules store
    them, and puts the module's own back after the pass. So it misses tensors that the network also
    keeps elsewhere, and layers that run again in the backward pass.
    """
    # One number that depends on every output, so that one backward pass reaches every input.
    total = torch.stack([v.abs().sum().double() for v in outputs if v.requires_grad]).sum()
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    again: list[nn.Module] = []
    modules = set(net.modules())  # the hook also sees networks that other threads run meanwhile

    def note(module: nn.Module, inputs: Any) -> None:
        if module in modules:
            again.append(module)

    # Checkpointing calls modules again in the backward pass; only a global hook notices.
    hook = register_module_forward_pre_hook(note)
    try:
        reached = torch.autograd.grad(total, (*parameters.values(), *leaves), allow_unused=True)
    finally:
        hook.remove()
    if again:
        raise InputError(
            f"the network's {type(again[0]).__name__} is computed again in the backward pass, as "
            "by torch.utils.checkpoint, where it would have other weights; leave that out"
        )
    for name, grad in zip(parameters, reached, strict=False):  # parameters come first
        if grad is not None:
            raise InputError(
                f'the network reads "{name}" by another reference than its module\'s, as a list of '
                "parameters; read it by the module's attribute, else it is not trained"
            )
