"""A network as a function of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import index

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.arguments import called, check_fields
from fedshift.errors import InputError
from fedshift.kernels.elsewhere import elsewhere
from fedshift.kernels.layout import channels_last
from fedshift.modules import (
    check_network,
    fixed_in,
    is_batch_norm,
    is_frozen,
    is_random,
    misfit,
    names_of,
    passing,
)
from fedshift.randomness import SOURCES, Source, generators_of, one_at_a_time, seeded, states
from fedshift.seeds import key
from fedshift.sketch import sketched
from fedshift.tree import Params

Augment = Callable[[Tensor, int], Tensor]


@sketched
@dataclass(frozen=True, eq=False)
class Model:
    """An `nn.Module` as a function (parameters, buffers, x) -> {"logits", maybe "features", ...}.

    The module's own tensors are never written to, and not read after `init`: parameters and buffers
    are given at each call. A module may return a tensor (its logits) or a dictionary.

    freeze_norm    BatchNorm uses the running statistics that it was given in training, too, and
                   does not change them; its scale and shift are trained. (DomainBed's `freeze_bn`,
                   which the FedPALS authors' code uses with pretrained weights.)
    augment        (x, seed) -> x of the same shape, applied to inputs before a gradient is taken,
                   and in no other pass
    outputs        the number of outputs for a task without classes; None for classes
    channels_last  train on images whose channels lie side by side in memory
                   (`fedshift.kernels.layout`): faster convolutions, other rounding
    draws          seed every pass, for a network that draws random numbers only now and then; one
                   that draws in its first pass is recognised without it
    mixes          whether an example's output in training depends on the rest of its batch, as with
                   BatchNorm
    fixed          names of the parameters with `requires_grad` False when a run begins. Training
                   does not change a bit of them, and no client sends them. A BatchNorm whose
                   parameters are all fixed also uses its running statistics in training, and keeps
                   them

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
    channels_last: bool = False
    draws: bool = False
    mixes: bool = field(init=False, repr=False)
    fixed: frozenset[str] = field(init=False, repr=False)
    # The name of each tensor by its path in the network, and the names alone.
    _paths: dict[str, str] = field(init=False, repr=False)
    _names: frozenset[str] = field(init=False, repr=False)
    # BatchNorm layers that are in evaluation mode even in training.
    _still: tuple[nn.Module, ...] = field(init=False, repr=False)
    # Which of the process's generators passes draw from, by mode (training or not), and the
    # network's own generators. The first pass in each mode shows it.
    _drawn: dict[bool, frozenset[Source]] = field(init=False, repr=False)
    _generators: tuple[torch.Generator, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.net, Model):
            raise InputError("Model(net) is given a Model; use that one as it is")
        check_network(self.net)
        check_fields(self)
        paths, norms = names_of(self.net), tuple(filter(is_batch_norm, self.net.modules()))
        if self.freeze_norm and not norms:
            raise InputError(
                "freeze_norm=True, but the network has no BatchNorm to freeze; leave it out"
            )
        still = norms if self.freeze_norm else tuple(filter(is_frozen, norms))
        found = {
            "fixed": fixed_in(self.net),
            "mixes": len(still) < len(norms),
            "_paths": paths,
            "_names": frozenset(paths.values()),
            "_still": still,
            "_drawn": {},
            "_generators": generators_of(self.net),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    # The caller may be in inference mode, and tensors made there cannot be trained.
    @torch.inference_mode(False)
    def init(self) -> tuple[Params, Params]:
        """Copies of the module's current (parameters, buffers)."""
        with one_at_a_time():
            self.__post_init__()  # layers may have changed since
            params = {k: v.detach().clone() for k, v in self.net.named_parameters()}
            buffers = {k: v.detach().clone() for k, v in self.net.named_buffers()}
        return params, buffers

    def check(self, params: Params, buffers: Params) -> None:
        """Raise InputError for tensors that the network does not have, and for missing ones."""
        with one_at_a_time():
            self.__post_init__()
        self._check_names(params | buffers, self._paths)

    def check_unchanged(self) -> None:
        """Raise InputError if the network's tensors, ties or `requires_grad` have changed since the
        run began.
        """
        with one_at_a_time():
            fixed = fixed_in(self.net)
            object.__setattr__(self, "_generators", generators_of(self.net))
            if names_of(self.net) != self._paths:
                what = "its layers, or what they share"
            elif changed := sorted(fixed ^ self.fixed):
                now = changed[0] not in fixed
                what = f'"{changed[0]}" has requires_grad={now} now, and had {not now}'
            else:
                return
        raise InputError(
            f"the network was changed after the run began ({what}); begin another run from here, "
            "as run(..., after=played), with a model that fits it"
        )

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
        with one_at_a_time(), torch.no_grad():
            self._check_names(params | buffers, names_of(self.net))
            # deepcopy refuses intermediate results: give it an empty tensor for each (its "memo").
            memo = {id(v): torch.empty(0) for v in passing(self.net)}
            net, given = copy.deepcopy(self.net, memo), params | buffers
            for name, v in (*net.named_parameters(), *net.named_buffers()):
                if v.shape != given[name].shape:
                    raise InputError(
                        f'"{name}" is {tuple(given[name].shape)}, the network\'s {tuple(v.shape)}'
                    )
                v.copy_(given[name])
        return net.eval()

    def _check_names(self, tensors: Params, paths: Mapping[str, str]) -> None:
        names = self._names if paths is self._paths else {*paths.values()}
        if tensors.keys() != names:
            raise misfit(paths.values(), tensors)

    def trainable(self, params: Params) -> Params:
        """The entries that training may move: all but those of `fixed`."""
        return {k: v for k, v in params.items() if k not in self.fixed} if self.fixed else params

    def prepare(self, x: Tensor, seed: int) -> Tensor:
        """The inputs of a training step from a batch: in the model's layout, augmented."""
        x = channels_last(x) if self.channels_last else x
        return x if self.augment is None else self.augment(x, seed)

    def __call__(self, params: Params, buffers: Params, x: Tensor) -> Params:
        """The outputs in evaluation mode; neither buffers nor x are changed.

        A network that draws random numbers even in this mode draws the same ones at each call.
        Raises InputError for names that the network does not have, and for missing ones.
        """
        return elsewhere(self._evaluate, params, buffers, x)

    def _evaluate(self, params: Params, buffers: Params, x: Tensor) -> Params:
        return self._seeded_pass(params, buffers, x, 0, training=False)[0]

    def train(
        self, params: Params, buffers: Params, x: Tensor, seed: int = 0
    ) -> tuple[Params, Params]:
        """(outputs, buffers after the pass) in training mode; the given buffers do not change.

        A network that draws random numbers (dropout, noise) draws them from `seed`.
        """
        return self._seeded_pass(params, buffers, x, seed, training=True)

    def _seeded_pass(
        self, params: Params, buffers: Params, x: Tensor, seed: int, *, training: bool
    ) -> tuple[Params, Params]:
        """A pass, with a seed if the network draws random numbers in this mode."""
        drawn = self._drawn.get(training)
        if drawn is None and not isinstance(seed, int):  # of several clients at once
            drawn = frozenset()
        if drawn is not None and not (drawn or self._generators or self.draws):
            return self._pass(params, buffers, x, training=training)
        looks = drawn is None or self.draws
        sources = SOURCES if drawn is None or self.draws else drawn
        with seeded(index(seed), sources, self._generators, x.device):
            before = states() if looks else None
            result = self._pass(params, buffers, x, training=training)
            if before is None:
                return result
            # Dropout draws in training, though perhaps not in this pass.
            drops = training and any(map(is_random, self.net.modules()))
            self._drawn[training] = before.moved(states()) | ({"torch"} if drops else set())
        generators = generators_of(self.net)
        if all(g in self._generators for g in generators):
            return result
        # The network has made generators in this pass: now they start at the seed, too.
        object.__setattr__(self, "_generators", generators)
        with seeded(index(seed), sources, generators, x.device):
            return self._pass(params, buffers, x, training=training)

    def _pass(
        self, params: Params, buffers: Params, x: Tensor, *, training: bool
    ) -> tuple[Params, Params]:
        """(outputs, buffers after the pass)."""
        # BatchNorm writes into the buffers that it is given in training.
        copies = {k: v.clone() for k, v in buffers.items()} if training else buffers
        tensors = params | copies
        # The lock: torch replaces tensors in the one network that all threads share.
        with one_at_a_time():
            # In evaluation, layers may have changed: their tensors must be among those given.
            paths = self._paths if training else names_of(self.net)
            self._check_names(tensors, paths)
            if self.net.training != training:
                self.net.train(training)
            # At each pass, because `net.train` has just switched them to training mode, or other
            # code has.
            for module in self._still if training else ():
                module.eval()
            given = {path: tensors[name] for path, name in paths.items()}
            # A copy of x, because a network may write into its inputs.
            out = functional_call(self.net, given, (x.clone(),), tie_weights=False)
        # Counters such as BatchNorm's may be replaced by a new tensor, not written to in place.
        after = {name: given[path] for path, name in paths.items() if name in buffers}
        return out if isinstance(out, dict) else {"logits": out}, after


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
