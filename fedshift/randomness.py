"""Derive the random numbers that a network itself draws from the run's seeds, too.

Layers such as dropout draw from generators of the whole process, torch's, numpy's or Python's, or
from `torch.Generator`s that modules of the network hold as attributes, also in containers. A pass
that draws is therefore computed within `seeded`: its generators start at the seed of the pass, and
are put back afterwards. A network's first pass in each mode shows whether it draws. A round or a
score in which a generator moves all the same is refused (`undrawn`).

Threads share the process's generators, and may share a network. Passes are therefore computed one
at a time (`one_at_a_time`).

Generators that cannot be seen from outside are not covered: those that a network makes and keeps
elsewhere, such as numpy's `default_rng` or `random.Random`.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedshift.errors import InputError

Source = Literal["torch", "numpy", "python"]
SOURCES: frozenset[Source] = frozenset(("torch", "numpy", "python"))
# How deeply nested containers (a list of lists, ...) are searched for generators.
DEEP = 4
# Attributes that torch gives to every module: tensors, submodules, hooks. The network's author has
# put no generator there.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Shared:
    """One lock for all threads of the process, since they share the generators."""

    # Re-entrant: a pass within a pass (a term that runs another model) needs the lock again.
    lock = threading.RLock()

    @classmethod
    def renew(cls) -> None:
        """Replace the lock in a forked process: the thread that locked it does not exist there."""
        cls.lock = threading.RLock()


os.register_at_fork(after_in_child=_Shared.renew)


def one_at_a_time() -> AbstractContextManager[bool]:
    """The lock that a thread holds while it computes a pass or reads a network's tensors.

    A pass temporarily replaces these tensors, and may draw from generators that threads share.
    """
    return _Shared.lock


class States(NamedTuple):
    """States of the process's generators; devices: those of GPUs that are in use."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]
    devices: tuple[Tensor, ...]

    def moved(self, now: States) -> frozenset[Source]:
        """The generators whose state differs in `now`."""
        same_devices = len(self.devices) == len(now.devices) and all(
            map(torch.equal, self.devices, now.devices)
        )
        moved: set[Source] = set()
        if not (torch.equal(self.torch, now.torch) and same_devices):
            moved.add("torch")
        if not _same_numpy(self.numpy, now.numpy):
            moved.add("numpy")
        if self.python != now.python:
            moved.add("python")
        return frozenset(moved)


def states() -> States:
    """The states of the process's generators, read while no other thread computes a pass."""
    with _Shared.lock:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        return States(
            torch.default_generator.get_state(),
            np.random.get_state(legacy=False),
            random.getstate(),
            tuple(devices),
        )


def put_back(before: States) -> None:
    """Restore the process's generators."""
    with _Shared.lock:
        torch.default_generator.set_state(before.torch)
        np.random.set_state(before.numpy)
        random.setstate(before.python)
        if before.devices:
            torch.cuda.set_rng_state_all(list(before.devices))


def _same_numpy(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of numpy's generator are equal; == fails on the arrays in them."""
    if one.keys() != other.keys():
        return False
    for name, a in one.items():
        b = other[name]
        if isinstance(a, Mapping):
            if not _same_numpy(a, b):
                return False
        elif not (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b):
            return False
    return True


def generators_of(net: nn.Module) -> tuple[torch.Generator, ...]:
    """The `torch.Generator`s that the network's modules hold, also `DEEP` containers deep."""
    seen: dict[int, torch.Generator] = {}
    values = [v for m in net.modules() for k, v in vars(m).items() if k not in OF_EVERY_MODULE]
    for _ in range(1 + DEEP):
        inside: list[Any] = []
        for value in values:
            # Most values are these; an isinstance check against torch's classes is slow.
            if type(value) in (bool, int, float, str, NoneType):
                continue
            if isinstance(value, (dict, list, tuple)):
                inside += value.values() if isinstance(value, dict) else value
            elif isinstance(value, torch.Generator):
                seen[id(value)] = value
        values = inside
    return tuple(seen.values())


@contextmanager
def seeded(
    seed: int,
    sources: Collection[Source] = SOURCES,
    of_network: Collection[torch.Generator] = (),
    device: torch.device | None = None,
) -> Iterator[None]:
    """Start generators at `seed` within the block and restore them afterwards.

    sources: which of the process's generators; of_network: those that it has;
    device: a GPU, whose generator torch uses besides the processor's.
    """
    number = seed % 2**64
    # Tensors on "meta" have no values, and so need no generator.
    no_gpu = device is None or device.type in ("cpu", "meta") or "torch" not in sources
    gpu = None if no_gpu else torch.get_device_module(device)
    with _Shared.lock:
        # The whole block holds the lock: another thread would draw from the seeded generators.
        by_torch = (torch.default_generator,) if "torch" in sources else ()
        before = [(g, g.get_state()) for g in (*of_network, *by_torch)]
        on_gpu = None if gpu is None else gpu.get_rng_state(device)
        numpy_state = np.random.get_state(legacy=False) if "numpy" in sources else None
        python_state = random.getstate() if "python" in sources else None
        try:
            for g, _ in before:
                g.manual_seed(number)
            if gpu is not None:
                with gpu.device(device):
                    gpu.manual_seed(number)
            if numpy_state is not None:
                np.random.seed(number % 2**32)  # numpy takes 32 bits
            if python_state is not None:
                random.seed(number)
            yield
        finally:
            for g, state in before:
                g.set_state(state)
            if gpu is not None:
                gpu.set_rng_state(on_gpu, device)
            if numpy_state is not None:
                np.random.set_state(numpy_state)
            if python_state is not None:
                random.setstate(python_state)


@contextmanager
def undrawn(*nets: nn.Module) -> Iterator[None]:
    """Raise InputError if random numbers were drawn within the block where no seed reaches.

    Generators of the process, and those that the networks hold, must be at the end as they were.
    Beside other threads, which may have drawn the numbers, it warns (RuntimeWarning). After an
    error the process's generators are put back.
    """
    before = states()
    own = [{g: g.get_state() for g in generators_of(net)} for net in nets]
    try:
        yield
    except BaseException:
        put_back(before)
        raise
    moved: set[str] = set(before.moved(states()))
    for net, generators in zip(nets, own, strict=True):
        now = {g: g.get_state() for g in generators_of(net)}
        # A network may make its generators when it needs them, not replace them.
        if generators and not all(g in now and s.equal(now[g]) for g, s in generators.items()):
            moved.add("network")
    if not moved:
        return
    names = {"python": "Python's global generator", "network": "a torch.Generator of the network"}
    named = " and ".join(names.get(s, f"{s}'s global generator") for s in sorted(moved))
    message = (
        f"random numbers were drawn from {named} where no seed of the run reaches: equal seeds "
        "would not give equal runs. A network that draws in some of its forward passes alone needs "
        "Model(net, draws=True); draw in forward passes, not in backward hooks, and from "
        "generators that are made once; objectives, backends and schedules: from a generator of "
        "your own with a seed, as torch.Generator().manual_seed(0)"
    )
    if threading.active_count() == 1:
        put_back(before)
        raise InputError(message)
    warnings.warn(f"{message}. (Or another thread drew them.)", RuntimeWarning, stacklevel=3)
