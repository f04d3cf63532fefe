"""A run folder belongs to one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedshift.errors import InputError
from fedshift.experiments.folder.run_folder import check_unused, reserved
from fedshift.experiments.resume import configured, reopened
from fedshift.experiments.task.preparing import prepare
from fedshift.record.in_use import IN_USE, alone_in
from fedshift.sweeps.store import Store, run_of
from fedshift.sweeps.worker import perform
from support.small_runs import config_of, record_until, results

HOLD = """
import os, sys, time
from pathlib import Path
from fedshift.record.in_use import alone_in
with alone_in(Path(sys.argv[1])):
    child = os.fork() if len(sys.argv) > 2 else 1
    if child == 0:
        time.sleep(60)
    print("held", child, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Another process that has locked the folder, and the id of the child that it forked."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        child = int(job.stdout.readline().split()[1])
        try:
            yield job, child
        finally:
            job.kill()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with holder(tmp_path) as (job, _):
        with (
            pytest.raises(InputError, match=rf"another process \(number {job.pid}\) is at work in"),
            alone_in(tmp_path),
        ):
            pass
        job.communicate(timeout=20)
    assert not (tmp_path / IN_USE).exists()
    with alone_in(tmp_path):
        assert (tmp_path / IN_USE).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / IN_USE).exists()


def test_a_killed_process_holds_nothing_nor_do_its_workers(tmp_path: Path) -> None:
    with holder(tmp_path, "forks") as (job, child):
        job.kill()
        job.wait(20)
        os.kill(child, 0)  # the worker lives
        try:
            assert (tmp_path / IN_USE).exists()
            with alone_in(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_that_its_holder_removes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was opened before and locked after its removal: another process would lock a new one."""
    plain, opened = os.open, []

    def slow(path: object, *more: int) -> int:
        number = plain(path, *more)  # type: ignore[call-overload]
        if not opened:
            (tmp_path / IN_USE).unlink()
        opened.append(number)
        return int(number)

    monkeypatch.setattr(os, "open", slow)
    with alone_in(tmp_path):
        assert len(opened) == 2
        assert os.path.samestat(os.fstat(opened[1]), (tmp_path / IN_USE).stat())


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_what_is_no_file_of_its_own_is_refused(kind: str, tmp_path: Path) -> None:
    theirs, path = tmp_path / "theirs", tmp_path / "run" / IN_USE
    theirs.write_text("precious")
    path.parent.mkdir()
    make: dict[str, Callable[[], None]] = {
        "link": lambda: path.symlink_to(theirs),
        "hard link": lambda: path.hardlink_to(theirs),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[kind]()
    with (
        pytest.raises(InputError, match="in-use: cannot be written: (a link|not a file|Is a dir)"),
        alone_in(path.parent),
    ):
        pass
    assert theirs.read_text() == "precious"
    assert os.path.lexists(path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with (
            pytest.raises(InputError, match="in-use: cannot be written: No space left"),
            reserved(tmp_path / "new", "x"),
        ):
            pass
    assert not (tmp_path / "new").exists()
    with holder(tmp_path):  # it is let go, too
        pass


def test_a_disk_without_locks_holds_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with reserved(tmp_path / "new", "x") as folder:
        assert list(folder.iterdir()) == []
    assert not (tmp_path / "new").exists()  # nothing was written into it


def test_a_new_folder_is_held_too(tmp_path: Path) -> None:
    with reserved(tmp_path / "new", "x") as folder:
        assert reported_owner(folder) == f"another process (number {os.getpid()})"
        (folder / "something").touch()
    assert reported_owner(folder) == ""


def reported_owner(folder: Path) -> str:
    """The owner of the folder's lock, as another process reports it."""
    script = "import sys; from pathlib import Path; from fedshift.record import in_use\n"
    script += "with in_use.alone_in(Path(sys.argv[1])): pass"
    done = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, check=False
    )
    return "".join(re.findall(r"another process \(number \d+\)", done.stderr)[:1])


def test_what_a_killed_process_left_before_it_began_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / IN_USE).write_text("4711\n")
    with reserved(tmp_path / "new", "x") as folder:
        (folder / "something").touch()
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        check_unused(folder)


@pytest.mark.slow
def test_a_run_that_was_completed_meanwhile_is_not_trained_again(tmp_path: Path) -> None:
    config = config_of("fedavg")
    record_until(tmp_path / "run", config, 2)
    configured(tmp_path / "run")
    record_until(tmp_path / "run", config, None)
    with (
        pytest.raises(InputError, match="this run is complete; `fedshift report"),
        reopened(tmp_path / "run", config, prepare(config)),
    ):
        pass


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_is_left_alone(tmp_path: Path) -> None:
    config = config_of("fedavg")
    prepared = prepare(config)
    record_until(tmp_path / "whole", config, None)
    record_until(tmp_path / "run", config, 2)
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with (
        holder(tmp_path / "run"),
        pytest.raises(InputError, match="another process"),
        reopened(tmp_path / "run", config, prepared),
    ):
        pass
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before
    (tmp_path / "run" / IN_USE).unlink()
    record_until(tmp_path / "run", config, None)
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_table_neither_clears_nor_trains_what_another_process_trains(tmp_path: Path) -> None:
    store, run = Store(tmp_path), run_of(config_of("fedavg"))
    record_until(store.path(run), run.config, 2)
    before = {p.name: p.read_bytes() for p in store.path(run).iterdir() if p.is_file()}
    with holder(store.path(run)), pytest.raises(InputError, match="another process"):
        perform(run, store, lambda event: None)
    assert (
        before.items()
        <= {p.name: p.read_bytes() for p in store.path(run).iterdir() if p.is_file()}.items()
    )
    holders = set[str]()
    perform(run, store, lambda event: holders.add(reported_owner(store.path(run))))
    assert holders == {f"another process (number {os.getpid()})"}
    done = results(store.path(run))
    perform(run, store, lambda event: pytest.fail("trained again"))
    assert results(store.path(run)) == done


@pytest.mark.slow
def test_the_command_line_says_so(tmp_path: Path) -> None:
    """`fedshift run --resume` of a run under way in another shell, and once it is over."""
    command = [Path(sys.executable).with_name("fedshift"), "run", "--resume", "run"]
    record_until(tmp_path / "run", config_of("fedavg"), 1)
    with holder(tmp_path / "run"):
        second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "is at work in this folder; wait until it is over, or end it" in second.stderr
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    record_until(tmp_path / "alone", config_of("fedavg"), None)
    (tmp_path / "run" / "report.html").unlink()
    assert results(tmp_path / "run") == results(tmp_path / "alone")
