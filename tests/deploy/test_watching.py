"""A server's processes that end in the middle of a run, and the lock of a folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from fedshift.errors import InputError, TrainingError
from fedshift.record.in_use import IN_USE
from fedshift_deploy.federation import Link, follow, superlink
from fedshift_deploy.inside import listening, private_socket
from fedshift_deploy.joining import join
from fedshift_deploy.place import make_place
from fedshift_deploy.processes import descendants, free_port, running, still_running
from fedshift_deploy.watching import SERVERAPP, SUPEREXEC, SUPERLINK, Watch
from support.loopback import loopback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes as on Linux")
# A process with a child, in the places and with the names of a SuperLink's.
CHILD = "setsid bash -c 'exec -a flower-superexec sleep 60' & setsid bash -c 'exec -a {} sleep 60'"
SCRIPT = CHILD.format("flwr-serverapp") + " & wait; sleep 60"

ONE = """name = "run"
data = { name = "fashion-mnist-mini", limit = 300 }
shift = { kind = "iid", clients = 1 }
model.name = "linear"
training = { rounds = 1, steps = 2 }
"""


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr("fedshift_deploy.watching.PAUSE", 0.0)
    seen: dict[int, str] = {}
    with running(["bash", "-c", SCRIPT], os.environ, tmp_path / "log", seen) as process:
        made, end = Watch(process, seen), time.monotonic() + 20
        while sum("sleep" not in c and "60" in c for c in seen.values()) < 2:
            assert made() == {}
            assert time.monotonic() < end, seen
        yield made
    assert still_running(seen) == []


def kill(watch: Watch, word: str) -> None:
    (pid,) = [pid for pid, line in watch.seen.items() if line.startswith(word)]
    os.kill(pid, signal.SIGKILL)
    # A killed process is there for a moment.
    while still_running({pid: watch.seen[pid]}):
        time.sleep(0.01)


@pytest.mark.slow
def test_the_server_of_the_previous_run_may_end(watch: Watch) -> None:
    watch.begin()
    kill(watch, "flwr-serverapp")
    assert watch() == {}


def test_a_process_that_ended_is_named(watch: Watch) -> None:
    kill(watch, "flwr-serverapp")
    assert watch() == {SERVERAPP: None}
    kill(watch, "flower-superexec")
    assert watch() == {SUPEREXEC: None}
    watch.process.kill()
    watch.process.wait()
    assert watch() == {SUPERLINK: -9}


@pytest.mark.slow
def test_what_a_superlink_started_ends_with_it() -> None:
    """Within 5 s, even while the killed process is a zombie."""
    code = "import sys, time; from fedshift_deploy.inside import end_without; "
    code += "end_without(sys.argv[1]); print('begun', flush=True); time.sleep(60)"
    with private_socket() as env:
        (path,) = env.values()
        with listening(path) as sock, subprocess.Popen(
            [sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True
        ) as child:  # fmt: skip
            sock.listen()
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(2.5)
            sock.close()
            assert child.wait(5) == 1


@contextlib.contextmanager
def with_executor(folder: Path, *, needed: bool) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that waits under `executor`, and the id of a process in the SuperExec's place."""
    place = folder / "superexec"
    place.write_text("#!/bin/sh\necho $$\nexec sleep 60\n")
    place.chmod(0o700)
    code = (
        "import sys, time; from fedshift_deploy.inside import executor\n"
        f"sys.executable = {str(place)!r}\n"
        f"with executor('a', needed={needed}): time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            yield parent, pid
        finally:
            for one in (parent.pid, pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


@pytest.mark.slow
def test_a_client_ends_with_its_superexec(tmp_path: Path) -> None:
    """Within 5 s, with a line that gives the reason; it stays while the SuperExec does."""
    with with_executor(tmp_path, needed=True) as (parent, superexec):
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(2.5)
        os.kill(superexec, signal.SIGKILL)
        words = parent.communicate(timeout=5)[1]
        assert parent.returncode == 1
        expected = "Flower's SuperExec was ended by signal 9, perhaps for lack of memory\n"
        assert words == expected


@pytest.mark.slow
def test_a_superlink_stays_for_the_server_to_name_its_superexec(tmp_path: Path) -> None:
    """The control of the test above."""
    with with_executor(tmp_path, needed=False) as (parent, superexec):
        os.kill(superexec, signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(3.5)


@pytest.mark.slow
def test_a_client_whose_superexec_is_killed_joins_again(tmp_path: Path) -> None:
    """Real processes: within 5 s it gives the reason, and then takes part in a run."""
    with loopback(tmp_path / "f", ONE, 1) as fed:
        client = fed.join(0)
        assert client.stderr is not None
        assert line_with(client.stderr, "joined")
        node = fed.node(0)
        (superexec,) = (p for p, a in descendants(node).items() if "flower-superexec" in a)
        os.kill(superexec, signal.SIGKILL)
        began = time.monotonic()
        why = "SuperNode failed (Flower's SuperExec was ended by signal 9, perhaps for lack of"
        assert why in line_with(client.stderr, "failed")
        assert time.monotonic() - began < 5
        assert line_with(client.stderr, "joined")
        assert fed.node(0) != node
        fed.play(tmp_path / "run")
        assert [e["round"] for e in fed.events if e["event"] == "round"] == [1]
    # A SuperNode that gets a signal has time to end, although its SuperExec ends first.
    log = (tmp_path / "f" / "clients" / "client-0" / "supernode.log").read_text()
    assert log.count("SuperExec was ended") == log.count("SuperNode terminated gracefully") == 1


def line_with(stream: IO[str], word: str) -> str:
    """The next line that has a word; "" at the end."""
    return next((line for line in stream if word in line), "")


@pytest.mark.slow
def test_a_killed_superlink_leaves_nothing_behind(watch: Watch) -> None:
    """Its children then have no parent to trace; the fixture checks that they are gone."""
    watch.process.kill()
    watch.process.wait()
    assert watch() == {SUPERLINK: -9}
    assert len(still_running(watch.seen)) >= 2


@pytest.mark.parametrize(
    ("status", "message"),
    [("running", "ServerApp was ended, perhaps"), ("finished:failed", "the run finished:failed")],
)
def test_a_run_without_its_server_ends(
    status: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Flower knows why the run ended, that is the reason."""
    here = "fedshift_deploy.federation."
    monkeypatch.setattr(f"{here}run_flower", lambda *a: {"runs": [{"status": status}]})
    monkeypatch.setattr(f"{here}inside", lambda name: ["true"])
    link = Link(tmp_path, os.environ, tmp_path / "log", lambda: {SERVERAPP: None})
    with pytest.raises(TrainingError, match=message):
        follow("1", tmp_path / "run", link, lambda event: None)


def test_the_error_says_how_to_go_on(tmp_path: Path) -> None:
    link = Link(tmp_path, {}, tmp_path / "log", lambda: {SUPERLINK: -9, SUPEREXEC: None})
    with pytest.raises(TrainingError, match=r"signal 9, .*`fedshift deploy server FOLDER` ") as e:
        follow("1", tmp_path / "run", link, lambda event: None)
    assert e.value.exit_code == 4
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(TrainingError, match=f"deploy server FOLDER --resume {tmp_path / 'run'}`"):
        follow("1", tmp_path / "run", link, lambda event: None)


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[int]:
    """A folder in which another process is at work."""
    code = (
        "import fcntl, os, sys, time\n"
        f"f = open({str(folder / IN_USE)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "print(os.getpid(), file=f, flush=True); print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_one_server_and_one_client_per_folder(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    make_place(folder, "", 1, ["127.0.0.1"])
    place = folder / "clients" / "client-0"
    with taken(folder) as pid:
        message = rf"f: another process \(number {pid}\) is at work in this folder"
        with pytest.raises(InputError, match=message):  # noqa: SIM117
            with superlink(folder, host="127.0.0.1", port=free_port()):
                pass
        # The one at work reads this file for its address.
        assert not (folder / "flower" / "config.toml").exists()
        with pytest.raises(InputError, match="cannot be reached"):
            join(place, f"127.0.0.1:{free_port()}", patience=0.0)
    with taken(place), pytest.raises(InputError, match="client-0: another process"):
        join(place, f"127.0.0.1:{free_port()}", patience=0.0)
    assert json.loads((place / "client.json").read_text())["partition"] == 0
