"""The messages of `fedshift deploy client`, and when it gives up, on a simulated clock."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.errors import InputError
from fedshift_deploy import supernode
from fedshift_deploy.joining import EVERY, FORGETS, join
from fedshift_deploy.log_records import leave_out_tracebacks
from fedshift_deploy.notices import NOTICES, tell_here
from fedshift_deploy.place import make_place
from fedshift_deploy.supernode import AWAY, BACK, FAILED, JOINED, POLL, Appended

HERE, GONE = "192.0.2.7:8000", "192.0.2.7:8000 cannot be reached: Connection refused"
EXEC = "Flower's SuperExec was ended by signal 9, perhaps for lack of memory"
REFUSED = f"{FAILED}ialize the connection to the SuperLink.\n[code: 2004] Failed to activate."


class World:
    """A simulated clock, a server that may be away, and SuperNodes with planned logs and ends.

    plans: for each SuperNode (seconds after its start, a line of its log, or a notice, or its exit
    code). gone: when the server is away, in seconds, and why if not GONE; an error is raised. After
    the last plan the server is gone.
    """

    def __init__(self, place: Path, plans: list[list[tuple[float, Any]]], gone: Any) -> None:
        self.place, self.plans, self.gone = place, plans, gone
        self.now, self.started = 0.0, 0
        self.printed, self.levels, self.looks = list[tuple[float, str]](), list[str](), list[Any]()
        self.unready: Callable[[], str] = lambda: "unwatched"

    def answers(self, *_: Any) -> str:
        why = self.gone(self.now) or self.started == len(self.plans)
        if isinstance(why, InputError):
            raise why
        return why if isinstance(why, str) else GONE if why else ""

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.looks.append((self.now, self.unready()))

    @contextlib.contextmanager
    def running(self, _: Any, env: dict[str, str], log: Path) -> Iterator[Any]:
        plan, began = list(self.plans[self.started]), self.now
        notices = Path(env[NOTICES])

        def poll() -> int | None:
            while plan and self.now - began >= plan[0][0]:
                what = plan.pop(0)[1]
                if isinstance(what, int):
                    self.started += 1
                    return what
                path, text = (log, what) if isinstance(what, str) else (notices, json.dumps(what))
                with path.open("a") as f:
                    f.write(text + "\n")
            return None

        yield SimpleNamespace(poll=poll, wait=lambda: self.plans[self.started - 1][-1][1])

    def say(self, text: str, level: str) -> None:
        self.printed.append((self.now, text))
        self.levels.append(level)

    def texts(self) -> list[str]:
        return [text for _, text in self.printed]

    def ready_at(self, second: float) -> str:
        """Why the client was not ready then; "" if it was."""
        return next(why for now, why in self.looks if now >= second)  # type: ignore[no-any-return]


Play = Callable[..., tuple[World, str]]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Join in a world until the client gives up; return the world and the error."""
    make_place(tmp_path / "f", "", 1, ["192.0.2.7"])

    def made(
        *plans: list[tuple[float, Any]], patience: float = 12.0, gone: Any = lambda now: False
    ) -> tuple[World, str]:
        place = tmp_path / "f" / "clients" / "client-0"
        world = World(place, list(plans), gone)
        clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)
        for module in ("joining", "supernode"):
            monkeypatch.setattr(f"fedshift_deploy.{module}.time", clock)
        monkeypatch.setattr("fedshift_deploy.joining.answers", world.answers)
        monkeypatch.setattr("fedshift_deploy.joining.clocks", lambda *_: "")
        monkeypatch.setattr(supernode, "running", world.running)

        def watch(unready: Callable[[], str]) -> None:
            world.unready = unready

        with pytest.raises(InputError) as e:
            join(place, HERE, patience=patience, say=world.say, watch=watch)
        return world, str(e.value)

    return made


@pytest.mark.parametrize("patience", [1.0, 12.0, 61.0])
def test_patience_counts_from_when_the_server_is_missed(patience: float, play: Play) -> None:
    """Whatever its SuperNode does, which never gives up; also if it has not joined yet."""
    for joined in ([(3.0, JOINED)], []):
        world, error = play([*joined, (4e3, 0)], patience=patience, gone=lambda now: now > 40)
        assert error == f"{GONE}, for {patience:g} s now"
        if joined:
            assert 40 + patience <= world.now <= 40 + EVERY + patience + 2 * POLL
        else:
            # Its server was there: the SuperNode has a minute to join, and the server is gone then.
            assert world.now <= max(40 + EVERY, patience) + 2 * POLL


def test_a_server_that_answers_and_lets_no_one_in(play: Play) -> None:
    world, error = play([(4e3, 0)], patience=12.0)
    log = world.place / "supernode.log"
    assert error.startswith(f"{HERE} answers, but the SuperNode has not joined it (see {log})")
    assert 60 <= world.now <= 60 + EVERY + POLL


