"""Flower's own commands as processes: started in groups of their own, and ended with them."""

from __future__ import annotations

import contextlib
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
            raise InputError(f"{host}:{port} cannot be opened: {e.strerror}; give --port") from None


@contextlib.contextmanager
def running(
    arguments: Sequence[str], env: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and its children, in a group that ends with the block; it writes to `log`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            arguments, env=dict(env), stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a process and all of its group: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        if number == signal.SIGTERM and not _alive(process.pid):
            return


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
    """The JSON that one of Flower's commands prints. Raises FedshiftError where it fails."""
    done = subprocess.run(arguments, env=dict(env), capture_output=True, text=True, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        raise FedshiftError(f"`{' '.join(arguments[1:3])}` failed: {said[-500:]}") from None
    if done.returncode or found.get("success") is False:
        raise FedshiftError(f"`{' '.join(arguments[1:3])}` failed: {said[-500:]}")
    return found


def _tail(log: Path) -> str:
    try:
        return " ".join(log.read_text(errors="replace").split())[-500:]
    except OSError:
        return "it said nothing"
