"""Make computations repeatable although networks in them draw random numbers unexpectedly.

Each round, score or other pass compares the generators before and after. If they moved, it is
computed again with every pass seeded (`fedshift.randomness`) and watched. If nothing is drawn, the
cost is one look per round at the generators and the network's modules.

Computations of several threads at once are seeded and watched from the start: a moved generator
would not show which thread moved it. Other threads must not draw in the meantime.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.randomness import (
    Source,
    States,
    generators_of,
    one_at_a_time,
    put_back,
    states,
)

T = TypeVar("T")
GeneratorStates = dict[torch.Generator, Tensor]
NETWORK = "network"
# How often a computation is repeated that another thread disturbs.
TRIES = 3


class Block:
    """A repeatable computation in progress.

    before      states of the process's generators before it and before all concurrent computations
    start       their states when it began
    generators  those of the networks that it used, with their states at first use
    met         models whose network was inspected
    quiet       those of them whose training passes draw nothing, so that they need no seed
    beside      whether another thread computes at the same time
    """

    def __init__(self, before: States, start: States) -> None:
        self.before, self.start = before, start
        self.generators: dict[nn.Module, GeneratorStates] = {}
        self.met = set[object]()
        self.quiet = set[object]()
        self.beside = False

    def moved(self) -> frozenset[str]:
        """The sources whose generators have moved.

        Generators of networks are compared by their states alone: a network may create them when
        it needs them, and replace them.
        """
        with one_at_a_time():
            moved: frozenset[str] = self.start.moved(states())
            if not all(
                _same(before, _generator_states(net)) for net, before in self.generators.items()
            ):
                moved |= {NETWORK}
        return moved

    def renew(self) -> None:
        """Begin again, with the networks' generators restored."""
        with one_at_a_time():
            for net, generators in self.generators.items():
                for g, state in generators.items():
                    g.set_state(state)
                self.generators[net] = _generator_states(net)
            self.start = states()


class _Watch(threading.local):
    """State of one thread.

    on: every pass is seeded and watched; drew: one of them drew; block: the present computation.
    """

    on = False
    drew = False
    block: Block | None = None


_watch = _Watch()
# The computations of all threads; read and written under the lock.
_blocks: list[Block] = []


def _forget() -> None:
    """A forked process has none of its parent's computations in progress."""
    _blocks.clear()
    _watch.on, _watch.drew, _watch.block = False, False, None


os.register_at_fork(after_in_child=_forget)


def _generator_states(net: nn.Module) -> GeneratorStates:
    return {g: g.get_state() for g in generators_of(net)}


def _same(one: GeneratorStates, other: GeneratorStates) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one.values(), other.values()))


def met(model: object, net: nn.Module) -> tuple[torch.Generator, ...] | None:
    """The network's generators at a computation's first use of the model, else None.

    Several models may share a network.
    """
    block = _watch.block
    if block is None or model in block.met:
        return None
    with one_at_a_time():
        block.met.add(model)
        generators = block.generators.get(net)
        if generators is None:
            block.generators[net] = generators = _generator_states(net)
    return tuple(generators)


def settled(model: object) -> bool:
    """Whether it was recorded that the model's training passes draw nothing (`settle`)."""
    block = _watch.block
    return block is not None and model in block.quiet


def settle(model: object) -> None:
    """Remember that the model's training passes draw nothing, until passes must be watched."""
    with one_at_a_time():  # another thread could begin between the check and the change
        if _watch.block is not None and not watching():
            _watch.block.quiet.add(model)


def computing() -> bool:
    """Whether this thread is in a repeatable computation."""
    return _watch.block is not None


def watching() -> bool:
    """Whether passes of this thread must be seeded and watched."""
    return _watch.on or (_watch.block is not None and _watch.block.beside)


@contextmanager
def watched() -> Iterator[None]:
    """Seed every pass within the block, and record for its network whether it draws."""
    before = _watch.on, _watch.drew
    _watch.on, _watch.drew = True, False
    if _watch.block is not None:
        _watch.block.quiet.clear()
    try:
        yield
    finally:
        _watch.on, _watch.drew = before[0], before[1] or _watch.drew


@contextmanager
def noted(sources: set[Source]) -> Iterator[None]:
    """Add to `sources` the process's generators that the block draws from; use within `seeded`."""
    start = states()
    yield
    drawn = start.moved(states())
    _watch.drew = _watch.drew or not drawn <= sources
    sources |= drawn


def repeatable(compute: Callable[[], T]) -> T:
    """compute(), repeated with every pass seeded if it drew random numbers unexpectedly.

    The process's generators are left as they were. compute must be a pure function; a nested call
    is part of the outer computation. Raises InputError if numbers are drawn outside of the
    networks' passes, which no seed reaches. If other threads are running, which may have drawn
    them, this is a RuntimeWarning.
    """
    if _watch.block is not None:
        return compute()  # the outer computation compares and repeats
    with _begin() as block:
        try:
            if block.beside:
                return _compute_seeded(compute, block)
            result = compute()
            moved = block.moved()
            # Another thread began meanwhile, or a network drew: the result cannot be trusted.
            if block.beside or (moved and block.generators):
                return _compute_seeded(compute, block)
            if moved:  # no network was used, so seeding passes would not help
                _report(moved)
            return result
        except BaseException:
            # Restoring would make concurrent computations draw the same numbers again.
            if not block.beside:
                block.renew()
                put_back(block.before)
            raise


@contextmanager
def _begin() -> Iterator[Block]:
    """Enter a computation of this thread, perhaps concurrent with others."""
    with one_at_a_time():
        start = states()
        block = Block(_blocks[0].before if _blocks else start, start)
        _blocks.append(block)
        # From now on a moved generator would not show which computation moved it: watch all.
        for running in _blocks if len(_blocks) > 1 else ():
            running.beside = True
            running.quiet.clear()
    _watch.block = block
    try:
        yield block
    finally:
        _watch.block = None
        with one_at_a_time():
            _blocks.remove(block)


def _compute_seeded(compute: Callable[[], T], block: Block) -> T:
    """compute() with every pass seeded and watched."""
    for _ in range(TRIES):
        block.renew()
        with watched():
            result = compute()
            drew = _watch.drew
        moved = block.moved()
        # Alone, a second repetition would give the same; beside others, theirs may have moved it.
        if not (moved and block.beside):
            break
    if moved:
        _report(moved)
    elif drew:  # with a seed each; the process's generators must not show it
        put_back(block.before)
    return result


def _report(moved: Collection[str]) -> None:
    """Raise or warn: numbers were drawn where no seed can reproduce them."""
    if set(moved) == {NETWORK}:
        raise InputError(
            "random numbers were drawn from a torch.Generator of the network where no seed "
            "reaches: in a backward hook, or from one that forward makes anew with another seed. "
            "Draw in the forward pass, from a generator that is made once"
        )
    names_of = {"python": "Python's global generator", NETWORK: "a torch.Generator of the network"}
    names = " and ".join(names_of.get(s, f"{s}'s global generator") for s in sorted(moved))
    message = (
        f"random numbers were drawn from {names} in a round, outside of the network's forward "
        "pass, where no seed of the run reaches: equal seeds would not give equal runs. Draw in "
        "the forward pass; objectives, backends, schedules and backward hooks: from a generator of "
        "your own with a seed, as torch.Generator().manual_seed(0)"
    )
    if threading.active_count() == 1:
        raise InputError(message)
    warnings.warn(f"{message}. (Or another thread drew them.)", RuntimeWarning, stacklevel=3)
