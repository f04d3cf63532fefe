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

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.kernels.elsewhere import elsewhere
from fedshift.kernels.passes import (
    Modules,
    Places,
    call,
    changed,
    misfit,
    modules_of,
    passing,
    places,
    retied,
    same_places,
    wrote,
)
from fedshift.kernels.pools import pooled, with_pools
from fedshift.kernels.torch_private import is_batch_norm, version
from fedshift.modules import check_network, fixed_in, is_frozen, is_random
from fedshift.randomness import SOURCES, Source, generators_of, one_at_a_time, seeded
from fedshift.repeating import (
    computing,
    generators_at_first_use,
    is_quiet,
    mark_quiet,
    recording_draws,
    repeatable,
    watching,
)
from fedshift.seeds import key
from fedshift.sketch import sketched
from fedshift.tree import Params

NOTHING = contextlib.nullcontext()
Augment = Callable[[Tensor, int], Tensor]


@sketched
@dataclass(frozen=True, eq=False)
class Model:
    """An `nn.Module` seen as (parameters, buffers, x) -> {"logits", maybe "features", ...}.

    The module's tensors are never read after `init` and never written: parameters and buffers come
    from outside at each call. A module may return a tensor (its logits) or a dictionary.

    freeze_norm  BatchNorm keeps to the running statistics that it was given, in training as well,
                 and leaves them as they are; its scale and shift are trained. (DomainBed's
                 `freeze_bn`, which the FedPALS authors' code uses with pretrained weights.)
    augment      (x, seed) -> x of the same shape, what inputs go through before a gradient is
                 taken; no other pass, evaluation least of all, uses it
    outputs      the number of its outputs where what is predicted is no class; None for classes
    mixes        whether an example's output in training depends on the others of its batch, as
                 with BatchNorm
    fixed        names of the parameters whose `requires_grad` is False, as a run begins. They stay
                 as they are in all training, bit for bit, and no client sends them. A BatchNorm
                 whose parameters are all among them is frozen whole: it keeps to its running
                 statistics, too

    In an `nn.Sequential` called as one, max-pools take the way that costs less, and a rectifier
    right before one is computed after it (`fedshift.kernels.pools`).

    >>> import torch
    >>> model = fs.Model(torch.nn.Linear(4, 3))
    >>> params, buffers = model.init()
    >>> {name: tuple(v.shape) for name, v in params.items()}
    {'weight': (3, 4), 'bias': (3,)}

    Raises InputError for freeze_norm with a module that has no BatchNorm.
    """

    net: nn.Module
    freeze_norm: bool = False
    augment: Augment | None = None
    outputs: int | None = None
    _places: Places = field(init=False, repr=False)
    _modules: Modules = field(init=False, repr=False)
    _writes: dict[bool, bool] = field(init=False, repr=False)
    _pools: tuple[nn.Sequential, ...] = field(init=False, repr=False)
    # BatchNorm layers that stay in evaluation mode.
    _still: tuple[nn.Module, ...] = field(init=False, repr=False)
    # By mode (training or not): which of the process's generators the network draws from.
    _draws: dict[bool, set[Source]] = field(init=False, repr=False)
    _generators: tuple[torch.Generator, ...] = field(init=False, repr=False)
    mixes: bool = field(init=False, repr=False)
    fixed: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.net, Model):
            raise InputError("Model(net) is given a Model; use that one as it is")
        check_network(self.net)
        check_fields(self)
        # Looked up once: at every step it would cost as much as a small layer.
        object.__setattr__(self, "_places", places(self.net))
        object.__setattr__(self, "_modules", modules_of(self.net))
        # By mode, once a pass has shown it: whether the network writes into its inputs.
        object.__setattr__(self, "_writes", {})
        object.__setattr__(self, "_pools", with_pools(self.net))
        # Dropout can be recognised before any pass; what else draws, the first passes show.
        dropping: set[Source] = {"torch"} if any(map(is_random, self.net.modules())) else set()
        object.__setattr__(self, "_draws", {True: dropping} if dropping else {})
        object.__setattr__(self, "_generators", generators_of(self.net))
        object.__setattr__(self, "fixed", fixed_in(self.net))
        norms = tuple(filter(is_batch_norm, self.net.modules()))
        still = norms if self.freeze_norm else tuple(filter(is_frozen, norms))
        object.__setattr__(self, "_still", still)
        object.__setattr__(self, "mixes", len(still) < len(norms))
        if self.freeze_norm and not norms:
            raise InputError(
                "freeze_norm=True, but the network has no BatchNorm to freeze; leave it out"
            )

    @torch.inference_mode(False)
    def init(self) -> tuple[Params, Params]:
        """(parameters, buffers) as the module holds them now, copied."""
        with one_at_a_time():
            self._renew()
            params = {k: v.detach().clone() for k, v in self.net.named_parameters()}
            buffers = {k: v.detach().clone() for k, v in self.net.named_buffers()}
        return params, buffers

    def refresh(self, params: Params, buffers: Params) -> None:
        """Look at the network again if it has other layers or tensors now; once in each round.

        Raises InputError where tensors are missing: the network would use those that it holds.
        """
        if not is_quiet(self):
            self._inspect()
        if len(params) + len(buffers) != len(self._places):
            raise misfit(self._places, params | buffers)

    def check(self, params: Params, buffers: Params) -> None:
        """Raise InputError for tensors that the network does not have, and for missing ones."""
        with one_at_a_time():
            self._renew()
        given = params | buffers
        if given.keys() != self._places.keys():
            raise misfit(self._places, given)

    def check_unchanged(self) -> None:
        """Raise InputError where the network's layers, ties or `requires_grad` have changed since
        it was last inspected, as a run began.
        """
        with one_at_a_time():
            fixed = fixed_in(self.net)
            odd = sorted(fixed ^ self.fixed)
            if changed(self._modules) or retied(self._places):
                what = "its layers, or what they share"
            elif odd:
                now = odd[0] not in fixed
                what = f'"{odd[0]}" has requires_grad={now} now, and had {not now}'
            else:
                return
        raise InputError(
            f"the network was changed after the run began ({what}); begin another run from here, "
            "as run(..., after=played), with a model that fits it"
        )

    def _inspect(self) -> None:
        """Look at the network's layers and generators, once in each round or other computation.

        At each pass it would cost as much as a small layer.
        """
        generators = generators_at_first_use(self, self.net)
        if generators is None:
            return
        if changed(self._modules):
            with one_at_a_time():
                self.__post_init__()
        object.__setattr__(self, "_generators", generators)

    def _renew(self) -> None:
        """Look at the network again if its layers, the places of its tensors or `fixed` changed."""
        moved = changed(self._modules) or not same_places(self._places, places(self.net))
        if moved or self.fixed != fixed_in(self.net):
            self.__post_init__()

    def loaded(self, params: Params, buffers: Params) -> nn.Module:
        """A copy of the network that holds these tensors, in evaluation mode.

        Tied weights are in all their places, and buffers that are not persistent are there, too:
        `load_state_dict` asks for the former by each of their names, and knows nothing of the
        latter. Raises InputError for tensors that are not the network's.
        """
        with one_at_a_time():
            return self._loaded(params, buffers)

    def _loaded(self, params: Params, buffers: Params) -> nn.Module:
        self.check(params, buffers)
        left = {id(v): torch.empty(0) for v in passing(self.net)}
        net, given = copy.deepcopy(self.net, left), params | buffers
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
        Raises InputError for names that the network does not have, and for missing ones.
        """
        return repeatable(partial(elsewhere, self._evaluate, params, buffers, x))

    def _evaluate(self, params: Params, buffers: Params, x: Tensor) -> Params:
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
        if is_quiet(self):  # the usual case, kept short because most passes take it
            return self._outputs(params, after, x, training=True), after
        if not computing():
            return repeatable(partial(self.train, params, buffers, x, seed))
        self._inspect()  # gradients taken outside a phase of `Local` come without a refresh
        if self._is_quiet(training=True):
            mark_quiet(self)
        elif not self._stays_unseeded(seed):
            return self._seeded_outputs(params, after, x, seed, training=True), after
        return self._outputs(params, after, x, training=True), after

    def _is_quiet(self, *, training: bool) -> bool:
        """Whether a pass draws no random numbers, which the first pass of each mode shows."""
        return not (self._draws.get(training, True) or self._generators or watching())

    def draws_nothing(self) -> bool:
        """Whether no pass in training has drawn random numbers so far."""
        return not (self._draws.get(True) or self._generators)

    def _stays_unseeded(self, seed: int) -> bool:
        """Whether the pass is given no number as its seed, and none before it has drawn.

        Their first pass is not watched: their round is compared as a whole.
        """
        return not (isinstance(seed, int) or watching() or self._draws.get(True))

    def _seeded_outputs(
        self, params: Params, buffers: Params, x: Tensor, seed: int, *, training: bool
    ) -> Params:
        watch = watching() or training not in self._draws
        draws = self._draws.setdefault(training, set())
        if watch:  # the network may have made new generators meanwhile
            object.__setattr__(self, "_generators", generators_of(self.net))
        sources = SOURCES if watch else draws
        with (
            seeded(index(seed), sources, self._generators, x.device),
            recording_draws(draws) if watch else NOTHING,
        ):
            return self._outputs(params, buffers, x, training=training)

    def _outputs(self, params: Params, buffers: Params, x: Tensor, *, training: bool) -> Params:
        given, written = params | buffers, buffers if training else None
        # With nothing to swap, entering the block would cost as much as a small layer.
        with one_at_a_time(), pooled(self._pools) if self._pools else NOTHING:
            if self.net.training != training:
                self.net.train(training)
            # At each pass, because a module starts in training mode and others may switch it.
            for module in self._still if training else ():
                module.eval()
            if (
                training and self._writes.get(True) is False
            ):  # x is a batch that no other code holds
                out = call(self.net, self._places, given, x, written=written)
            else:
                run = partial(call, self.net, self._places, given, written=written)
                out = self._run_on_copy(x, training, run)
        return out if isinstance(out, dict) else {"logits": out}

    def _run_on_copy(self, x: Tensor, training: bool, run: Callable[[Tensor], Any]) -> Any:
        """run(x), x being as before whatever the network does to it: it gets a copy if it writes.

        Its first pass shows whether it writes. One that writes only in later passes is refused.
        """
        writes = self._writes.get(training)
        if writes is False and (before := version(x)) is not None:
            out = run(x)
            if version(x) != before:
                raise InputError(
                    "the network writes into its inputs, and did not when it was tried first; let "
                    "its forward begin with x = x.clone()"
                )
            return out
        copy = x.clone()
        before = version(copy)
        out = run(copy)
        # Where it cannot be seen, the network always gets a copy.
        if writes is None and (written := wrote(copy, before, x)) is not None:
            self._writes[training] = written
        return out


def build(make: Callable[[], nn.Module], seed: int, *, freeze_norm: bool = False) -> Model:
    """A model whose first weights depend on `seed` alone; no global generator is left changed.

    make         makes the network, as torch does: its layers draw their first weights
    freeze_norm  as in `Model`

    >>> import torch
    >>> from fedshift.model import build
    >>> one, other = (build(lambda: torch.nn.Linear(4, 2), seed=0).init()[0] for _ in range(2))
    >>> one["weight"].equal(other["weight"])
    True
    """
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
