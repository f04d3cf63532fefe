"""A network as a function of its parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.arguments import called, check_fields
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
    """An `nn.Module` as a function (parameters, buffers, x) -> {"logits", maybe "features", ...}.

    The module's own tensors are never written to, and not read after `init`: parameters and buffers
    are given at each call. A module may return a tensor (its logits) or a dictionary.

    freeze_norm  BatchNorm uses the running statistics that it was given in training, too, and does
                 not change them; its scale and shift are trained. (DomainBed's `freeze_bn`, which
                 the FedPALS authors' code uses with pretrained weights.)
    augment      (x, seed) -> x of the same shape, applied to inputs before a gradient is taken, and
                 in no other pass
    outputs      the number of outputs for a task without classes; None for classes
    mixes        whether an example's output in training depends on the rest of its batch, as with
                 BatchNorm
    fixed        names of the parameters with `requires_grad` False when a run begins. Training does
                 not change a bit of them, and no client sends them. A BatchNorm whose parameters
                 are all fixed also uses its running statistics in training, and keeps them

    Max-pools in an `nn.Sequential` are computed in a cheaper way, and a ReLU right before one is
    computed after it (`fedshift.kernels.pools`).

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
    # BatchNorm layers that are in evaluation mode even in training.
    _still: tuple[nn.Module, ...] = field(init=False, repr=False)
    # Which of the process's generators the network draws from, by mode (training or not).
    _draws: dict[bool, set[Source]] = field(init=False, repr=False)
    _generators: tuple[torch.Generator, ...] = field(init=False, repr=False)
    mixes: bool = field(init=False, repr=False)
    fixed: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.net, Model):
            raise InputError("Model(net) is given a Model; use that one as it is")
        check_network(self.net)
        check_fields(self)
        # Look these up once: at every step that would cost as much as a small layer.
        object.__setattr__(self, "_places", places(self.net))
        object.__setattr__(self, "_modules", modules_of(self.net))
        # Whether the network writes into its inputs, by mode; the first pass of each mode shows it.
        object.__setattr__(self, "_writes", {})
        object.__setattr__(self, "_pools", with_pools(self.net))
        # Dropout is recognised here; other layers that draw show it in their first pass.
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

    # The caller may be in inference mode, and tensors made there cannot be trained.
    @torch.inference_mode(False)
    def init(self) -> tuple[Params, Params]:
        """Copies of the module's current (parameters, buffers)."""
        with one_at_a_time():
            self._renew()
            params = {k: v.detach().clone() for k, v in self.net.named_parameters()}
            buffers = {k: v.detach().clone() for k, v in self.net.named_buffers()}
        return params, buffers

    def refresh(self, params: Params, buffers: Params) -> None:
        """Inspect the network, once in each round, in case its layers or tensors have changed.

        Raises InputError if tensors are missing: the network would use its own instead.
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
        """Raise InputError if the network's layers, ties or `requires_grad` have changed since the
        run began.
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
        """Look for changed layers and generators, once in each round or other computation.

        Doing so in each pass would cost as much as a small layer.
        """
        generators = generators_at_first_use(self, self.net)
        if generators is None:
            return
        if changed(self._modules):
            with one_at_a_time():
                self.__post_init__()
        object.__setattr__(self, "_generators", generators)

    def _renew(self) -> None:
        """Look everything up again if layers, places of tensors or `fixed` have changed."""
        moved = changed(self._modules) or not same_places(self._places, places(self.net))
        if moved or self.fixed != fixed_in(self.net):
            self.__post_init__()

    def loaded(self, params: Params, buffers: Params) -> nn.Module:
        """A copy of the network with these tensors, in evaluation mode.

        It includes tied weights, which `load_state_dict` wants under each of their names, and
        buffers that are not persistent, which it ignores. Raises InputError for tensors that do not
        fit the network.
        """
        for name, given in (("params", params), ("buffers", buffers)):
            if not isinstance(given, Mapping):
                raise InputError(
                    f"{name} must be a dictionary of tensors, got {called(given)}; give "
                    'server["params"] and server["buffers"] of a round'
                )
        with one_at_a_time():
            return self._load_copy(params, buffers)

    def _load_copy(self, params: Params, buffers: Params) -> nn.Module:
        self.check(params, buffers)
        # deepcopy refuses intermediate results, so give it an empty tensor for each (its "memo").
        memo = {id(v): torch.empty(0) for v in passing(self.net)}
        net, given = copy.deepcopy(self.net, memo), params | buffers
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
        """The outputs in evaluation mode; neither buffers nor x are changed.

        A network that draws random numbers even in this mode draws the same ones at each call.
        Raises InputError for names that the network does not have, and for missing ones.
        """
        return repeatable(partial(elsewhere, self._evaluate, params, buffers, x))

    def _evaluate(self, params: Params, buffers: Params, x: Tensor) -> Params:
        """The outputs in evaluation mode, on the device where the tensors are."""
        self.refresh(params, buffers)
        if self._is_quiet(training=False):
            return self._outputs(params, buffers, x, training=False)
        return self._seeded_outputs(params, buffers, x, 0, training=False)

    def train(
        self, params: Params, buffers: Params, x: Tensor, seed: int = 0
    ) -> tuple[Params, Params]:
        """(outputs, buffers after the pass) in training mode; the given buffers do not change.

        A network that draws random numbers (dropout, noise) draws them from `seed`.
        """
        # BatchNorm writes into the buffers that it is given.
        after = {k: v.clone() for k, v in buffers.items()}
        if is_quiet(self):  # the usual case, kept short because most passes take it
            return self._outputs(params, after, x, training=True), after
        if not computing():  # a pass on its own, outside of a round or a score
            return repeatable(partial(self.train, params, buffers, x, seed))
        self._inspect()  # gradients taken outside a phase of `Local` come without a refresh
        if self._is_quiet(training=True):
            mark_quiet(self)
        elif not self._stays_unseeded(seed):
            return self._seeded_outputs(params, after, x, seed, training=True), after
        return self._outputs(params, after, x, training=True), after

    def _is_quiet(self, *, training: bool) -> bool:
        """Whether a pass draws no random numbers; False until a first pass has shown it."""
        return not (self._draws.get(training, True) or self._generators or watching())

    def draws_nothing(self) -> bool:
        """Whether no pass in training has drawn random numbers so far."""
        return not (self._draws.get(True) or self._generators)

    def _stays_unseeded(self, seed: int) -> bool:
        """Whether to run the pass without seeding: the seed is no number, as in a pass of several
        clients, and the network has not drawn so far.

        Such a pass is not watched: `repeating` compares the generators over the whole round.
        """
        return not (isinstance(seed, int) or watching() or self._draws.get(True))

    def _seeded_outputs(
        self, params: Params, buffers: Params, x: Tensor, seed: int, *, training: bool
    ) -> Params:
        watch = watching() or training not in self._draws
        draws = self._draws.setdefault(training, set())
        if watch:  # the network may have made new generators since it was inspected
            object.__setattr__(self, "_generators", generators_of(self.net))
        sources = SOURCES if watch else draws
        with (
            seeded(index(seed), sources, self._generators, x.device),
            recording_draws(draws) if watch else NOTHING,
        ):
            return self._outputs(params, buffers, x, training=training)

    def _outputs(self, params: Params, buffers: Params, x: Tensor, *, training: bool) -> Params:
        given, written = params | buffers, buffers if training else None
        # The lock: `call` replaces tensors in the one network that all threads share.
        # Entering `pooled` costs as much as a small layer, so skip it if there are no max-pools.
        with one_at_a_time(), pooled(self._pools) if self._pools else NOTHING:
            if self.net.training != training:
                self.net.train(training)
            # At each pass, because `net.train` has just switched them to training mode, or other
            # code has.
            for module in self._still if training else ():
                module.eval()
            # In training, x is a batch that no other code uses. So once a first pass has shown that
            # the network does not write into it, no later pass needs a check.
            if training and self._writes.get(True) is False:
                out = call(self.net, self._places, given, x, written=written)
            else:
                run = partial(call, self.net, self._places, given, written=written)
                out = self._run_on_copy(x, training, run)
        return out if isinstance(out, dict) else {"logits": out}

    def _run_on_copy(self, x: Tensor, training: bool, run: Callable[[Tensor], Any]) -> Any:
        """run(x) without changing x: a network that writes into its inputs gets a copy.

        The first pass shows whether it writes. One that begins to write later is refused.
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
        # If torch cannot tell (`wrote` is None), the network gets a copy every time.
        if writes is None and (written := wrote(copy, before, x)) is not None:
            self._writes[training] = written
        return out


def build(make: Callable[[], nn.Module], seed: int, *, freeze_norm: bool = False) -> Model:
    """A model whose first weights depend on `seed` alone; global generators are put back.

    make         a function that makes the network; its layers draw their first weights as usual
    freeze_norm  as in `Model`

    >>> import torch
    >>> from fedshift.model import build
    >>> one, other = (build(lambda: torch.nn.Linear(4, 2), seed=0).init()[0] for _ in range(2))
    >>> one["weight"].equal(other["weight"])
    True
    """
    if isinstance(make, nn.Module) or not callable(make):
        raise InputError(
            f"build takes a function that makes the network, got {called(make)}: its weights would "
            "not depend on the seed. Give lambda: ..., or Model(net) for these weights"
        )
    with seeded(key(seed, "init")):
        return Model(make(), freeze_norm)


def is_counter(v: Tensor) -> bool:
    """Whether a buffer counts something, as BatchNorm's `num_batches_tracked`: never average it."""
    return not (v.is_floating_point() or v.is_complex())


def split_buffers(buffers: Params) -> tuple[Params, Params]:
    """(floating buffers, counters)."""
    return (
        {k: v for k, v in buffers.items() if not is_counter(v)},
        {k: v for k, v in buffers.items() if is_counter(v)},
    )
