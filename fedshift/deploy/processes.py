"""Flower's own commands as processes: started in groups of their own, and ended with them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.errors import FedshiftError, InputError

STARTED = 60.0
DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG of prctl(2)


def command(name: str) -> str:
    """The path of one of Flower's commands, beside this Python."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise InputError(f"{name} is not installed: pip install 'fedshift[flower]'")
    return str(path)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise InputError where the port is in use, or not ours to open."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            cure = "--port" if e.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise InputError(f"{host}:{port} cannot be opened: {e.strerror}; give {cure}") from None


@contextlib.contextmanager
def running(
    arguments: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and its children, in a group that ends with the block; it writes to `log`.

    On Linux the process is asked to end, too, where this one is killed. Raises InputError where the
    log cannot be written.
    """
    linux = sys.platform == "linux"
    try:
        out = log.open("ab")
    except OSError as e:
        raise InputError(f"{log}: cannot be written: {e.strerror}") from None
    with out:
        process = subprocess.Popen(
            arguments, env=dict(env), stdout=out, stderr=out, start_new_session=True,
            preexec_fn=_die_with_parent if linux else None,
        )  # fmt: skip
    try:
        yield process
    finally:
        end(process)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)


def end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process, all of its group, and all that descends from it: asked first, then killed.

    Flower starts some of its processes in sessions of their own, which a group does not reach.
    """
    below = _descendants(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        if number == signal.SIGTERM and not _alive(process.pid):
            break
    for number in (signal.SIGTERM, signal.SIGKILL):
        stop = time.monotonic() + patience
        _signal(below, number)
        while _left(below) and time.monotonic() < stop:
            time.sleep(0.1)


def _descendants(process: int) -> dict[int, str]:
    """The commands of all processes that descend from this one, by process id."""
    listed, found = _listed(), {process}
    while new := {pid for pid, (parent, _) in listed.items() if parent in found} - found:
        found |= new
    return {pid: listed[pid][1] for pid in found - {process}}


def _left(commands: Mapping[int, str]) -> list[int]:
    """Which of these still run, and not something else under their number."""
    if not commands:
        return []
    listed = _listed()
    return [pid for pid, told in commands.items() if pid in listed and listed[pid][1] == told]


def _signal(commands: Mapping[int, str], number: int) -> None:
    for pid in _left(commands):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _listed() -> dict[int, tuple[int, str]]:
    """(parent, command) of every process that is not a zombie; none where there is no `ps`."""
    try:
        told = subprocess.run(
            ["ps", "-wweo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    rows = [line.split(None, 3) for line in told.splitlines()[1:]]
    return {int(r[0]): (int(r[1]), r[3]) for r in rows if len(r) == 4 and r[2][0] != "Z"}


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_for(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the process listens. Raises FedshiftError, with its last words, if it ends."""
    stop = time.monotonic() + STARTED
    while time.monotonic() < stop:
        if process.poll() is not None:
            raise FedshiftError(f"{process.args!r} ended with {process.returncode}: {_tail(log)}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        time.sleep(0.1)
    raise FedshiftError(f"nobody listens on {host}:{port} after {STARTED:g} s: {_tail(log)}")


def asked(arguments: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """The JSON that one of Flower's commands prints.

    Raises InputError with its reason where it says that it failed, else FedshiftError.
    """
    done = subprocess.run(arguments, env=dict(env), capture_output=True, text=True, check=False)
    said, what = " ".join((done.stdout + done.stderr).split())[-500:], " ".join(arguments[1:3])
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise FedshiftError(f"`flwr {what}` failed: {said}") from None
    if done.returncode or found.get("success") is False:
        why = " ".join(str(found.get("error-message", said)).split())
        raise InputError(f"`flwr {what}` failed: {why}")
    return found


def _tail(log: Path) -> str:
    try:
        return " ".join(log.read_text(errors="replace").split())[-500:]
    except OSError:
        return "it said nothing"
