"""A network as a function of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.errors import InputError
from fedshift.seeds import key
from fedshift.tree import Params


@dataclass(frozen=True, eq=False)
class Model:
    """An `nn.Module` seen as (parameters, buffers, x) -> {"logits", maybe "features", ...}.

    The module's own tensors are never read after `init` and never written: parameters and buffers
    come from outside at each call. A module may return a tensor (its logits) or a dictionary.
    """

    net: nn.Module

    def init(self) -> tuple[Params, Params]:
        """(parameters, buffers) as the module holds them now, copied."""
        params = {k: v.detach().clone() for k, v in self.net.named_parameters()}
        buffers = {k: v.detach().clone() for k, v in self.net.named_buffers()}
        return params, buffers

    def __call__(self, params: Params, buffers: Params, x: Tensor) -> Params:
        """The outputs in evaluation mode; buffers are read only."""
        return self._outputs(params, buffers, x, training=False)

    def train(self, params: Params, buffers: Params, x: Tensor) -> tuple[Params, Params]:
        """(outputs, buffers after the pass) in training mode; the given buffers stay as they are.

        Buffers are copied before the pass because BatchNorm writes into those that it is given.
        """
        after = {k: v.clone() for k, v in buffers.items()}
        return self._outputs(params, after, x, training=True), after

    def _outputs(self, params: Params, buffers: Params, x: Tensor, *, training: bool) -> Params:
        if self.net.training != training:
            self.net.train(training)
        out = functional_call(self.net, (params, buffers), (x,))
        return out if isinstance(out, dict) else {"logits": out}


def build(make: Callable[[], nn.Module], seed: int) -> Model:
    """A model whose first weights depend on `seed` alone; no global generator is left changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "init"))
        return Model(make())


def is_counter(v: Tensor) -> bool:
    """Whether a buffer counts something (BatchNorm's `num_batches_tracked`): never averaged."""
    return not v.is_floating_point()


def split_buffers(buffers: Params) -> tuple[Params, Params]:
    """(floating buffers, counters)."""
    return (
        {k: v for k, v in buffers.items() if not is_counter(v)},
        {k: v for k, v in buffers.items() if is_counter(v)},
    )


def check_classes(model: Model, x: Tensor, classes: int) -> None:
    """Refuse a model whose logits are not [n, classes] on a few inputs, before any training."""
    params, buffers = model.init()
    with torch.no_grad():
        out = model(params, buffers, x)
    if "logits" not in out:
        raise InputError(f'the model returns {sorted(out)}; it must return "logits" [n, K]')
    if out["logits"].shape != (len(x), classes):
        raise InputError(
            f"the model gives logits {tuple(out['logits'].shape)} for {len(x)} inputs; "
            f"the task has {classes} classes, so they must be ({len(x)}, {classes})"
        )
