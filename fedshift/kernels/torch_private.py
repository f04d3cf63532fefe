"""Every private or undocumented name of torch that the package uses, with a public fallback.

A name is used only if this torch has it, it accepts our arguments, and the environment variable
FEDSHIFT_PLAIN is not 1 (`supported`). That variable turns off all shortcuts of this folder at once.
Training is then slower; some results differ by rounding, the others not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import has_torch_function

SWITCH = "FEDSHIFT_PLAIN"
# Earlier versions had a switch for each shortcut. Users may still set one of them to 0, which now
# turns off all shortcuts.
EARLIER = ("ONEDNN", "SHORT_BACKWARD", "AWAKE", "KEEP_MEMORY")

# Attributes in which a module stores its tensors and submodules, and its hooks.
HOLDERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _after_trial(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function, after a trial call: in another torch it may take other arguments."""
    function(*arguments, **named)
    return function


def _try_backward() -> Any:
    # requires_grad=True on creation, because vmap refuses `requires_grad_`.
    x = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)
    run = torch.autograd.Variable._execution_engine.run_backward
    options = {"allow_unreachable": True, "accumulate_grad": False}
    return _after_trial(run, ((2 * x).sum(),), (_ones(),), False, False, (x,), **options)


def _ones(*shape: int) -> Tensor:
    # Device and type are explicit, because a program may have changed torch's defaults.
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _try_max_pool() -> Any:
    place = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu")
    function = torch.ops.aten.max_pool2d_with_indices_backward.default
    given, x = _ones(1, 1, 1, 1), _ones(1, 1, 2, 2)
    return _after_trial(function, given, x, [2, 2], [2, 2], [0, 0], [1, 1], False, place)


# Functions, not values: a torch that lacks a name must still import this module. Each raises an
# exception if the name is missing or does not accept our arguments.
_NAMES: dict[str, Callable[[], Any]] = {
    "run_backward": _try_backward,
    "linear_pointwise": lambda: _after_trial(
        torch.ops.mkldnn._linear_pointwise.default,
        *(_ones(2, 3), _ones(4, 3), None, "none", [], ""),
    ),
    "log_softmax_backward": lambda: _after_trial(
        torch.ops.aten._log_softmax_backward_data.default,
        *(_ones(1, 2), _ones(1, 2), 1, torch.float32),
    ),
    "threshold_backward": lambda: _after_trial(
        torch.ops.aten.threshold_backward.default, _ones(2), _ones(2), 0.0
    ),
    "max_pool_backward": _try_max_pool,
    "global_hooks": lambda: nn.modules.module._has_any_global_hook,
    "is_wrapped": lambda: torch._C._functorch.is_functorch_wrapped_tensor,
    "holders": lambda: [getattr(nn.Identity(), name) for name in HOLDERS],
    "flat_weights": lambda: nn.RNN(1, 1, device="meta")._flat_weights,  # draws no weights
    "hooks": lambda: [getattr(nn.Identity(), name) for name in HOOKS],
    "version": lambda: torch.zeros(())._version,
    "any_dropout": lambda: nn.modules.dropout._DropoutNd,
    "any_batch_norm": lambda: nn.modules.batchnorm._BatchNorm,
}


@cache
def plain() -> bool:
    """Whether all shortcuts are turned off; the environment is read once in a process."""
    earlier = any(os.environ.get(f"FEDSHIFT_{name}") == "0" for name in EARLIER)
    return earlier or os.environ.get(SWITCH) == "1"


@cache
def private(name: str) -> Any:
    """What torch has under a private name.

    None if torch has no such name, if it refuses our arguments, or if shortcuts are turned off.
    """
    if plain():
        return None
    try:
        # The caller may have turned gradients off, and the trial calls need them.
        with torch.inference_mode(False), torch.enable_grad():
            return _NAMES[name]()
    except Exception:  # another version of torch may raise anything
        return None


def supported(*names: str) -> bool:
    """Whether all of these private names may be used."""
    return all(private(name) is not None for name in names)


