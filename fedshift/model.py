"""A network as a function of its parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedshift.arguments import called, check_fields
from fedshift.errors import InputError
from fedshift.pooling import pooled, with_pools
from fedshift.randomness import SOURCES, Source, noted, own_generators, seeded, watched, watching
from fedshift.seeds import key
from fedshift.sketch import sketched
from fedshift.stateless import (
    Modules,
    Places,
    alike,
    call,
    changed,
    check_own,
    misfit,
    modules_of,
    places,
)
from fedshift.tree import Params

NOTHING = contextlib.nullcontext()
Augment = Callable[[Tensor, int], Tensor]


class UntriedError(InputError):
    """A network failed in training mode on the examples that it was tried on."""


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
    fixed: names of the parameters whose `requires_grad` is False, as a run begins. They stay as
    they are in all training, bit for bit, and no client sends them.

    Raises InputError for freeze_norm with a module that has no BatchNorm.
    """

    net: nn.Module
    freeze_norm: bool = False
    augment: Augment | None = None
    _places: Places = field(init=False, repr=False)
    _modules: Modules = field(init=False, repr=False)
    _writes: dict[bool, bool] = field(init=False, repr=False)
    _pools: tuple[nn.Sequential, ...] = field(init=False, repr=False)
    # By mode (training or not): which of the process's generators the network draws from.
    _draws: dict[bool, set[Source]] = field(init=False, repr=False)
    _generators: tuple[torch.Generator, ...] = field(init=False, repr=False)
    mixes: bool = field(init=False, repr=False)
    fixed: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_network(self.net)
        check_fields(self)
        # Looked up once: at every step it would cost as much as a small layer.
        object.__setattr__(self, "_places", places(self.net))
        object.__setattr__(self, "_modules", modules_of(self.net))
        # Whether a pass, in training or not, writes into its inputs; as far as that is known.
        object.__setattr__(self, "_writes", {})
        object.__setattr__(self, "_pools", with_pools(self.net))
        dropping: set[Source] = {"torch"} if any(map(_is_random, self.net.modules())) else set()
        object.__setattr__(self, "_draws", {True: dropping} if dropping else {})
        object.__setattr__(self, "_generators", own_generators(self.net))
        object.__setattr__(self, "fixed", _fixed(self.net))
        normed = any(map(_is_batch_norm, self.net.modules()))
        object.__setattr__(self, "mixes", normed and not self.freeze_norm)
        if self.freeze_norm and not normed:
            raise InputError(
                "freeze_norm=True, but the network has no BatchNorm to freeze; leave it out"
            )

    @torch.inference_mode(False)
    def init(self) -> tuple[Params, Params]:
        """(parameters, buffers) as the module holds them now, copied."""
        self._renew()
        params = {k: v.detach().clone() for k, v in self.net.named_parameters()}
        buffers = {k: v.detach().clone() for k, v in self.net.named_buffers()}
        return params, buffers

    def refresh(self, params: Params, buffers: Params) -> None:
        """Look at the network again if it has other layers or tensors now; costs microseconds.

        Raises InputError where tensors of the network are missing: it would use its own.
        """
        if changed(self._modules):
            self.__post_init__()
        if len(params) + len(buffers) != len(self._places):
            raise misfit(self._places, params | buffers)

    def check(self, params: Params, buffers: Params) -> None:
        """Raise InputError for tensors that the network does not have, and for missing ones."""
        self._renew()
        given = params | buffers
        if given.keys() != self._places.keys():
            raise misfit(self._places, given)

    def _renew(self) -> None:
        """Look at the network again if anything is where it was not, or fixed that was not."""
        moved = changed(self._modules) or not alike(self._places, places(self.net))
        if moved or self.fixed != _fixed(self.net):
            self.__post_init__()

    def loaded(self, params: Params, buffers: Params) -> nn.Module:
        """A copy of the network that holds these tensors, in evaluation mode.

        Tied weights are in all their places, and buffers that are not persistent are there, too:
        `load_state_dict` asks for the former by each of their names, and knows nothing of the
        latter. Raises InputError for tensors that are not the network's.
        """
        self.check(params, buffers)
        # What layers keep of their last pass (`weight_norm` its product) cannot be copied.
        passing = {
            id(v): torch.empty(0)
            for module in self.net.modules()
            for v in vars(module).values()
            if isinstance(v, Tensor) and (within_vmap(v) or v.grad_fn is not None)
        }
        net, given = copy.deepcopy(self.net, passing), params | buffers
        with torch.no_grad():
            for name, v in (*net.named_parameters(), *net.named_buffers()):
                if v.shape != given[name].shape:
                    raise InputError(
                        f'"{name}" is {tuple(given[name].shape)}, the network\'s {tuple(v.shape)}'
                    )
                v.copy_(given[name])
        return net.eval()

    def trainable(self, params: Params) -> Params:
        """The entries that training may move: all but those of `fixed`."""
        return {k: v for k, v in params.items() if k not in self.fixed} if self.fixed else params

    def __call__(self, params: Params, buffers: Params, x: Tensor) -> Params:
        """The outputs in evaluation mode; buffers are read only, and so is x.

        A network that draws random numbers in this mode, too, draws the same ones at each call.
        Raises InputError for names that the network does not have, and for such that are missing.
        """
        self.refresh(params, buffers)
        if self._is_quiet(training=False):
            return self._outputs(params, buffers, x, training=False)
        return self._seeded_outputs(params, buffers, x, 0, training=False)

    def train(
        self, params: Params, buffers: Params, x: Tensor, seed: int = 0
    ) -> tuple[Params, Params]:
        """(outputs, buffers after the pass) in training mode; the given buffers stay as they are.

        Buffers are copied before the pass because BatchNorm writes into those that it is given.
        A network that draws random numbers (dropout, noise) draws them from `seed`.
        """
        after = {k: v.clone() for k, v in buffers.items()}
        if self._is_quiet(training=True) or self._stays_unseeded(seed):
            return self._outputs(params, after, x, training=True), after
        return self._seeded_outputs(params, after, x, seed, training=True), after

    def look(self, params: Params, buffers: Params, x: Tensor) -> None:
        """Find out from which generators the network draws, by passes on x [n, ...], n > 1.

        A draw that these passes do not make is found later (`fedshift.randomness.repeatable`).
        Raises InputError for a network that fails in training mode, for one whose outputs no
        gradient leads back from, and for one whose passes differ though the seed is the same.
        """
        object.__setattr__(self, "_generators", own_generators(self.net))
        moving = {k: v.detach().requires_grad_() for k, v in self.trainable(params).items()}
        try:
            with watched():
                with torch.no_grad():
                    self(params, {k: v.clone() for k, v in buffers.items()}, x)
                first, second = (self.train(params | moving, buffers, x)[0] for _ in range(2))
        except Exception as e:
            raise UntriedError(
                f"the model fails in training mode on inputs {x.dtype} {tuple(x.shape)}: {e}"
            ) from e
        outputs = {name: v for name, v in first.items() if isinstance(v, Tensor)}
        if moving and outputs and not any(v.requires_grad for v in outputs.values()):
            raise InputError(
                "the network's outputs are cut off from its parameters (detach(), no_grad(), numpy "
                "or argmax in its forward): no gradient reaches them, and nothing would be learned"
            )
        if moving:
            check_own(self.net, outputs.values(), moving.values())
        for name, v in outputs.items():
            if not _alike(v, second[name]):
                raise InputError(
                    f'two passes of the network in training give other "{name}", though parameters '
                    "and seed are the same: it keeps a state of its own, or draws random numbers "
                    "from a generator that no seed reaches, such as numpy's default_rng; use "
                    "torch's functions without a generator, or a torch.Generator that is an "
                    "attribute of the network"
                )

    def _is_quiet(self, *, training: bool) -> bool:
        """Whether a pass is known to draw no random numbers. The first of each mode is watched."""
        return not (self._draws.get(training, True) or self._generators or watching())

    def _stays_unseeded(self, seed: int) -> bool:
        """Whether stacked clients, who have no seed, need none as far as is known.

        A first pass of theirs is not watched: their round is compared as a whole.
        """
        return not (isinstance(seed, int) or watching() or self._draws.get(True))

    def _seeded_outputs(
        self, params: Params, buffers: Params, x: Tensor, seed: int, *, training: bool
    ) -> Params:
        watch = watching() or training not in self._draws
        draws = self._draws.setdefault(training, set())
        sources = SOURCES if watch else draws
        with (
            seeded(index(seed), sources, self._generators, x.device),
            noted(draws) if watch else NOTHING,
        ):
            return self._outputs(params, buffers, x, training=training)

    def _outputs(self, params: Params, buffers: Params, x: Tensor, *, training: bool) -> Params:
        if self.net.training != training:
            self.net.train(training)
        # At each pass, because a module starts in training mode and others may switch it.
        if training and self.freeze_norm:
            for module in filter(_is_batch_norm, self.net.modules()):
                module.eval()
        # Where there is nothing to turn, entering a block would cost as much as a small layer.
        with pooled(self._pools) if self._pools else NOTHING:
            given, written = params | buffers, buffers if training else None
            if training and self._writes.get(True) is False:  # x is a batch, and nobody else's
                out = call(self.net, self._places, given, x, written=written)
            else:
                run = partial(call, self.net, self._places, given, written=written)
                out = self._kept(x, training, run)
        return out if isinstance(out, dict) else {"logits": out}

    def _kept(self, x: Tensor, training: bool, run: Callable[[Tensor], Any]) -> Any:
        """run(x), x being as before whatever the network does to it: it gets a copy if it writes.

        That is seen in its first pass. One that writes only now and then is refused when it does.
        """
        writes = self._writes.get(training)
        if writes is False and not x.is_inference():
            before, out = x._version, run(x)
            if x._version != before:
                raise InputError(
                    "the network writes into its inputs, and did not when it was tried first; let "
                    "its forward begin with x = x.clone()"
                )
            return out
        own = x.clone()
        counts = not own.is_inference()  # how often it is written to
        before = own._version if counts else 0
        out = run(own)
        # Within vmap neither versions nor values can be looked at.
        if writes is None and not within_vmap(own):
            written = counts and own._version != before
            # A tensor of the device "meta" has no values at all.
            self._writes[training] = written or not (own.is_meta or torch.equal(own, x))
        return out


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


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal but for rounding, NaN being like NaN."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-6, equal_nan=True)


def _fixed(net: nn.Module) -> frozenset[str]:
    return frozenset(k for k, v in net.named_parameters() if not v.requires_grad)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def within_vmap(v: Tensor) -> bool:
    """Whether a tensor stands for those of several clients, and has no values to look at."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(v))


def build(make: Callable[[], nn.Module], seed: int, *, freeze_norm: bool = False) -> Model:
    """A model whose first weights depend on `seed` alone; no global generator is left changed."""
    with seeded(key(seed, "init")):
        return Model(make(), freeze_norm)


def is_counter(v: Tensor) -> bool:
    """Whether a buffer counts something (BatchNorm's `num_batches_tracked`): never averaged."""
    return not (v.is_floating_point() or v.is_complex())


def split_buffers(buffers: Params) -> tuple[Params, Params]:
    """(floating buffers, counters)."""
    return (
        {k: v for k, v in buffers.items() if not is_counter(v)},
        {k: v for k, v in buffers.items() if is_counter(v)},
    )
