"""Computations that are repeatable though networks in them draw random numbers unforeseen.

Each round, score or other pass compares the generators before and after: if they moved, it is
computed again with every pass seeded (`fedshift.randomness`) and watched. Where nothing is drawn
that is a look at the generators, and at the modules of the network, once per round.

What several threads compute at once is seeded and watched from the start: that generators moved
would not say whose draws moved them. Threads that compute nothing here must not draw meanwhile.
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
    one_at_a_time,
    own_generators,
    put_back,
    states,
)

T = TypeVar("T")
Own = dict[torch.Generator, Tensor]
NETWORK = "network"
# How often something is computed again that another thread disturbs.
TRIES = 3


class Block:
    """Something that is computed to be repeatable, while it goes on.

    before: the process's generators before it, and before all that is computed beside it; start:
    where they stood when its computation began. own: the generators of the networks that it met,
    and how they stood then. met: the models that were looked at anew; quiet: those whose training
    passes are known to draw nothing, so that they need no seed. beside: whether another thread
    computes something, too.
    """

    def __init__(self, before: States, start: States) -> None:
        self.before, self.start = before, start
        self.own: dict[nn.Module, Own] = {}
        self.met = set[object]()
        self.quiet = set[object]()
        self.beside = False

    def moved(self) -> frozenset[str]:
        """Whose generators stand elsewhere now; those of networks by their states alone, since a
        network may make them when it needs them, and make them anew.
        """
        with one_at_a_time():
            moved: frozenset[str] = self.start.moved(states())
            if not all(_same(before, _own(net)) for net, before in self.own.items()):
                moved |= {NETWORK}
        return moved

    def renew(self) -> None:
        """Begin once more, with the networks' generators where they were."""
        with one_at_a_time():
            for net, own in self.own.items():
                for g, state in own.items():
                    g.set_state(state)
                self.own[net] = _own(net)
            self.start = states()


class _Watch(threading.local):
    """Whether every pass of this thread is to be seeded and watched, whether one drew, and what the
    thread computes.
    """

    on = False
    drew = False
    block: Block | None = None


_watch = _Watch()
# What all threads compute, by whoever holds the lock.
_blocks: list[Block] = []


def _forget() -> None:
    """A forked process computes nothing of what this one does."""
    _blocks.clear()
    _watch.on, _watch.drew, _watch.block = False, False, None


os.register_at_fork(after_in_child=_forget)


def _own(net: nn.Module) -> Own:
    return {g: g.get_state() for g in own_generators(net)}


def _same(one: Own, other: Own) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one.values(), other.values()))


def met(model: object, net: nn.Module) -> tuple[torch.Generator, ...] | None:
    """The network's own generators, where the thread's computation meets the model the first time.

    Several models may have one network.
    """
    block = _watch.block
    if block is None or model in block.met:
        return None
    with one_at_a_time():
        block.met.add(model)
        own = block.own.get(net)
        if own is None:
            block.own[net] = own = _own(net)
    return tuple(own)


def settled(model: object) -> bool:
    """Whether training passes of the model in this thread's computation are known to be quiet."""
    block = _watch.block
    return block is not None and model in block.quiet


def settle(model: object) -> None:
    """Remember that they are, until passes must be watched."""
    with one_at_a_time():  # else another thread might begin between the question and the answer
        if _watch.block is not None and not watching():
            _watch.block.quiet.add(model)


def computing() -> bool:
    """Whether this thread is within something repeatable."""
    return _watch.block is not None


def watching() -> bool:
    """Whether passes of this thread must be seeded and watched."""
    return _watch.on or (_watch.block is not None and _watch.block.beside)


@contextmanager
def watched() -> Iterator[None]:
    """Every pass within the block is seeded, and its network remembers whether it draws."""
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
    """Add to `sources` the process's generators that the block draws from; call it in `seeded`."""
    start = states()
    yield
    drawn = start.moved(states())
    _watch.drew = _watch.drew or not drawn <= sources
    sources |= drawn


def repeatable(compute: Callable[[], T]) -> T:
    """compute(), once more with every pass seeded where it drew random numbers unforeseen.

    The process's generators are left as they were. compute must be a pure function; within another
    one that is repeatable it is a part of it. Raises InputError if numbers are drawn outside of the
    networks' passes, which no seed reaches. Where other threads are at work, they may have drawn
    them: then this is a RuntimeWarning.
    """
    if _watch.block is not None:
        return compute()
    with _begun() as block:
        try:
            if block.beside:
                return _seeded_throughout(compute, block)
            result = compute()
            moved = block.moved()
            if block.beside or (moved and block.own):
                return _seeded_throughout(compute, block)
            if moved:  # no network of this process computed anything
                _report(moved)
            return result
        except BaseException:
            # What runs beside it would draw the same numbers again.
            if not block.beside:
                block.renew()
                put_back(block.before)
            raise


@contextmanager
def _begun() -> Iterator[Block]:
    """This thread computes something, perhaps beside others."""
    with one_at_a_time():
        start = states()
        block = Block(_blocks[0].before if _blocks else start, start)
        _blocks.append(block)
        for one in _blocks if len(_blocks) > 1 else ():
            one.beside = True
            one.quiet.clear()
    _watch.block = block
    try:
        yield block
    finally:
        _watch.block = None
        with one_at_a_time():
            _blocks.remove(block)


def _seeded_throughout(compute: Callable[[], T], block: Block) -> T:
    """compute() with every pass seeded and watched."""
    for _ in range(TRIES):
        block.renew()
        with watched():
            result = compute()
            drew = _watch.drew
        moved = block.moved()
        if not (moved and block.beside):
            break
    if moved:
        _report(moved)
    elif drew:
        put_back(block.before)
    return result


def _report(moved: Collection[str]) -> None:
    """Say that numbers were drawn where they cannot be repeated."""
    if set(moved) == {NETWORK}:
        raise InputError(
            "random numbers were drawn from a torch.Generator of the network where no seed of the "
            "run reaches: in a backward hook, or from one that its forward makes anew with another "
            "seed. Draw in the forward pass, from a generator that is made once"
        )
    known = {"python": "Python's global generator", NETWORK: "a torch.Generator of the network"}
    names = " and ".join(known.get(s, f"{s}'s global generator") for s in sorted(moved))
    said = (
        f"random numbers were drawn from {names} in a round, outside of the network's forward "
        "pass, where no seed of the run reaches: equal seeds would not give equal runs. Draw in "
        "the forward pass; objectives, backends, schedules and backward hooks: from a generator of "
        "your own with a seed, as torch.Generator().manual_seed(0)"
    )
    if threading.active_count() == 1:
        raise InputError(said)
    warnings.warn(f"{said}. (Or another thread drew them.)", RuntimeWarning, stacklevel=3)
