"""A network as a function of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedshift.arguments import called, check_fields
from fedshift.errors import InputError
from fedshift.pooling import pooled, with_pools
from fedshift.seeds import key
from fedshift.sketch import sketched
from fedshift.stateless import Places, call, places
from fedshift.tree import Params

NOTHING = contextlib.nullcontext()
Augment = Callable[[Tensor, int], Tensor]


@sketched
@dataclass(frozen=True, eq=False)
class Model:
    """An `nn.Module` seen as (parameters, buffers, x) -> {"logits", maybe "features", ...}.

    The module's own tensors are never read after `init` and never written: parameters and buffers
    come from outside at each call. A module may return a tensor (its logits) or a dictionary.

    freeze_norm: BatchNorm keeps to the running statistics that it was given, in training as well,
    and leaves them as they are; its scale and shift are trained. (DomainBed's `freeze_bn`, which
    the FedPALS authors' code uses with pretrained weights.)
    augment: (x, seed) -> x of the same shape, what inputs go through before a gradient is taken
    (`client.local.gradient_of`); no other pass, evaluation least of all, uses it.

    In an `nn.Sequential` called as one, max-pools take the way that costs less, and a rectifier
    right before one is computed after it (`fedshift.pooling`).

    mixes: whether an example's output in training depends on the others of its batch (BatchNorm).

    Raises InputError for freeze_norm with a module that has no BatchNorm.
    """

    net: nn.Module
    freeze_norm: bool = False
    augment: Augment | None = None
    _places: Places = field(init=False, repr=False)
    _pools: tuple[nn.Sequential, ...] = field(init=False, repr=False)
    _random: bool = field(init=False, repr=False)
    mixes: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_network(self.net)
        check_fields(self)
        # Looked up once: at every step it would cost as much as a small layer.
        object.__setattr__(self, "_places", places(self.net))
        object.__setattr__(self, "_pools", with_pools(self.net))
        object.__setattr__(self, "_random", any(map(_is_random, self.net.modules())))
        normed = any(map(_is_batch_norm, self.net.modules()))
        object.__setattr__(self, "mixes", normed and not self.freeze_norm)
        if self.freeze_norm and not normed:
            raise InputError(
                "freeze_norm=True, but the network has no BatchNorm to freeze; leave it out"
            )

    def init(self) -> tuple[Params, Params]:
        """(parameters, buffers) as the module holds them now, copied."""
        params = {k: v.detach().clone() for k, v in self.net.named_parameters()}
        buffers = {k: v.detach().clone() for k, v in self.net.named_buffers()}
        return params, buffers

    def __call__(self, params: Params, buffers: Params, x: Tensor) -> Params:
        """The outputs in evaluation mode; buffers are read only."""
        return self._outputs(params, buffers, x, training=False)

    def train(
        self, params: Params, buffers: Params, x: Tensor, seed: int = 0
    ) -> tuple[Params, Params]:
        """(outputs, buffers after the pass) in training mode; the given buffers stay as they are.

        Buffers are copied before the pass because BatchNorm writes into those that it is given.
        Dropout knows no generator of its own: it draws from the global one, which is set to `seed`
        for the pass and put back as it was.
        """
        after = {k: v.clone() for k, v in buffers.items()}
        if not self._random:
            return self._outputs(params, after, x, training=True), after
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._outputs(params, after, x, training=True), after

    def _outputs(self, params: Params, buffers: Params, x: Tensor, *, training: bool) -> Params:
        if self.net.training != training:
            self.net.train(training)
        # At each pass, because a module starts in training mode and others may switch it.
        if training and self.freeze_norm:
            for module in filter(_is_batch_norm, self.net.modules()):
                module.eval()
        # Where there is nothing to turn, entering a block would cost as much as a small layer.
        with pooled(self._pools) if self._pools else NOTHING:
            out = call(self.net, self._places, params | buffers, x)
        return out if isinstance(out, dict) else {"logits": out}


def check_network(net: object) -> None:
    """Raise InputError unless it is a network whose tensors are there."""
    if isinstance(net, Model):
        raise InputError("Model(net) is given a Model; use that one as it is")
    if not isinstance(net, nn.Module):
        cure = f"; give an object of it, {net.__name__}(...)" if isinstance(net, type) else ""
        raise InputError(f"Model(net) must be given an nn.Module, got {called(net)}{cure}")
    for name, v in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(v):
            raise InputError(
                f'the network\'s "{name}" has no shape yet (lazy layers): call net(x[:2]) once, '
                "before Model(net)"
            )


def _is_random(module: nn.Module) -> bool:
    """Torch's dropout layers, and those of its layers that drop by a number (RNNs, attention)."""
    rate = getattr(module, "dropout", 0.0)
    drops = isinstance(rate, float) and rate > 0
    return drops or isinstance(module, nn.modules.dropout._DropoutNd)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def build(make: Callable[[], nn.Module], seed: int, *, freeze_norm: bool = False) -> Model:
    """A model whose first weights depend on `seed` alone; no global generator is left changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "init"))
        return Model(make(), freeze_norm)


def is_counter(v: Tensor) -> bool:
    """Whether a buffer counts something (BatchNorm's `num_batches_tracked`): never averaged."""
    return not v.is_floating_point()


def split_buffers(buffers: Params) -> tuple[Params, Params]:
    """(floating buffers, counters)."""
    return (
        {k: v for k, v in buffers.items() if not is_counter(v)},
        {k: v for k, v in buffers.items() if is_counter(v)},
    )


def dry_pass(model: Model, params: Params, buffers: Params, x: Tensor) -> Params:
    """The outputs of a pass that leaves no trace: evaluation mode, random state put back.

    Raises InputError for a model without parameters and one that fails on x.
    """
    if not params:
        raise InputError("the model has no parameters; there is nothing to train")
    held = {k: v.clone() for k, v in buffers.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(params, held, x)
    except Exception as e:
        own = next(iter(params.values())).dtype
        hint = f" (its parameters are {own}: give it x.to({own}))" if x.dtype != own else ""
        raise InputError(f"the model fails on inputs {x.dtype} {tuple(x.shape)}: {e}{hint}") from e


def dry_logits(model: Model, params: Params, buffers: Params, x: Tensor) -> Tensor:
    """Logits [n, C] of `dry_pass`.

    Raises InputError as `dry_pass`, and for a model that returns anything but logits with a row
    per input.
    """
    out = dry_pass(model, params, buffers, x)
    if "logits" not in out:
        raise InputError(f'the model returns {sorted(out)}; it must return "logits" [n, K]')
    logits = out["logits"]
    if not isinstance(logits, Tensor):
        raise InputError(
            f"the model's logits are a {type(logits).__name__}; its forward must return a tensor "
            '[n, K], or a dictionary {"logits": ...}'
        )
    if logits.ndim != 2 or len(logits) != len(x):
        raise InputError(
            f"the model gives logits {tuple(logits.shape)} for {len(x)} inputs; they must be "
            f"({len(x)}, K), a row per input and a column per class"
        )
    return logits


def check_classes(model: Model, x: Tensor, classes: int) -> None:
    """Refuse a model whose logits are not [n, classes] on a few inputs, before any training."""
    check_columns(dry_logits(model, *model.init(), x), classes)


def check_columns(logits: Tensor, classes: int) -> None:
    """Raise InputError unless logits [n, C] have a column for each of K classes, and no other."""
    n, columns = logits.shape
    if columns != classes:
        raise InputError(
            f"the model gives logits ({n}, {columns}) for {n} inputs; "
            f"the task has {classes} classes, so they must be ({n}, {classes})"
        )
