"""Facts on a module: its tensors, and whether its layers draw, normalise, or are trained."""

from __future__ import annotations

import torch
from torch import nn

from fedshift.arguments import called
from fedshift.errors import InputError
from fedshift.kernels.torch_private import is_dropout

# Types of tensors that can be averaged, sent and kept; not float8, nor those of quantised layers.
KINDS = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64,
}  # fmt: skip


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


def is_random(module: nn.Module) -> bool:
    """Whether it is a dropout layer, or one with a positive `dropout` (RNNs, attention)."""
    # An attribute of that name may also be a layer, which is looked at by itself.
    rate = getattr(module, "dropout", 0.0)
    drops = isinstance(rate, float) and rate > 0
    return drops or is_dropout(module)


def fixed_in(net: nn.Module) -> frozenset[str]:
    """Names of the parameters whose `requires_grad` is False."""
    return frozenset(k for k, v in net.named_parameters() if not v.requires_grad)


def is_frozen(layer: nn.Module) -> bool:
    """Whether it has parameters, and none whose `requires_grad` is True."""
    flags = [v.requires_grad for v in layer.parameters()]
    return bool(flags) and not any(flags)
