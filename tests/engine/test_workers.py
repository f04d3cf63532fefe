"""Clients in worker processes: bit for bit the loop's result, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedshift import recipes
from fedshift.client.objectives import CrossEntropy
from fedshift.engine.backends import loop
from fedshift.engine.checks.gate import Gate
from fedshift.engine.processes.pool import OURS, Team, pack, unpack, workers
from fedshift.engine.run import Federation, run
from fedshift.errors import FedshiftError, InputError, TrainingError
from fedshift.kernels.allocator import keep_memory
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.comparing import max_difference
from support.every_method import MAKE, ROUNDS, Make
from support.federations import CLASSES, FEATURES, hears_ctrl_c, make_clients, make_federation
from support.odd_work import Meddling, round_of
from support.rounds import different, last

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
pytestmark = [linux, pytest.mark.routed]


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Fail where a test would wait for ever."""

    def late(*args: Any) -> None:
        raise RuntimeError("this takes for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def federation(setting: Setting) -> Federation:
    return make_federation(setting.model)


@pytest.fixture(scope="module")
def two() -> Iterator[Team]:
    """Two workers for the runs of all methods."""
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


@pytest.mark.few(3)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_shares_give_the_loops_result(make: Make, setting: Setting, two: Team) -> None:
    algorithm, federation = make(setting), make_federation(setting.model, tuple(two.clients))
    alone = last(run(algorithm, federation, 2, cohort=4))
    together = last(run(algorithm, federation, 2, cohort=4, backend=two.blocks(loop)))
    assert not different(alone, together)


@pytest.mark.slow
def test_another_seed_gives_another_result(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.fedavg(setting)
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


def test_classes_and_functions_of_a_function_are_inherited(setting: Setting) -> None:
    """As in a notebook: neither the network's class nor the loss can be pickled."""

    class Local(Mlp):
        pass

    class Mine(CrossEntropy):
        def __call__(self, view: Any) -> Any:
            return 2.0 * super().__call__(view)

    model = build(lambda: Local((FEATURES,), (10,), CLASSES), seed=1)
    federation = make_federation(model)
    method = recipes.fedavg(Setting(model, setting.target, setting.local))
    method = replace(method, objective=Mine())  # type: ignore[type-var]
    with workers(federation.clients, 2) as team:
        for backend in (team, team.blocks(lambda stage, jobs: loop(stage, jobs))):
            there = last(run(method, federation, 2, backend=backend))
            assert not different(last(run(method, federation, 2)), there)


def test_a_run_that_goes_on_with_another_network_is_forked_anew(setting: Setting) -> None:
    net: Any = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    model = Model(net)
    federation, method = make_federation(model), recipes.fedavg(Setting(model, setting.target))
    with workers(federation.clients, 2) as team:
        ends = []
        for backend in (team, loop):
            net[1] = nn.ReLU()
            first = last(run(method, federation, 1, backend=backend))
            net[1] = nn.Tanh()
            model.init()
            ends.append(last(run(method, federation, 2, after=first, backend=backend)))
        assert not different(*ends)


def acts(how: str) -> Any:
    """What a client does instead of its work."""

    class TwoWordsError(FedshiftError):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} {two}")

    def act(message: Any, data: Any) -> None:
        match how:
            case "torch":
                torch.ones(2) @ torch.ones(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "defect":
                raise KeyError("a defect")
            case "unpicklable":
                raise KeyError(lambda: 1)
            case "two words":
                raise TwoWordsError("gone", "astray")

    return act


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("torch", TrainingError, "^client 4 failed: .*size"),
        ("killed", TrainingError, "client 4 ended without an answer, exit code -9; killed"),
        ("exit", TrainingError, "client 4 ended without an answer, exit code 3$"),
        ("defect", KeyError, "a defect"),
        ("unpicklable", TrainingError, "KeyError: .*lambda"),
        ("two words", TrainingError, "TwoWordsError: gone astray"),
    ],
)
def test_failures_name_the_client(
    how: str, kind: type[Exception], message: str, setting: Setting, federation: Federation
) -> None:
    method = recipes.fedavg(setting)
    with workers(federation.clients, 2) as backend:
        stage, todo = round_of(Meddling(method, acts(how), client=4), federation)
        with pytest.raises(kind, match=message):
            list(backend(stage, todo))
        stage, todo = round_of(method, federation)
        assert sorted(r.client for r in backend(stage, todo)) == list(range(len(todo)))


def test_a_signal_to_the_group_is_the_main_processs(
    setting: Setting, federation: Federation
) -> None:
    stage, todo = round_of(recipes.fedavg(setting), federation)
    with workers(federation.clients, 1) as team:
        assert len(list(team(stage, todo))) == len(todo)
        for each in (signal.SIGTERM, signal.SIGINT):
            os.kill(team.members[0].process.pid or 0, each)
        assert len(list(team(stage, todo))) == len(todo)
        os.kill(team.members[0].process.pid or 0, signal.SIGKILL)
        with pytest.raises(TrainingError, match="client 0 ended without an answer, exit code -9"):
            list(team(stage, todo))
        assert len(list(team(stage, todo))) == len(todo)


def test_any_tensor_travels() -> None:
    v = torch.tensor([1 + 2j, -3j])
    parts = {
        "a": {"conj": v.conj(), "neg": v.conj().imag, "none": torch.zeros(0, 3)},
        "b": {"one": torch.tensor(2.0, dtype=torch.bfloat16), "rows": torch.arange(6).view(2, 3).T},
        "c": {},
        "d": {"bool": torch.tensor([True, False]), "small": torch.tensor(3, dtype=torch.uint8)},
    }
    back = unpack(pack(parts))
    assert {part: [*tree] for part, tree in back.items()} == {p: [*t] for p, t in parts.items()}
    for part, tree in parts.items():
        for name, tensor in tree.items():
            other = back[part][name]
            assert other.dtype == tensor.dtype
            assert torch.equal(other, tensor)
            assert other.data_ptr() % 64 == 0


