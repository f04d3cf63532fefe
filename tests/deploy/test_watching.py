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

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")

from fedshift.deploy.federation import Link, follow, superlink
from fedshift.deploy.inside import listening, private_socket
from fedshift.deploy.joining import join
from fedshift.deploy.place import make_place
from fedshift.deploy.processes import free_port, running, still_running
from fedshift.deploy.watching import SERVERAPP, SUPEREXEC, SUPERLINK, Watch
from fedshift.errors import InputError, TrainingError
from fedshift.record.in_use import IN_USE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes as on Linux")
# A process with a child, in the places and with the names of a SuperLink's.
CHILD = "setsid bash -c 'exec -a flower-superexec sleep 60' & setsid bash -c 'exec -a {} sleep 60'"
SCRIPT = CHILD.format("flwr-serverapp") + " & wait; sleep 60"


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr("fedshift.deploy.watching.PAUSE", 0.0)
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
def test_the_server_of_the_run_before_may_end(watch: Watch) -> None:
    watch.begin()
    kill(watch, "flwr-serverapp")
    assert watch() == {}


def test_each_process_is_missed_by_name(watch: Watch) -> None:
    kill(watch, "flwr-serverapp")
    assert watch() == {SERVERAPP: None}
    kill(watch, "flower-superexec")
    assert watch() == {SUPEREXEC: None}
    watch.process.kill()
    watch.process.wait()
    assert watch() == {SUPERLINK: -9}


def test_what_a_superlink_started_ends_with_it() -> None:
    """Within 5 s, even where the killed one still counts as there, because it is not waited for."""
    code = "import sys, time; from fedshift.deploy.inside import end_without; "
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


@pytest.mark.slow
def test_a_killed_superlink_leaves_nothing_behind(watch: Watch) -> None:
    """Its children are traced to nobody then; the fixture looks whether they are gone."""
    watch.process.kill()
    watch.process.wait()
    assert watch() == {SUPERLINK: -9}
    assert len(still_running(watch.seen)) >= 2


@pytest.mark.parametrize(
    ("status", "told"),
    [("running", "ServerApp was ended, perhaps"), ("finished:failed", "the run finished:failed")],
)
def test_a_run_without_its_server_ends(
    status: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower may know why it ended: then that is the reason."""
    here = "fedshift.deploy.federation."
    monkeypatch.setattr(f"{here}run_flower", lambda *a: {"runs": [{"status": status}]})
    monkeypatch.setattr(f"{here}inside", lambda name: ["true"])
    link = Link(tmp_path, os.environ, tmp_path / "log", lambda: {SERVERAPP: None})
    with pytest.raises(TrainingError, match=told):
        follow("1", tmp_path / "run", link, lambda event: None)


def test_the_way_on_is_named(tmp_path: Path) -> None:
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
        told = rf"f: another process \(number {pid}\) is at work in this folder"
        with pytest.raises(InputError, match=told):  # noqa: SIM117
            with superlink(folder, host="127.0.0.1", port=free_port()):
                pass
        # The one at work reads this file for its address.
        assert not (folder / "flower" / "config.toml").exists()
        with pytest.raises(InputError, match="cannot be reached"):
            join(place, f"127.0.0.1:{free_port()}", patience=0.0)
    with taken(place), pytest.raises(InputError, match="client-0: another process"):
        join(place, f"127.0.0.1:{free_port()}", patience=0.0)
    assert json.loads((place / "client.json").read_text())["partition"] == 0
