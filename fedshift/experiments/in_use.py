"""One process at a time in a run folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from fedshift.errors import InputError
from fedshift.files import NOT_THROUGH_LINKS

IN_USE = "in-use"


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder for this process while the block runs; the system lets go when it dies.

    Raises InputError where another process holds it. Without POSIX locks (Windows, some network
    file systems) nothing is held.
    """
    path = folder / IN_USE
    held = _held(path)
    try:
        yield
    finally:
        # Removed before it is let go: a process that waits for neither must not find it stale.
        if held is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(held)


def _held(path: Path) -> int | None:
    if importlib.util.find_spec("fcntl") is None:
        return None
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOT_THROUGH_LINKS, 0o666)
        except OSError as e:
            why = "a link to another place" if path.is_symlink() else e.strerror
            raise InputError(f"{path}: cannot be written: {why}") from None
        try:
            locked = _lock(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        if not locked:
            os.close(descriptor)
            return None
        if _still_there(descriptor, path):
            os.truncate(descriptor, 0)
            os.write(descriptor, b"%d\n" % os.getpid())
            return descriptor
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Whether the system keeps such locks here. Raises InputError where another has it."""
    import fcntl

    try:
        # Of the process, not of the open file as `flock` is: workers that were forked and outlive
        # a killed run for a moment do not hold it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        other = os.read(descriptor, 20).decode("ascii", "replace").strip()
        named = f" (number {other})" if other.isdecimal() else ""
        raise InputError(
            f"{path.parent}: another process{named} is at work in this folder; wait until it is "
            "over, or end it"
        ) from None
    except OSError:
        return False
    return True


def _still_there(descriptor: int, path: Path) -> bool:
    """Whether the file that was locked is not one that its last holder has just removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
