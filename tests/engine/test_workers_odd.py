"""Odd cases of worker processes: they end, answer or are given up, in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.data import client_data
from fedshift.engine.backends import ClientUpdate, Forgiving, Job, work
from fedshift.engine.checks.gate import Gate
from fedshift.engine.processes import pipe as wire
from fedshift.engine.processes.pool import OURS, Team, workers
from fedshift.engine.round import jobs_of, open_round
from fedshift.engine.run import Federation, first_state, run, start
from fedshift.errors import FedshiftError, InputError, TrainingError, UnfitError
from fedshift.recipes import Setting
from fedshift.tree import Parts
from support.federations import make_federation
from support.odd_work import OddWork
from support.rounds import different, last

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Fail where a test would wait for ever."""

    def late(*args: Any) -> None:
        raise RuntimeError("this takes for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def federation(setting: Setting) -> Federation:
    return make_federation(setting.model)


def jobs(setting: Setting, federation: Federation) -> tuple[ClientUpdate, list[Job]]:
    algorithm = recipes.fedavg(setting)
    server = start(algorithm, federation).server
    opened = open_round(algorithm, server, torch.arange(len(federation.clients)), 1)
    state = partial(first_state, algorithm, federation)
    return algorithm.client_update, list(jobs_of(opened, federation.clients, state, 0))


@pytest.mark.slow
def test_teams_end_in_any_order(setting: Setting, federation: Federation) -> None:
    """Also where a process of one team was forked later, with copies of the other team's pipes."""
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, 2) as one:
        with workers(federation.clients, 2) as two:
            one.replace(one.members[0])
            two.replace(two.members[1])
            for team in (one, two):
                result = last(run(algorithm, federation, 1, backend=team))
                assert different(result, alone) == []
        first, second = workers(federation.clients, 1), workers(federation.clients, 1)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
    assert not OURS


def test_a_team_ends_although_processes_were_forked_meanwhile(federation: Federation) -> None:
    context = multiprocessing.get_context("fork")
    with workers(federation.clients, 1):
        other = context.Process(target=time.sleep, args=(50,))
        other.start()
        began = time.monotonic()
    assert time.monotonic() - began < 10
    other.kill()
    other.join()


class Sealed:
    """Cannot be pickled; the error is of a kind that pipes raise, too."""

    def __reduce__(self) -> Any:
        raise FileNotFoundError("no such key")


@dataclass(frozen=True)
class Locked:
    """A client's work with an attribute that cannot be sent."""

    update: ClientUpdate
    sealed: Sealed

    def __call__(self, *given: Any) -> tuple[Parts, Parts]:
        return self.update(*given)


def test_what_cannot_be_pickled_is_no_dead_process(
    setting: Setting, federation: Federation
) -> None:
    update, todo = jobs(setting, federation)
    with workers(federation.clients, 1) as team:
        with pytest.raises(InputError, match=r"cannot be sent to other processes \(no such key"):
            list(team(Locked(update, Sealed()), todo))
        assert len(list(team(update, todo))) == len(todo)


class TwoWordsError(FedshiftError):
    """An error that cannot be rebuilt from its message."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def raising(error: Exception, sent: Parts, state: Parts) -> tuple[Parts, Parts]:
    raise error


def unpicklable(sent: Parts, state: Parts) -> tuple[Parts, Parts]:
    raise KeyError(lambda: 1)


def two_words(sent: Parts, state: Parts) -> tuple[Parts, Parts]:
    raise TwoWordsError("gone", "astray")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (unpicklable, TrainingError, "KeyError: .*lambda"),
        (two_words, TrainingError, "TwoWordsError: gone astray"),
        (partial(raising, KeyError("a key")), KeyError, "a key"),
        (partial(raising, TrainingError("too much")), TrainingError, "^client 2 failed: too much$"),
    ],
)
def test_errors_arrive_as_what_they_are_or_in_words(
    change: Any, kind: type[Exception], message: str, setting: Setting, federation: Federation
) -> None:
    update, todo = jobs(setting, federation)
    with workers(federation.clients, 1) as team:
        with pytest.raises(kind, match=message):
            list(team(OddWork(update, 2, change), todo))
        assert len(list(team(update, todo))) == len(todo)  # by the same process


def conjugate(sent: Parts, state: Parts) -> tuple[Parts, Parts]:
    v = torch.tensor([1 + 2j, -3j])
    return {**sent, "odd": {"conj": v.conj(), "neg": v.conj().imag}}, state


def test_lazy_kinds_of_numbers_travel(setting: Setting, federation: Federation) -> None:
    update, todo = jobs(setting, federation)
    with workers(federation.clients, 1) as team:
        (came,) = team(OddWork(update, 0, conjugate), todo[:1])
    assert came.update["odd"]["conj"].tolist() == [1 - 2j, 3j]
    assert came.update["odd"]["neg"].tolist() == [-2.0, 3.0]


@dataclass(frozen=True)
class WithTensor:
    """A client's work that cannot be compared with another."""

    update: ClientUpdate
    v: Tensor

    def __call__(self, *given: Any) -> tuple[Parts, Parts]:
        sent, state = self.update(*given)
        return {**sent, "v": {"v": self.v}}, state


