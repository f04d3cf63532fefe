"""Clients in worker processes: bit for bit the loop's result, and no process left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.engine.backends import Backend, loop
from fedshift.engine.processes.pool import Team, workers
from fedshift.engine.run import run
from fedshift.errors import InputError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.tree import Parts
from support.comparing import max_difference
from support.every_method import MAKE, ROUNDS, Make
from support.federations import CLASSES, FEATURES, hears_ctrl_c, make_clients, make_federation
from support.rounds import different, last

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
pytestmark = [linux, pytest.mark.routed]


@pytest.fixture(scope="module")
def two() -> Iterator[Team]:
    """Two workers for the runs of all methods: to start them anew takes longer than a run."""
    with workers(make_clients(), 2) as team:
        yield team


@pytest.mark.few(2)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_method_gives_the_loops_result(make: Make, setting: Setting, two: Team) -> None:
    algorithm, federation = make(setting), make_federation(setting.model, tuple(two.clients))
    alone = last(run(algorithm, federation, ROUNDS, cohort=4))
    together = last(run(algorithm, federation, ROUNDS, cohort=4, backend=two))
    assert not different(alone, together)
    assert together.trained == alone.trained


@pytest.mark.slow
def test_another_seed_gives_another_result(setting: Setting) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    with workers(federation.clients, 2) as backend:
        one = last(run(algorithm, federation, 2, cohort=4, backend=backend))
        other = make_federation(setting.model, seed=1)
        assert different(one, last(run(algorithm, other, 2, cohort=4, backend=backend)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, 9])
def test_any_number_of_workers(count: int, setting: Setting, normed: Model) -> None:
    """9 workers are more than clients; buffers and counters are sent as well."""
    local = replace(setting.local, batch=10)  # no batch of one
    algorithm = recipes.scaffold(Setting(normed, setting.target, local))
    federation = make_federation(normed)
    with workers(federation.clients, count) as backend:
        together = last(run(algorithm, federation, 2, backend=backend))
    assert not different(last(run(algorithm, federation, 2)), together)


@dataclass(frozen=True)
class Failing:
    """A client update that fails on one client, in a chosen way."""

    client: int
    how: str

    def __call__(self, message: Parts, state: Parts, data: Any, plans: Any) -> tuple[Parts, Parts]:
        if int(data.id) == self.client:
            match self.how:
                case "torch":
                    torch.ones(2) @ torch.ones(3)
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "exit":
                    os._exit(3)
                case "defect":
                    raise KeyError("a defect")
        return {"report": {"id": data.id}}, {}


def jobs(setting: Setting) -> Any:
    federation = make_federation(setting.model)
    from fedshift.engine.backends import Job

    return federation.clients, [Job(i, {}, {}, c, {}) for i, c in enumerate(federation.clients)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("torch", TrainingError, "^client 4 failed: .*size"),
        ("killed", TrainingError, "client 4 ended without an answer, exit code -9; killed"),
        ("exit", TrainingError, "client 4 ended without an answer, exit code 3$"),
        ("defect", KeyError, "a defect"),
    ],
)
def test_failures_name_the_client(
    how: str, kind: type[Exception], message: str, setting: Setting
) -> None:
    clients, todo = jobs(setting)
    with pytest.raises(kind, match=message), workers(clients, 2) as backend:
        list(backend(Failing(4, how), todo))
    with workers(clients, 2) as backend:
        assert sorted(r.client for r in backend(Failing(99, how), todo)) == list(range(len(todo)))


def test_a_network_of_a_local_class_is_refused(setting: Setting) -> None:
    class Local(Mlp):
        pass

    model = build(lambda: Local((FEATURES,), (10,), CLASSES), seed=1)
    federation = make_federation(model)
    algorithm = recipes.fedavg(Setting(model, setting.target, setting.local))
    with (
        workers(federation.clients, 2) as backend,
        pytest.raises(InputError, match="define its network's class, and what trains"),
    ):
        list(run(algorithm, federation, 1, backend=backend))


def test_a_local_backend_for_shares_is_refused(setting: Setting) -> None:
    federation = make_federation(setting.model)
    local: Backend = lambda update, jobs: loop(update, jobs)  # noqa: E731
    with (
        workers(federation.clients, 2) as team,
        pytest.raises(InputError, match="what trains within them, in a module"),
    ):
        list(run(recipes.fedavg(setting), federation, 1, backend=team.blocks(local)))


@pytest.mark.few(1)
@pytest.mark.parametrize("spread", [lambda team: team, lambda team: team.blocks(loop)])
def test_workers_that_have_ended_say_so(spread: Any, setting: Setting) -> None:
    federation = make_federation(setting.model)
    with workers(federation.clients, 2) as team:
        backend = spread(team)
    with pytest.raises(InputError, match="these workers have ended; run within the `with` block"):
        last(run(recipes.fedavg(setting), federation, 1, backend=backend))


def test_no_workers_are_refused(setting: Setting) -> None:
    with pytest.raises(InputError, match="0 workers; give 1 or more"), workers([], 0):
        pass


def test_the_same_message_travels_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 6 clients and one worker, parameters are sent once a round, not six times."""
    from fedshift.engine.processes import pool as module

    sent: list[set[str]] = []

    def spy(connection: Any, thing: Any, *more: Any) -> None:
        sent.append(set(thing[1][0].new))
        real(connection, thing, *more)

    real = module.send
    monkeypatch.setattr(module, "send", spy)
    federation = make_federation(setting.model)
    with workers(federation.clients, 1) as backend:
        list(run(recipes.fedavg(setting), federation, 2, backend=backend))
    assert [("params" in parts) for parts in sent] == [True, *[False] * 5] * 2


