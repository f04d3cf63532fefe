"""Processes of `fedshift` that can be ended at any step of what they write, and watched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedshift.cli.running  # noqa: F401 - so that forked processes need not load it
from fedshift.cli.app import main as command

SCRIPT = Path(sys.executable).with_name("fedshift")
PATIENCE = 300.0


class Steps:
    """Counts the steps of writing checkpoints in this process, and ends it at one of them."""

    NAMES = ("state.safetensors", "round.json")

    def __init__(self, last: int | None, kept: float) -> None:
        self.last, self.kept, self.done = last, kept, 0
        self.fsync = os.fsync

    def arm(self) -> None:
        """Listen to what the interpreter does with files, and stand before fsync."""
        sys.addaudithook(self.hear)
        os.fsync = self.flush

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        """Renames, and the removal of old checkpoints file by file."""
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") and given:
            path = os.fspath(given[0]) if not isinstance(given[0], int) else ""
            if "round-" in str(path) or str(path) in self.NAMES:
                self.step()

    def flush(self, handle: int) -> None:
        """fsync; killed here, a part of the file is there."""
        path = os.readlink(f"/proc/self/fd/{handle}")
        if "checkpoints" in path:
            self.step(handle if path.endswith(self.NAMES) else None)
        self.fsync(handle)

    def step(self, handle: int | None = None) -> None:
        """One more; the last one ends the process."""
        self.done += 1
        if self.done == self.last:
            if handle is not None:
                os.ftruncate(handle, int(self.kept * os.fstat(handle).st_size))
            os.kill(os.getpid(), signal.SIGKILL)


def spawn(
    place: Path,
    arguments: Sequence[str],
    step: int | None = None,
    kept: float = 0.0,
    *,
    cold: bool = False,
) -> int:
    """The process of `fedshift ARGUMENTS`, forked from this one, in folder `place`.

    cold: the installed command takes its place, and loads everything itself.
    """
    if pid := os.fork():
        return pid
    try:
        os.chdir(place)
        log = os.open("said.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        if cold:
            os.execv(SCRIPT, [str(SCRIPT), *arguments])
        steps = Steps(step, kept)
        steps.arm()
        code = _called(arguments)
        Path("steps").write_text(str(steps.done))
        os._exit(code)
    finally:
        os._exit(70)


def _called(arguments: Sequence[str]) -> int:
    sys.argv = ["fedshift", *arguments]
    try:
        command()
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def events(place: Path) -> list[dict[str, Any]]:
    """The run's events so far, without a line that is still being written."""
    try:
        lines = (place / "o" / "events.jsonl").read_text().split("\n")
    except OSError:
        return []
    return [json.loads(line) for line in lines[:-1]]


def ended(pid: int) -> int | None:
    """The exit code, minus the signal for killed processes; None while it lives."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def waited(pid: int) -> int:
    """The exit code of a process that must end in a while."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if (code := ended(pid)) is not None:
            return code
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("a run did not end")


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def gone(pids: Sequence[int]) -> bool:
    """Whether they all end in a while."""
    until = time.monotonic() + PATIENCE / 10
    while time.monotonic() < until:
        alive = [p for p in pids if Path(f"/proc/{p}").exists() and not _zombie(p)]
        if not alive:
            return True
        time.sleep(0.02)
    return False


def _zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def first_event(place: Path, pid: int, before: int, began: float) -> tuple[float, float, int]:
    """(seconds to the first new event, processor's seconds till then, exit code)."""
    code, processor, tick = None, 0.0, os.sysconf("SC_CLK_TCK")
    while len(logged := events(place)) <= before and code is None:
        with contextlib.suppress(OSError, IndexError):
            spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            processor = sum(map(int, spent)) / tick
        time.sleep(0.005)
        code = ended(pid)
    first = logged[before]["time"] - began if len(logged) > before else 0.0
    return first, processor, waited(pid) if code is None else code
