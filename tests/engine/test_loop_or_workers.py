"""The default backend chooses the loop or workers by time alone; the numbers are the same."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedshift import FedAvg, Local, Model
from fedshift.data import client_data, register
from fedshift.engine.backend_names import QUICKER
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
from fedshift.engine.choosing import loop_or_workers
from fedshift.engine.choosing.loop_or_workers import Quicker, forks_safely
from fedshift.engine.federation import Federation
from fedshift.engine.run import run
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.config.schema import Training
from fedshift.experiments.engines import InProcess, Way, default_engine
from fedshift.models.dense import Mlp
from fedshift.seeds import Seeds

CLIENTS = 4


def federation() -> tuple[FedAvg, Federation]:
    draws = torch.Generator().manual_seed(0)
    clients = [
        client_data(torch.randn(20, 3, generator=draws), torch.arange(20) % 2, i)
        for i in range(CLIENTS)
    ]
    model = Model(Mlp((3,), (4,), 2))
    method = FedAvg(model, local=Local(lr=0.1, epochs=1, batch=10))
    return method, Federation(clients, *model.init(), register(clients, 2), Seeds.of(0))


def slow(seconds: float, name: str, played: list[str], clock: list[float]) -> Backend:
    """The loop on a clock that advances by a fixed time for each client."""

    def backend(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        played.append(name)
        for job in jobs:
            clock[0] += seconds
            yield from loop(stage, [job])

    return backend


def rounds_by(
    monkeypatch: pytest.MonkeyPatch, here: float, there: float, rounds: int = 8
) -> tuple[list[str], bool]:
    """(the backend of each round, whether workers are left at the end)."""
    played, there_still, clock = list[str](), [False], [0.0]

    @contextlib.contextmanager
    def hire() -> Iterator[Backend]:
        there_still[0] = True
        yield slow(there, "workers", played, clock)
        there_still[0] = False

    monkeypatch.setattr(loop_or_workers, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(loop_or_workers, "loop", slow(here, "loop", played, clock))
    monkeypatch.setattr(loop_or_workers, "WORTH", 0.0)
    method, clients = federation()
    backend = Quicker(hire, 2, rounds)
    for last in backend.during(run(method, clients, rounds, backend=backend)):  # noqa: B007
        still = there_still[0]
    *_, loop_end = run(method, clients, rounds)
    assert all(
        torch.equal(v, loop_end.server["params"][k]) for k, v in last.server["params"].items()
    )
    return played, still


def test_the_faster_one_plays_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plays two rounds, since a first call is slow; the numbers are the loop's either way."""
    played, there = rounds_by(monkeypatch, 0.01, 0.0)
    assert played == ["loop"] * 2 + ["workers"] * 6
    assert there
    played, there = rounds_by(monkeypatch, 0.0, 0.01)
    assert played == ["loop"] * 2 + ["workers"] * 2 + ["loop"] * 4
    assert not there


def test_after_failed_workers_the_loop_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that workers have trained is not trained again."""

    def failing(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        yield next(loop(stage, jobs))
        raise TrainingError("a process ended")

    monkeypatch.setattr(loop_or_workers, "WORTH", 0.0)
    method, clients = federation()
    backend = Quicker(lambda: contextlib.nullcontext(failing), 2, 6)
    *_, last = backend.during(run(method, clients, 6, backend=backend))
    assert backend.chosen == "loop"
    *_, loop_end = run(method, clients, 6)
    assert all(
        torch.equal(v, loop_end.server["params"][k]) for k, v in last.server["params"].items()
    )


def test_long_rounds_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_or_workers, "LONG", 0.03)
    assert rounds_by(monkeypatch, 0.02, 0.01, 4)[0] == ["loop"] + ["workers"] * 3


def test_short_runs_stay_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Short runs, and systems that cannot fork."""

    def fails() -> Any:
        raise InputError("no processes")

    for worth in (1e9, 0.0):
        monkeypatch.setattr(loop_or_workers, "WORTH", worth)
        method, clients = federation()
        backend = Quicker(fails, 2, 5)
        *_, last = backend.during(run(method, clients, 5, backend=backend))
        assert backend.chosen == "loop"
        assert last.t == 5


@pytest.mark.parametrize(
    ("training", "safe", "name"),
    [
        ({}, True, QUICKER),
        ({}, False, "loop"),
        ({"threads": 2}, True, "loop"),
    ],
)
def test_the_default_backend(
    monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], safe: bool, name: str
) -> None:
    monkeypatch.setattr("fedshift.experiments.engines.os.cpu_count", lambda: 2)
    monkeypatch.setattr("fedshift.experiments.engines.forks_safely", lambda: safe)
    engine = default_engine()
    assert isinstance(engine, InProcess)
    method, clients = federation()
    *_, last = engine.rounds(
        method, clients, Training(rounds=2, **training), {}, after=None, meter=None
    )
    assert engine.way.name == name
    assert engine.backend == "loop"
    *_, loop_end = run(method, clients, 2)
    assert torch.equal(
        torch.cat([v.flatten() for v in last.server["params"].values()]),
        torch.cat([v.flatten() for v in loop_end.server["params"].values()]),
    )


def test_with_one_core_the_default_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.experiments.engines.os.cpu_count", lambda: 1)
    engine = default_engine()
    assert isinstance(engine, InProcess)
    method, clients = federation()
    list(engine.rounds(method, clients, Training(rounds=1), {}, after=None, meter=None))
    assert engine.way == Way("loop")


def test_forking_is_not_safe_in_a_daemonic_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forks_safely() == ("fork" in multiprocessing.get_all_start_methods())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not forks_safely()


@pytest.mark.parametrize("training", [{"retries": 1}, {"deadline": 9.0, "on_bad_reply": "drop"}])
def test_deadline_and_retries_are_for_flower(training: dict[str, Any]) -> None:
    method, clients = federation()
    for engine in (default_engine(), InProcess(), InProcess(Way("workers", 2))):
        with pytest.raises(InputError, match=f"training.{next(iter(training))} = . is for Flower"):
            engine.rounds(
                method, clients, Training(rounds=2, **training), {}, after=None, meter=None
            )