def backward(loss: Tensor, at: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
    """The gradient of a loss [] by each tensor of `at`; None for those that it does not reach.

    The same as `torch.autograd.grad`, whose checks before it calls `run_backward` take a tenth of a
    small model's step. Raises RuntimeError unless the loss is a single number.
    """
    one = loss.new_ones(())
    # Tensor subclasses and torch function modes may override `grad`, so do not go around it.
    run = None if has_torch_function((loss, *at)) else private("run_backward")
    if run is None:
        return torch.autograd.grad(loss, at, one, allow_unused=True)
    grads: Sequence[Tensor | None] = run(
        (loss,), (one,), False, False, at, allow_unreachable=True, accumulate_grad=False
    )
    return grads


def onednn_linear(x: Tensor, w: Tensor) -> Tensor:
    """x w^T [n, h] of x [n, d] and w [h, d] by oneDNN; torch.nn.functional.linear uses MKL."""
    multiply = private("linear_pointwise")
    if multiply is None:
        return linear(x, w)
    product: Tensor = multiply(x, w, None, "none", [], "")
    return product


def log_softmax_backward(given: Tensor, log: Tensor, dim: int) -> Tensor:
    """Gradient by the input of a log-softmax, from that by its output `log`:
    given - softmax * sum(given).
    """
    back = private("log_softmax_backward")
    if back is None:
        return given - log.exp() * given.sum(dim, keepdim=True)
    delta: Tensor = back(given, log, dim, log.dtype)
    return delta


def relu_backward(given: Tensor, out: Tensor) -> Tensor:
    """Gradient by the input of a ReLU, from that by its output `out`."""
    back = private("threshold_backward")
    if back is None:
        return given.masked_fill(out <= 0, 0.0)
    delta: Tensor = back(given, out, 0.0)
    return delta


def max_pool_backward(given: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """Gradient by the input x of a 2 x 2 max-pool that took the entries at the indices `place`."""
    back = private("max_pool_backward")
    if back is None:
        return nn.functional.max_unpool2d(given, place, [2, 2], [2, 2], output_size=x.shape)
    delta: Tensor = back(given, x, [2, 2], [2, 2], [0, 0], [1, 1], False, place)
    return delta


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules; True if torch does not say."""
    function = private("global_hooks")
    return function is None or bool(function())


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered for this module; True if torch does not say.

    Not switched off by FEDSHIFT_PLAIN: the answer only makes callers more careful.
    """
    return any(getattr(module, name, True) for name in HOOKS)


def version(v: Tensor) -> int | None:
    """A counter of writes to the tensor; None if torch does not say, or in inference mode."""
    return versions([v])[0]


def versions(tensors: Sequence[Tensor]) -> list[int | None]:
    """The `version` of each tensor."""
    # Asked once for all: it takes longer than to read a counter.
    if not supported("version"):
        return [None] * len(tensors)
    return [None if v.is_inference() else v._version for v in tensors]


def within_vmap(v: Tensor) -> bool:
    """Whether the tensor is batched by vmap over clients, so that its values cannot be read."""
    function = private("is_wrapped")
    if function is not None:
        return bool(function(v))
    try:
        v.untyped_storage()
    except NotImplementedError:  # raised for wrapped tensors, but also for sparse ones
        return v.layout == torch.strided
    return False


def tensors_of(module: nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """(holder, key, tensor or None) for each tensor of the module itself, not of its submodules.

    Assigning to holder[key] replaces the tensor. If private names may not be used, the holder is
    the module itself and the key is the name of an attribute: `tensor_at` then reads it, and
    nothing can be replaced.
    """
    if not supported("holders", "flat_weights"):
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        yield from ((module, k, v) for k, v in (*parameters, *buffers))
        return
    yield from ((module._parameters, k, v) for k, v in module._parameters.items())
    yield from ((module._buffers, k, v) for k, v in module._buffers.items())
    if isinstance(module, nn.RNNBase):  # its forward reads its weights from this list
        yield from ((module._flat_weights, k, v) for k, v in enumerate(module._flat_weights))


def tensor_at(holder: Any, key: Any) -> Any:
    """The tensor at a (holder, key) of `tensors_of`."""
    return getattr(holder, key) if isinstance(holder, nn.Module) else holder[key]


def parts_of(module: nn.Module) -> tuple[tuple[nn.Module | None, ...], int]:
    """(direct submodules, number of parameters and buffers of the module itself)."""
    if not supported("holders"):
        return tuple(v for _, v in module.named_children()), sum(1 for _ in tensors_of(module))
    return tuple(module._modules.values()), len(module._parameters) + len(module._buffers)


def is_dropout(module: nn.Module) -> bool:
    """Whether the module is one of torch's dropout layers."""
    public = (
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    )  # fmt: skip
    return isinstance(module, private("any_dropout") or public)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether the module is one of torch's batch normalisation layers."""
    public = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    return isinstance(module, private("any_batch_norm") or public)
