"""Processes that wait for one another: they spin briefly, then block."""

from __future__ import annotations

import sys
import threading
import time
from multiprocessing import Pipe
from typing import Any

import pytest

from fedshift import recipes
from fedshift.engine.backends import loop
from fedshift.engine.processes import waiting as module
from fedshift.engine.processes.pool import workers
from fedshift.engine.processes.waiting import SPIN, spin_seconds, wait_for
from fedshift.engine.processes.worker import Task
from fedshift.engine.run import run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.recipes import Setting
from support.federations import make_federation
from support.rounds import different, last

LONG = 30.0


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which a process yielded to others."""
    times: list[float] = []
    monkeypatch.setattr(module.os, "sched_yield", lambda: times.append(time.monotonic()))
    return times


@pytest.mark.parametrize("patience", [0.0, LONG])
def test_processes_that_answered_or_are_gone(patience: float, yields: list[float]) -> None:
    pipes = [Pipe() for _ in range(3)]
    ours = [one for one, _ in pipes]
    pipes[1][1].send("a word")
    assert wait_for(ours, None, patience) == {ours[1]}
    pipes[2][1].close()
    assert wait_for(ours, None, patience) == {ours[1], ours[2]}
    assert not yields  # there was something at once
    assert ours[1].recv() == "a word"
    assert wait_for(ours[:2], time.monotonic()) == set()


def test_first_awake_then_asleep(yields: list[float]) -> None:
    ours, theirs = Pipe()
    began = time.monotonic()
    assert wait_for((ours,), began + 0.2, patience=0.05) == set()
    assert time.monotonic() >= began + 0.2
    assert yields
    assert began <= yields[0] <= yields[-1] < began + 0.2
    yields.clear()
    assert wait_for((ours,), time.monotonic() + 0.05) == set()
    assert not yields
    # Not longer than it is asked to wait, and not at all after the end.
    began = time.monotonic()
    assert wait_for((ours,), began + 0.05, LONG) == set()
    assert wait_for((ours,), began - 1, LONG) == set()
    assert time.monotonic() < began + LONG / 2
    theirs.close()


@pytest.mark.parametrize("patience", [0.0, LONG])
def test_messages_that_arrive_during_a_wait(patience: float) -> None:
    ours, theirs = Pipe()
    sender = threading.Timer(0.05, theirs.send, ("a word",))
    sender.start()
    assert wait_for((ours,), time.monotonic() + LONG, patience) == {ours}
    sender.join()


def test_which_processes_spin() -> None:
    """Those that train clients together."""
    assert spin_seconds() == Task(len, within=loop).patience == SPIN > 0  # type: ignore[arg-type]
    assert Task(len).patience == 0  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
def test_the_same_result_awake_and_asleep(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, yields: list[float]
) -> None:
    def played(seconds: float) -> Any:
        monkeypatch.setattr(module, "SPIN", seconds)
        yields.clear()
        with workers(federation.clients, 2) as team:
            backend = team.blocks(Stacked(dense=True))
            return last(run(recipes.fedavg(setting), federation, 3, backend=backend)), len(yields)

    federation = make_federation(setting.model)
    (one, _), (other, times) = played(SPIN), played(0.0)
    assert not different(one, other)
    assert times == 0
    params = {k: v + 1e-6 for k, v in one.server["params"].items()}
    assert different(one._replace(server=one.server | {"params": params}), other)
