"""Make computations repeatable, although networks in them may draw random numbers unexpectedly.

A computation is a round, a score, or another pass. The states of all random generators are compared
before and after it. If one has moved, the network drew where no seed reached: everything is done
again, with every pass seeded (`fedshift.randomness`) and watched. Most networks draw nothing. They
pay for one comparison per round, not for a seed in every pass.

Computations of several threads at a time are seeded and watched from the start: a generator that
has moved would not show which thread moved it. Other threads must not draw in the meantime.
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
# The name of a network's own generators, beside those of the process ("torch", "numpy", "python").
NETWORK = "network"
# How often a computation is repeated while other threads draw at the same time.
TRIES = 3


class Computation:
    """A repeatable computation in progress.

    before      states of the process's generators before this and all concurrent computations
    start       their states when this one began
    generators  by network that it used, the network's generators and their states at first use
    models      models that it used
    quiet       those of them whose training passes draw nothing, so that they need no seed
    beside      whether another thread computes at the same time
    """

    def __init__(self, before: States, start: States) -> None:
        self.before, self.start = before, start
        self.generators: dict[nn.Module, GeneratorStates] = {}
        self.models = set[object]()
        self.quiet = set[object]()
        self.beside = False

    def moved(self) -> frozenset[str]:
        """The names of the sources of random numbers whose generators have moved.

        Generators of a network are compared by their states, not by identity: a network may create
        them when it needs them, and replace them.
        """
        with one_at_a_time():
            moved: frozenset[str] = self.start.moved(states())
            if not all(
                _same(before, _generator_states(net)) for net, before in self.generators.items()
            ):
                moved |= {NETWORK}
        return moved

    def renew(self) -> None:
        """Restore the networks' generators, and begin again."""
        with one_at_a_time():
            for net, generators in self.generators.items():
                for g, state in generators.items():
                    g.set_state(state)
                self.generators[net] = _generator_states(net)
            self.start = states()


class _Watch(threading.local):
    """The state of one thread.

    on       whether every pass is seeded and watched
    drew     whether one of the watched passes drew
    current  the thread's computation; None: there is none
    """

    on = False
    drew = False
    current: Computation | None = None


_watch = _Watch()
# The computations of all threads; read and written within `one_at_a_time`.
_running: list[Computation] = []


def _forget() -> None:
    """In a forked process: its parent's computations are not in progress here."""
    _running.clear()
    _watch.on, _watch.drew, _watch.current = False, False, None


os.register_at_fork(after_in_child=_forget)


def _generator_states(net: nn.Module) -> GeneratorStates:
    return {g: g.get_state() for g in generators_of(net)}


def _same(one: GeneratorStates, other: GeneratorStates) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one.values(), other.values()))


def generators_at_first_use(model: object, net: nn.Module) -> tuple[torch.Generator, ...] | None:
    """The network's generators, when a computation uses the model for the first time; else None.

    Their states are recorded, to be compared at the end. Several models may share a network.
    """
    current = _watch.current
    if current is None or model in current.models:
        return None
    with one_at_a_time():
        current.models.add(model)
        generators = current.generators.get(net)
        if generators is None:
            current.generators[net] = generators = _generator_states(net)
    return tuple(generators)


def is_quiet(model: object) -> bool:
    """Whether the model's training passes are known to draw nothing (`mark_quiet`)."""
    current = _watch.current
    return current is not None and model in current.quiet


def mark_quiet(model: object) -> None:
    """Remember that the model's training passes draw nothing, until passes must be watched."""
    with one_at_a_time():  # another thread could begin between the check and the change
        if _watch.current is not None and not watching():
            _watch.current.quiet.add(model)


def computing() -> bool:
    """Whether this thread is in a repeatable computation."""
    return _watch.current is not None


def watching() -> bool:
    """Whether passes of this thread must be seeded and watched."""
    return _watch.on or (_watch.current is not None and _watch.current.beside)


@contextmanager
def watched() -> Iterator[None]:
    """Seed every pass within the `with` block, and record for its network whether it draws."""
    before = _watch.on, _watch.drew
    _watch.on, _watch.drew = True, False
    if _watch.current is not None:
        _watch.current.quiet.clear()
    try:
        yield
    finally:
        _watch.on, _watch.drew = before[0], before[1] or _watch.drew


@contextmanager
def recording_draws(sources: set[Source]) -> Iterator[None]:
    """Add to `sources` the generators that the `with` block draws from; for use within `seeded`."""
    start = states()
    yield
    drawn = start.moved(states())
    _watch.drew = _watch.drew or not drawn <= sources
    sources |= drawn


def repeatable(compute: Callable[[], T]) -> T:
    """compute(), repeated with every pass seeded if it drew random numbers unexpectedly.

    The process's generators are left as they were. compute must be a pure function; a nested call
    is part of the outer computation. Raises InputError if numbers are drawn outside of the
    networks' passes, where no seed reaches. While other threads run, which may have drawn them, it
    warns instead (RuntimeWarning).
    """
    if _watch.current is not None:
        return compute()  # the outer computation compares and repeats
    with _begin() as current:
        try:
            if current.beside:
                return _compute_seeded(compute, current)
            result = compute()
            moved = current.moved()
            # Another thread has begun meanwhile, or a network drew without a seed.
            if current.beside or (moved and current.generators):
                return _compute_seeded(compute, current)
            if moved:  # no network was used, so seeding passes would not help
                _report(moved)
            return result
        except BaseException:
            # Leave no trace of what failed. Not beside other computations: with the generators put
            # back, these would draw the same numbers a second time.
            if not current.beside:
                current.renew()
                put_back(current.before)
            raise


@contextmanager
def _begin() -> Iterator[Computation]:
    """Enter a computation of this thread; other threads may have one as well."""
    with one_at_a_time():
        start = states()
        current = Computation(_running[0].before if _running else start, start)
        _running.append(current)
        # From now on a generator that moves would not show which computation moved it: watch all.
        for other in _running if len(_running) > 1 else ():
            other.beside = True
            other.quiet.clear()
    _watch.current = current
    try:
        yield current
    finally:
        _watch.current = None
        with one_at_a_time():
            _running.remove(current)


def _compute_seeded(compute: Callable[[], T], current: Computation) -> T:
    """compute() with every pass seeded and watched."""
    for _ in range(TRIES):
        current.renew()
        with watched():
            result = compute()
            drew = _watch.drew
        moved = current.moved()
        # A generator moved although all passes are seeded. Alone, another repetition would move it
        # again. Beside other threads it may have been theirs, so it is worth another try.
        if not (moved and current.beside):
            break
    if moved:
        _report(moved)
    elif drew:  # all draws had seeds: put the process's generators back as they were
        put_back(current.before)
    return result


def _report(moved: Collection[str]) -> None:
    """Raise or warn: random numbers were drawn where no seed of the run reaches."""
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