ORPHANS = """
    import os, sys, torch
    sys.path.insert(0, sys.argv[1])
    from support.federations import make_clients
    from fedshift.engine.processes.pool import workers
    with workers(make_clients(), 2) as backend:
        print(*[w.process.pid for w in backend.members], flush=True)
        sys.stdin.read()
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_main_process(how: signal.Signals) -> None:
    script = textwrap.dedent(ORPHANS)
    main = subprocess.Popen(
        [sys.executable, "-c", script, str(Path(__file__).parents[1])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=hears_ctrl_c,
    )  # fmt: skip
    assert main.stdout is not None
    pids = [int(pid) for pid in main.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(running, pids))
    main.send_signal(how)
    main.wait(90)
    deadline = time.monotonic() + 60
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, pids))


def test_pipes_between_processes_are_large(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pipes are enlarged as far as the system allows; where it refuses, the usual size stays."""

    def room(team: Team) -> int:
        end = team.members[0].connection
        with socket.fromfd(end.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            return line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    clients = make_federation(setting.model).clients
    with workers(clients, 1) as team:
        large = room(team)

    def refuse(*args: Any) -> None:
        raise OSError("no buffer space available")

    monkeypatch.setattr(socket.socket, "setsockopt", refuse)
    with workers(clients, 1) as team:
        assert room(team) < large


@pytest.mark.slow
def test_tensors_are_in_shared_memory(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that replaces another uses its shared memory; without any, pipes are used."""
    federation, algorithm = make_federation(setting.model), recipes.scaffold(setting)
    alone = last(run(algorithm, federation, 2))

    write = os.writev

    def refuse(descriptor: int, views: list[memoryview]) -> int:
        assert len(views) == 1, "tensors in a pipe"
        return write(descriptor, views)

    with monkeypatch.context() as patch:
        patch.setattr("os.writev", refuse)
        with workers(federation.clients, 2) as team:
            first = team.members[0]
            memory, process = first.room, first.process
            team.replace(first)
            assert first.room is memory
            assert first.process is not process
            assert different(last(run(algorithm, federation, 2, backend=team)), alone) == []

    def none(*args: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("mmap.mmap", none)
    with workers(federation.clients, 2) as team:
        assert len(team.members[0].room) == 0
        assert different(last(run(algorithm, federation, 2, backend=team)), alone) == []


def test_memory_is_kept_where_the_system_can() -> None:
    assert keep_memory() is (os.confstr("CS_GNU_LIBC_VERSION") is not None)


def test_nothing_changes_in_the_loop(setting: Setting) -> None:
    """Memory is reused, not its content."""
    federation = make_federation(setting.model)
    before = last(run(recipes.fedavg(setting), federation, 1))
    keep_memory()
    after = last(run(recipes.fedavg(setting), federation, 1))
    assert max_difference(before.server["params"], after.server["params"]) == 0