def test_a_server_that_is_away_for_a_while(play: Play) -> None:
    """One line for each change; not ready in between, also before Flower notices."""
    plan = [(3.0, JOINED), (21.0, AWAY), (24.0, AWAY), (43.0, BACK), (100.0, JOINED), (200.0, 0)]
    world, _ = play(plan, patience=60.0, gone=lambda now: 20 < now < 38 or 80 < now < 90)
    left = [round(float(text.split(" ")[-2])) for text in world.texts() if "trying" in text]
    assert world.texts()[:5] == [
        f"joined {HERE}", f"{GONE}; trying again for {left[0]} s", f"{HERE} answers again",
        f"{GONE}; trying again for {left[1]} s", f"{HERE} answers again",
    ]  # fmt: skip
    assert world.levels[:3] == ["info", "warning", "info"]
    assert world.ready_at(2) == "not joined"
    assert world.ready_at(10) == ""
    assert world.ready_at(20 + EVERY + 1) == GONE
    assert world.ready_at(41.0) == f"{HERE} has not answered the SuperNode yet"
    assert world.ready_at(50) == ""
    assert world.ready_at(80 + EVERY + 1) == GONE


def test_a_server_that_came_later_than_its_client_and_is_killed(play: Play) -> None:
    """The message is the same as before the server came, and is repeated."""
    world, _ = play([(3.0, JOINED), (4e3, 0)], gone=lambda now: now < 5 or now > 40)
    again = f"{GONE}; trying again for 12 s"
    assert world.texts() == [again, f"joined {HERE}", again]


@pytest.mark.parametrize(
    ("notices", "expected"),
    [
        ([], "the server has ended; waiting for the next one"),
        ([1, 10], "the run has ended after 10 rounds; waiting for the next one"),
        ([7], "the server has ended; this client last answered in round 7 of 10; waiting for the "),
    ],
)
def test_the_end_of_a_server(notices: list[int], expected: str, play: Play) -> None:
    """Reported once, whether or not Flower notices, and again for the next server."""
    rounds = [(4.0, {"round": t, "rounds": 10}) for t in notices]
    ended = [(3.0, JOINED), *rounds, (30.0, 0)]
    world, _ = play(ended, ended)
    assert [text.startswith(expected) for text in world.texts()] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert world.texts()[2] == f"joined {HERE}"
    world, _ = play([(3.0, JOINED), *rounds, (40.0, 0)], gone=lambda now: 20 < now < 30)
    assert sum(expected in text for text in world.texts()) == 1


@pytest.mark.parametrize(
    "why",
    [f"{HERE} cannot be reached: no answer within 5 s", InputError("ca.crt: is no certificate")],
)
def test_a_silence_in_the_last_round_is_no_end(why: Any, play: Play) -> None:
    """The round may yet be evaluated; the end is reported when it comes. Late lines are ignored."""
    last = {"round": 10, "rounds": 10}
    one = [(3.0, JOINED), (9.0, last), (35.0, last), (50.0, 0)]
    other = [(2.0, JOINED), (5e3, 0)]
    world, _ = play(one, other, gone=lambda now: why if 20 < now < 30 else now > 70)
    texts = [text.partition("; ")[0] for text in world.texts()]
    assert texts == [
        f"joined {HERE}", str(why), f"{HERE} answers again", "the run has ended after 10 rounds",
        f"joined {HERE}", GONE,
    ]  # fmt: skip


def test_answers_after_a_run_are_not_of_the_next(play: Play) -> None:
    last = {"round": 10, "rounds": 10}
    one = [(3.0, JOINED), (9.0, last), (28.0, last), (29.0, 0)]
    away = [(2.0, JOINED), (5e3, 0)]
    world, _ = play(one, away, gone=lambda now: 20 < now < 27 or now > 70)
    assert sum("the run has ended" in text for text in world.texts()) == 1


