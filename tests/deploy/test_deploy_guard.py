"""Who may control a federation's SuperLink, and what its server does when that is silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
import uvicorn

from fedshift.errors import DataError, FedshiftError, InputError, TrainingError
from fedshift_deploy.federation import Link, environment, failure_of, follow, superlink
from fedshift_deploy.guard import put_up
from fedshift_deploy.inside import SOCKET
from fedshift_deploy.place import make_place
from fedshift_deploy.processes import free_port, running

Headers = Iterable[tuple[bytes, bytes]]


def requested(
    app: Any, path: str, peer: str | None, at: Any = ("192.0.2.1", 8000), headers: Headers = ()
) -> int:
    """The status of the answer to a POST from this address, by this port or socket."""
    sent: list[Any] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "https", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"x-forwarded-for", b"127.0.0.1"), *headers],
        "client": (peer, 5) if peer else None, "server": at,
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.slow
def test_the_port_gives_what_nodes_need_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Flower's own application: only the socket lets callers start runs or register keys."""
    from flwr.superlink import extensions
    from flwr.superlink.main import create_app

    path, fleet = "/v1/control/start-run", "/v1/fleet/pull-messages"
    assert requested(create_app(), path, "192.0.2.9") != 403  # the control: Flower lets all in
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setattr(uvicorn, "run", uvicorn.run)
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    monkeypatch.setenv(SOCKET, "/tmp/s/flower")
    put_up(tmp_path / "f")
    assert "FORWARDED_ALLOW_IPS" not in os.environ
    guarded = create_app()
    # None: that of a connection which has just ended.
    for peer in ("192.0.2.9", "2001:db8::1", "127.0.0.1", "::1", "192.0.2.1", None):
        for asked_for in (path, "/v1/runtime/acquire-task", "/v1/control/register-node", "/docs"):
            assert requested(guarded, asked_for, peer) == 403
        assert requested(guarded, f"/v1/fleet/..{path}", peer) != 200
        assert requested(guarded, fleet, peer) != 403
    for at in (None, ("", None), ("/tmp/s", None)):
        assert requested(guarded, path, None, at) == 403
    assert requested(guarded, path, None, ("/tmp/s/flower", None)) != 403


def test_a_federations_superlink_is_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    @contextlib.contextmanager
    def never(arguments: list[str], env: Any, log: Path, others: Any) -> Iterator[None]:
        started.append(arguments)
        raise InputError("enough")
        yield

    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    monkeypatch.setattr("fedshift_deploy.federation.running", never)
    with (
        pytest.raises(InputError, match="enough"),
        superlink(tmp_path / "f", host="127.0.0.1", port=free_port()),
    ):
        pass
    guard = [sys.executable, "-P", "-m", "fedshift_deploy.guard", str(tmp_path / "f")]
    assert started[0][:5] == guard
    assert "--enable-supernode-auth" in started[0]
    assert "--insecure" not in started[0]


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "flower").write_text("in the way")
    with pytest.raises(InputError, match="flower: cannot be made: File exists; Flower writes"):
        environment(tmp_path / "flower")
    nowhere = tmp_path / "none" / "log"
    with (
        pytest.raises(InputError, match="log: cannot be written: No such file"),
        running([sys.executable, "-c", ""], os.environ, nowhere),
    ):
        pass


def test_flower_may_be_silent_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status that is unavailable ends no run, unless it stays so."""
    link, here = Link(tmp_path, {}, tmp_path / "log"), "fedshift_deploy.federation."
    for name in ("POLL", "STATUS"):
        monkeypatch.setattr(f"{here}{name}", 0.0)
    answers_in_turn = [InputError("busy")] * 3 + [{"runs": [{"status": "running"}]}]

    def busy(arguments: list[str], env: Any) -> Any:
        if answers_in_turn:
            answer = answers_in_turn.pop(0)
            if isinstance(answer, InputError):
                raise answer
            return answer
        (tmp_path / "summary.json").write_text("{}")
        return {"runs": [{"status": "finished:completed"}]}

    monkeypatch.setattr(f"{here}run_flower", busy)
    follow("1", tmp_path, link, lambda event: None)
    (tmp_path / "summary.json").unlink()
    answers_in_turn += [InputError("gone")] * 4
    with pytest.raises(FedshiftError, match="Flower does not say how the run is: gone") as error:
        follow("1", tmp_path, link, lambda event: None)
    assert error.value.exit_code == 70


def test_flower_is_asked_only_about_runs_that_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with new events goes on, whatever Flower says of it; the control has none."""
    link, here = Link(tmp_path, {}, tmp_path / "log"), "fedshift_deploy.federation."
    # Reading the events adds one, as many as are left to add.
    left, seen = [10], list[dict[str, Any]]()
    path = tmp_path / "events.jsonl"

    def ended() -> dict[str, int | None]:
        if left[0]:
            left[0] -= 1
            with path.open("a") as f:
                f.write('{"event": "round"}\n')
        return {}

    monkeypatch.setattr(f"{here}POLL", 0.1)
    monkeypatch.setattr(f"{here}STATUS", 0.5)
    monkeypatch.setattr(f"{here}run_flower", lambda *a: {"runs": [{"status": "finished:lost"}]})
    monkeypatch.setattr(f"{here}failure_of", lambda status, *a: TrainingError(status))
    with pytest.raises(TrainingError, match="finished:lost"):
        follow("1", tmp_path, replace(link, ended=ended), seen.append)
    assert len(seen) == 10
    left[0] = 10
    path.unlink()
    with pytest.raises(TrainingError, match="finished:lost"):
        follow("1", tmp_path, link, seen.append)
    assert len(seen) == 10


def test_earlier_events_are_not_repeated(tmp_path: Path) -> None:
    """Nor does the earlier failure end the run that goes on after it."""
    lines = [{"event": "round"}, {"event": "failed", "error": "killed"}, {"event": "start"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    (tmp_path / "summary.json").write_text("{}")
    events: list[Any] = []
    follow("1", tmp_path, Link(tmp_path, {}, tmp_path / "log"), events.append, seen=2)
    assert events == lines[2:]


def test_runs_that_fail_before_their_first_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is in Flower's record of the server's output."""
    flwr, link = tmp_path / "flwr", Link(tmp_path, os.environ, tmp_path / "log")
    monkeypatch.setattr("fedshift_deploy.federation.inside", lambda name: [str(flwr)])
    flwr.touch(0o755)
    for log, kind, words in (
        ("fedshift.errors.DataError: t.csv: damaged\nbye", DataError, "t.csv: damaged"),
        ("one\ntwo\nKeyError: 3\nbye", TrainingError, "the run finished:failed: two KeyError: 3 b"),
    ):
        flwr.write_text(f"#!/bin/sh\ncat <<'END'\n{log}\nEND\n")
        error = failure_of("finished:failed", "1", link)
        assert type(error) is kind
        assert str(error).startswith(words)


def test_a_superlink_under_a_wrong_name_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_place(tmp_path / "f", "", 1, ["127.0.0.1"])
    here = "fedshift_deploy.federation."
    monkeypatch.setattr(f"{here}running", lambda *a: contextlib.nullcontext())
    monkeypatch.setattr(f"{here}wait_for", lambda *a: None)
    monkeypatch.setattr(f"{here}answers", lambda server, authority: f"{server} hangs up")
    with (
        pytest.raises(FedshiftError, match=r"^127.0.0.1:\d+ hangs up; see .*superlink.log"),
        superlink(tmp_path / "f", host="127.0.0.1", port=free_port()),
    ):
        pass
