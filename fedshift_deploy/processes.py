"""Run Flower's commands in process groups of their own, and end them with all descendants."""

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
from types import MappingProxyType
from typing import Any

from fedshift.errors import FedshiftError, InputError
from fedshift.files import private
from fedshift_deploy.inside import inside

STARTED = 60.0
DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG of prctl(2)


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which no process listens at present."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Raise InputError if the port is in use, or may not be opened."""
    with socket.socket() as s:
        # As servers do: a port whose connections have just ended counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            cure = "--port" if e.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise InputError(f"{host}:{port} cannot be opened: {e.strerror}; give {cure}") from None


@contextlib.contextmanager
def running(
    arguments: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    others: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, with its output in `log`; it and its children end with the block.

    Only this user can read files that they make. others: as in `end`, read at the end of the block.
    On Linux the process also gets SIGTERM if this one is killed. Raises InputError if the log
    cannot be written.
    """
    linux = sys.platform == "linux"
    try:
        with private():
            out = log.open("ab")
    except OSError as e:
        raise InputError(f"{log}: cannot be written: {e.strerror}") from None
    with out:
        process = subprocess.Popen(
            # In a session of its own, so that Ctrl-C reaches only this process, which then ends the
            # others in order.
            arguments, env=dict(env), stdout=out, stderr=out, start_new_session=True, umask=0o077,
            preexec_fn=_die_with_parent if linux else None,
        )  # fmt: skip
    try:
        yield process
    finally:
        end(process, others)


def _die_with_parent() -> None:
    # Otherwise Flower's processes would go on, and keep their ports, if fedshift is killed.
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)


def end(
    process: subprocess.Popen[bytes],
    others: Mapping[int, str] = MappingProxyType({}),
    patience: float = 10.0,
) -> None:
    """End a process, its group and all descendants: SIGTERM, then SIGKILL after `patience` seconds.

    Descendants are signalled one by one, because Flower starts some of them in sessions of their
    own, which a signal to the group does not reach. others: commands by process id that are to end
    as well, such as descendants whose parent is gone.
    """
    # If the process itself has ended, the rest cannot end in order: do not make the operator wait.
    patience = min(patience, 1.0) if process.poll() is not None else patience
    # List descendants before any signal: when a parent is gone, its children cannot be traced.
    below = {**others, **descendants(process.pid)}
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
        while still_running(below) and time.monotonic() < stop:
            time.sleep(0.1)


def descendants(process: int) -> dict[int, str]:
    """The commands of all processes that descend from this one, by process id."""
    processes, pids = _processes(), {process}
    # Add children of children until no new ones appear.
    while new := {pid for pid, (parent, _) in processes.items() if parent in pids} - pids:
        pids |= new
    return {pid: processes[pid][1] for pid in pids - {process}}


def still_running(commands: Mapping[int, str]) -> list[int]:
    """The ids that still run the same command, since an id may have been reused."""
    running_now = _processes() if commands else {}
    return [pid for pid, line in commands.items() if running_now.get(pid, (0, ""))[1] == line]


def _signal(commands: Mapping[int, str], number: int) -> None:
    for pid in still_running(commands):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _processes() -> dict[int, tuple[int, str]]:
    """(parent, command) of every process that is not a zombie; empty without `ps`."""
    try:
        # -ww gives the whole command line, by which a process is recognised later.
        output = subprocess.run(
            ["ps", "-wweo", "pid,ppid,stat,args"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    rows = [line.split(None, 3) for line in output.splitlines()[1:]]
    return {int(r[0]): (int(r[1]), r[3]) for r in rows if len(r) == 4 and r[2][0] != "Z"}


def _alive(group: int) -> bool:
    """Whether the process group still has a process."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_for(host: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the process listens. Raises FedshiftError, with its last output, if it ends."""
    stop = time.monotonic() + STARTED
    while time.monotonic() < stop:
        if process.poll() is not None:
            raise FedshiftError(f"{process.args!r} ended with {process.returncode}: {_tail(log)}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        time.sleep(0.1)
    raise FedshiftError(f"nothing listens on {host}:{port} after {STARTED:g} s: {_tail(log)}")


def run_flower(
    arguments: Sequence[str], env: Mapping[str, str], flwr: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run Flower's `flwr` with these arguments and return the JSON that it prints.

    Raises InputError with the reason if the command reports a failure, FedshiftError if it prints
    no JSON.
    """
    line = [*(inside("flwr") if flwr is None else flwr), *arguments]
    done = subprocess.run(line, env=dict(env), capture_output=True, text=True, check=False)
    output = " ".join((done.stdout + done.stderr).split())[-500:]
    subcommand = " ".join(arguments[:2])
    try:
        # Flower may print warnings before the JSON.
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise FedshiftError(f"`flwr {subcommand}` failed: {output}") from None
    if done.returncode or answer.get("success") is False:
        why = " ".join(str(answer.get("error-message", output)).split())
        raise InputError(f"`flwr {subcommand}` failed: {why}")
    return answer


def _tail(log: Path) -> str:
    try:
        return " ".join(log.read_text(errors="replace").split())[-500:]
    except OSError:
        return "it said nothing"