def test_troubles_are_reported_once_until_a_round_is_answered(play: Play) -> None:
    one, other = {"trouble": 'no column\n"age"'}, {"trouble": "\x1b[2Jnone"}
    fine = {"round": 1, "rounds": 2}
    troubles = [one, one, other, fine, other, other]
    world, _ = play(
        [(1.0, JOINED), *[(2.0 + i, what) for i, what in enumerate(troubles)], (9.0, 0)]
    )
    shown = [t for t, level in zip(world.texts(), world.levels, strict=True) if level == "error"]
    assert shown == ['no column "age"', r"\x1b[2Jnone", r"\x1b[2Jnone"]


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        (EXEC, 1, f"the SuperNode failed ({EXEC}) before it had joined (see "),
        ("ModuleNotFoundError: x", 1, "the SuperNode failed (ModuleNotFoundError: x) before it"),
        ("Killed", -9, "the SuperNode was ended by signal 9, perhaps for lack of memory before it"),
        (f"{FAILED}ialize.\n[SSL: EOF]", 1, "the SuperNode failed ([SSL: EOF]) before it had joi"),
        (REFUSED, 1, f"{HERE} does not let this client in ([code: 2004] Failed to activate.)"),
        (f"{FAILED}ialize.\nClient error '403 Forbidden' for", 1, f"{HERE} does not let this "),
        ("SuperNode terminated gracefully.", 0, f"{HERE} does not let this client in (SuperN"),
    ],
)
def test_only_a_refusal_is_called_one(line: str, code: int, expected: str, play: Play) -> None:
    world, _ = play([(1.0, line), (2.0, code)])
    assert world.texts()[0].startswith(expected)
    assert world.texts()[0].endswith("; trying again for 10 s")
    # What did not come from the server is not the server's word.
    assert ("not let this" in expected) is ("not let this" in " ".join(world.texts()))


def test_a_killed_node_and_a_server_that_is_gone(play: Play) -> None:
    """The client waits until the server forgets a killed SuperNode, not for a missing server."""
    killed, no = [(1.0, JOINED), (2.0, -9)], [(1.0, REFUSED), (1.0, 1)]
    world, error = play(killed)
    assert "cannot be reached" in error
    assert world.now < 1 + 12 + 5
    world, error = play(killed, *[no] * 60)
    assert "does not let this client in" in error
    assert 2 + FORGETS <= world.now <= 2 + FORGETS + 12


def test_readiness_says_what_the_terminal_says(play: Play) -> None:
    """For a SuperNode that is killed, still refused, and back; and for one that never joins."""
    killed, no = [(6.0, JOINED), (20.0, -9)], [(5.0, REFUSED), (5.0, 1)]
    world, _ = play(killed, no, [(9.0, JOINED), (90.0, 0)], gone=lambda now: now < 4)
    assert world.ready_at(2) == GONE
    assert world.ready_at(6) == "not joined"
    assert world.ready_at(15) == ""
    how = "the SuperNode was ended by signal 9, perhaps for lack of memory; joining again"
    # Between two, while the second is refused, and while the third has not joined yet.
    assert [world.ready_at(second) for second in (26, 30, 34, 40)] == [how] * 4
    assert world.ready_at(60) == ""
    # The third one has ended by itself: that the first was killed is no reason any more.
    assert {why for now, why in world.looks if now > 60} == {"", "not joined", GONE}
    world, _ = play([(1.0, REFUSED), (2.0, 1)], [(8.0, JOINED), (20.0, 0)])
    assert world.ready_at(8).startswith(f"{HERE} does not let this client in")
    assert world.ready_at(20) == ""


def test_lines_that_others_append(tmp_path: Path) -> None:
    """Each once and whole, also after logrotate has cut the file."""
    path = tmp_path / "log"
    path.write_text("before\n")
    file = Appended(path)
    with path.open("a") as f:
        f.write("one\ntw")
        f.flush()
        assert file.lines() == ["one"]
        f.write("o\nthree")
        f.flush()
        assert file.lines() == ["two"]
    assert (file.lines(), file.lines(last=True), file.lines()) == ([], ["three"], [])
    path.write_text("anew\n")
    assert file.lines() == ["anew"]
    path.unlink()
    assert file.lines() == []
    # Taken away between the look at its size and the reading of it.
    file._size = lambda: 7  # type: ignore[method-assign]
    assert file.lines() == []


def test_words_for_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only defects show a traceback; without a reader nothing is written."""
    tell_here(InputError("label 10"))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(NOTICES, str(tmp_path / "notices"))
    tell_here(InputError("label 10"))
    try:
        raise ValueError("a bug")
    except ValueError as e:
        tell_here(e)
    assert [json.loads(line)["trouble"] for line in (tmp_path / "notices").open()] == [
        "this client gave the server no answer: label 10",
        "this client gave the server no answer: the client failed (ValueError: a bug); its log has "
        "the traceback",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True]


def test_flowers_own_lines_on_errors_for_users(caplog: pytest.LogCaptureFixture) -> None:
    before, log = logging.getLogRecordFactory(), logging.getLogger("test")
    try:
        leave_out_tracebacks()
        for error in (InputError("another app"), ValueError("a bug")):
            log.error("%s raised an exception", "ClientApp", exc_info=error)
    finally:
        logging.setLogRecordFactory(before)
    assert caplog.records[0].getMessage() == "ClientApp raised an exception: another app"
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]