def test_the_same_message_travels_once(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 6 clients and one worker, parameters are sent once a round, not six times."""
    sent: list[bool] = []

    def spy(parts: Any) -> Any:
        sent.append("params" in parts)
        return pack(parts)

    monkeypatch.setattr("fedshift.engine.processes.pool.pack", spy)
    with workers(federation.clients, 1) as team:
        list(run(recipes.fedavg(setting), federation, 2, backend=team))
    assert sent[::2] == [True, *[False] * 5] * 2  # of each job, its message and its state


@pytest.mark.slow
def test_one_round_at_a_time(setting: Setting, federation: Federation) -> None:
    """The later round is complete; the earlier one raises an error."""
    stage, todo = round_of(recipes.fedavg(setting), federation)
    with workers(federation.clients, 1) as team:
        begun = team(stage, todo)
        next(begun)
        later = team(stage, todo[2:])
        replies = [next(later)]
        with pytest.raises(InputError, match="another round began on these workers"):
            next(begun)
        replies += later
        assert [reply.client for reply in replies] == [job.client for job in todo[2:]]
        begun, later = team(stage, todo), team(stage, todo)
        next(begun)
        next(later)
        begun.close()
        assert len(list(later)) == len(todo) - 1


def test_odd_replies_drop_out_as_in_one_process(setting: Setting, federation: Federation) -> None:
    gentle = replace(federation, gate=Gate(on_bad="drop"))
    method = Meddling(recipes.fedavg(setting), acts("torch"), client=4)
    alone = last(run(method, gentle, 2))
    with workers(federation.clients, 2) as team:
        for backend in (team, team.blocks(loop)):
            there = last(run(method, gentle, 2, backend=backend))
            assert [(one.client, one.kind) for one in there.dropped] == [(4, "error")]
            assert not different(there, alone)


@pytest.mark.few(1)
@pytest.mark.parametrize("spread", [lambda team: team, lambda team: team.blocks(loop)])
def test_workers_that_have_ended_say_so(
    spread: Any, setting: Setting, federation: Federation
) -> None:
    with workers(federation.clients, 2) as team:
        backend = spread(team)
    with pytest.raises(InputError, match="these workers have ended; run within the `with` block"):
        last(run(recipes.fedavg(setting), federation, 1, backend=backend))


def test_workers_that_are_refused(setting: Setting, federation: Federation) -> None:
    with pytest.raises(InputError, match="0 workers; give 1 or more"), workers([], 0):
        pass
    others = make_clients(seed=3)
    with workers(others, 1) as team, pytest.raises(InputError, match="other examples"):
        last(run(recipes.fedavg(setting), federation, 1, backend=team))


def test_workers_in_a_thread_and_without_gradients(
    setting: Setting, federation: Federation
) -> None:
    """Forked from another thread than the main one, within `no_grad` and inference mode."""
    method, ends = recipes.fedavg(setting), []

    def there() -> None:
        with workers(federation.clients, 2) as team, torch.inference_mode():
            ends.append(last(run(method, federation, 2, backend=team)))

    thread = threading.Thread(target=there)
    thread.start()
    thread.join()
    assert not different(ends[0], last(run(method, federation, 2)))


@pytest.mark.slow
def test_teams_end_in_any_order(setting: Setting, federation: Federation) -> None:
    """Also where a process of one team was forked later, with copies of the other team's pipes."""
    algorithm, before = recipes.fedavg(setting), set(OURS)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, 2) as one:
        with workers(federation.clients, 2) as two:
            for team in (one, two, one):
                assert different(last(run(algorithm, federation, 1, backend=team)), alone) == []
        first, second = workers(federation.clients, 1), workers(federation.clients, 1)
        for team in (first.__enter__(), second.__enter__()):
            last(run(algorithm, federation, 1, backend=team))
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    assert before == OURS


def test_a_team_ends_although_processes_were_forked_meanwhile(
    setting: Setting, federation: Federation
) -> None:
    context = multiprocessing.get_context("fork")
    with workers(federation.clients, 1) as team:
        team.begin(recipes.fedavg(setting), federation)
        other = context.Process(target=time.sleep, args=(50,))
        other.start()
        began = time.monotonic()
    assert time.monotonic() - began < 10
    other.kill()
    other.join()


ORPHANS = """
    import os, sys, torch
    sys.path.insert(0, sys.argv[1])
    from support.federations import make_clients, make_federation
    from fedshift import FedAvg, Model
    from fedshift.engine.processes.pool import workers
    model = Model(torch.nn.Linear(8, 5))
    federation = make_federation(model)
    with workers(federation.clients, 2) as team:
        team.begin(FedAvg(model), federation)
        print(*[w.process.pid for w in team.members], flush=True)
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


@pytest.mark.slow
def test_a_process_ends_although_its_workers_were_not_ended() -> None:
    """Workers ignore the signal by which multiprocessing ends its children at exit."""
    script = textwrap.dedent(ORPHANS).replace("with workers(", "if team := workers(")
    script = script.replace(" as team:", ".__enter__():")
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1])]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=True)
    assert not any(map(running, map(int, done.stdout.split())))


def test_keeping_memory_changes_nothing(setting: Setting, federation: Federation) -> None:
    """Memory is reused, not its content; it is kept where the system can."""
    before = last(run(recipes.fedavg(setting), federation, 1))
    assert keep_memory() is (os.confstr("CS_GNU_LIBC_VERSION") is not None)
    after = last(run(recipes.fedavg(setting), federation, 1))
    assert max_difference(before.server["params"], after.server["params"]) == 0
