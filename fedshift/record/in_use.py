"""A lock that keeps a run folder for one process at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedshift.errors import InputError
from fedshift.files import NOT_THROUGH_LINKS

IN_USE = "in-use"


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder for this process while the block runs; the system unlocks it if it dies.

    Raises InputError if another process has the lock, or if the lock file cannot be written.
    Without POSIX locks (Windows, some network disks) nothing is locked. The same process may enter
    twice, but leaving once unlocks the folder.
    """
    path = folder / IN_USE
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # The file is removed while it is still locked: later, it could be another process's.
        if descriptor is not None:
            _release(path, descriptor)


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(descriptor)


def _acquire(path: Path) -> int | None:
    # Windows has no such locks; a run there is not protected from a second one.
    if importlib.util.find_spec("fcntl") is None:
        return None
    # Begin again if the lock file was removed between opening and locking it.
    while True:
        descriptor = _open_file(path)
        try:
            locked = _lock(descriptor, path)
        except InputError:
            os.close(descriptor)
            raise
        if not locked:
            _release(path, descriptor)
            return None
        if _still_there(descriptor, path):
            _sign(descriptor, path)
            return descriptor
        os.close(descriptor)


def _open_file(path: Path) -> int:
    """Open the lock file, creating it if missing.

    Raises InputError if it is no regular file, or has several hard links.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOT_THROUGH_LINKS, 0o666)
    except OSError as e:
        raise _unwritable(path, "a link" if path.is_symlink() else e.strerror) from None
    # The status of the open file, since another file may be at the path by now.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _unwritable(path, "not a file of its own")
    return descriptor


def _lock(descriptor: int, path: Path) -> bool:
    """Take the lock; False if the system has no such locks. Raises InputError if it is taken."""
    import fcntl

    try:
        # `lockf` belongs to the process, `flock` to the open file: forked workers, which may
        # outlive a killed run for a moment, would keep a `flock`.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        # The process that has the lock wrote its number into the file (`_sign`).
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
    """False if the process that had the lock before removed the file before we locked it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _sign(descriptor: int, path: Path) -> None:
    """Write this process's number, for the message to others."""
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
    except OSError as e:
        _release(path, descriptor)
        raise _unwritable(path, e.strerror) from None


def _unwritable(path: Path, why: str | None) -> InputError:
    return InputError(f"{path}: cannot be written: {why}")