def test_work_with_tensors_is_sent_again(setting: Setting, federation: Federation) -> None:
    update, todo = jobs(setting, federation)
    with workers(federation.clients, 1) as team:
        for number in (1.0, 2.0):
            (came,) = team(WithTensor(update, torch.full((3,), number)), todo[:1])
            assert came.update["v"]["v"].tolist() == [number] * 3


@pytest.mark.slow
def test_one_round_at_a_time(setting: Setting, federation: Federation) -> None:
    """The later round is complete; the earlier one raises an error."""
    update, todo = jobs(setting, federation)
    with workers(federation.clients, 1) as team:
        for taken in (1, 3):  # with nothing left to do, and in the middle
            begun = team(update, todo[:taken])
            next(begun)
            later = team(update, todo[2:])
            replies = [next(later)]
            with pytest.raises(InputError, match="another round began on these workers"):
                next(begun)
            replies += later
            assert [reply.client for reply in replies] == [job.client for job in todo[2:]]
        begun, later = team(update, todo), team(update, todo)
        next(begun)
        next(later)
        begun.close()
        assert len(list(later)) == len(todo) - 1


def test_a_process_that_died_is_gone(setting: Setting, federation: Federation) -> None:
    update, todo = jobs(setting, federation)
    with workers(federation.clients, 1) as team:
        os.kill(team.members[0].process.pid or 0, signal.SIGKILL)
        with pytest.raises(TrainingError, match="client 0 ended without an answer, exit code -9"):
            list(team(update, todo))
        assert len(list(team(update, todo))) == len(todo)


def dropping(team: Team, setting: Setting, federation: Federation) -> list[int]:
    """The clients that are late in a first round; in the second none is."""
    gentle = replace(federation, gate=Gate(on_bad="drop"))
    first, second = run(recipes.fedavg(setting), gentle, 2, backend=team)
    assert second.dropped == ()
    assert {one.reason for one in first.dropped} <= {"no answer in time"}
    return [one.client for one in first.dropped]


def test_an_answer_that_stops_midway_is_late(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, write, flag = os.getpid(), os.writev, multiprocessing.Value("i", 0)

    def stopping(descriptor: int, views: list[memoryview]) -> int:
        if os.getpid() != main and not flag.value:
            flag.value = 1
            write(descriptor, views[:1])
            os.kill(os.getpid(), signal.SIGSTOP)
        return write(descriptor, views)

    monkeypatch.setattr("os.writev", stopping)
    monkeypatch.setattr(wire, "share_memory", lambda: wire.NOWHERE)
    monkeypatch.setattr("fedshift.engine.processes.pool.share_memory", lambda: wire.NOWHERE)
    with workers(federation.clients, 1, deadline=2.0) as team:
        # One process alone: what it had not done is late with it.
        assert dropping(team, setting, federation) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_work_that_is_not_taken_is_late(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refused = wire.send, list[float]()

    def once(*given: Any) -> None:
        if not refused:
            refused.append(given[-1])
            raise TimeoutError
        send(*given)

    monkeypatch.setattr("fedshift.engine.processes.pool.send", once)
    with workers(federation.clients, 2, deadline=30.0) as team:
        assert dropping(team, setting, federation) == [0]
    assert 0 < refused[0] - time.monotonic() <= 30


@pytest.mark.parametrize("way", ["unread", "unread words", "half", "half a word"])
def test_pipes_have_an_end(way: str) -> None:
    """Where the other end reads nothing, or stops after half a message."""
    ours, theirs = Pipe()
    tree: Parts = {"a": {"w": torch.zeros(1 << 23)}}
    end = time.monotonic() + 0.3
    os.write(ours.fileno(), array("q", [9, 0, 0]).tobytes() + (b"abc" if way == "half" else b""))
    ways = {
        "unread": lambda: wire.send(ours, tree, end=end),
        "unread words": lambda: wire.send(ours, bytes(1 << 24), end=end),
    }
    with ours, theirs, pytest.raises(TimeoutError):
        ways.get(way, lambda: wire.receive(theirs, end=end))()
    assert end <= time.monotonic() < end + 5


@pytest.mark.parametrize("update", [lambda *job: failing(), Forgiving(lambda *job: failing())])
def test_processes_that_may_take_no_gradients_are_no_clients_fault(update: Any) -> None:
    """The message is torch's on a machine with a GPU; tests/engine/test_gpu.py tests a real one."""
    job = Job(0, {}, {}, client_data(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), 0), {})
    with pytest.raises(UnfitError, match="Make workers before anything is trained"):
        work(update, job)


def failing() -> Any:
    raise RuntimeError("Unable to handle ... in combination with fork-based multiprocessing. See")
