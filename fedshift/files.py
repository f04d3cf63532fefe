"""Atomic writing of files, checks of paths, and values that JSON can hold."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fedshift.errors import DataError, InputError, shown

# For opening files of ours: fail on a link, by which another user could redirect the writing.
# Windows has no such flag.
NOT_THROUGH_LINKS = getattr(os, "O_NOFOLLOW", 0)


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Within the block, new files and folders are closed to other users, whatever the umask.

    It can be used as a decorator. Existing files keep their mode; processes that are started in
    the block inherit the setting.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def check_unshared(folder: Path, *inside: Path) -> None:
    """Raise InputError for a folder in which other users could change files, such as code or keys.

    They can if the folder, or one above it, belongs to another user or can be written by a group
    or by everybody. A group whose only user is the owner is accepted: many systems give each
    account such a group.
    inside: files and folders in it to check as well. They must not be links, but may be missing.
    """
    if os.name != "posix":
        return
    _check_mode(folder)
    # Both with links resolved and as named: a user who may write where a link lies can redirect it.
    real, named = folder.resolve(), folder.absolute()
    for place in dict.fromkeys((real, *real.parents, *named.parents)):
        # In a sticky folder such as /tmp, users can rename and remove only files of their own.
        if not _mode(place) & stat.S_ISVTX and (shared := _shared(place)):
            who, bit = shared
            raise InputError(
                f"{folder}: {who} may put another folder in its place, by writing to {place}; run "
                f"`chmod {bit}-w {place}` first, or take another place"
            )
    _check_owner(folder)
    for place in dict.fromkeys((*real.parents, named, *named.parents)):
        # lstat: of a link itself, since its owner can replace it even in a sticky folder.
        if (owner := place.lstat().st_uid) not in _trusted():
            raise InputError(
                f"{folder}: another user ({owner}) may put another folder in its place, as the "
                f"owner of {place}; take another place"
            )
    for path in inside:
        if path.is_symlink():
            raise InputError(
                f"{path}: a link, whose end other users may change; put what it leads to in its "
                "place"
            )
        if path.exists():
            _check_mode(path)
            _check_owner(path)


def _check_mode(path: Path) -> None:
    if shared := _shared(path):
        who, bit = shared
        raise InputError(f"{path}: {who} may write there; run `chmod {bit}-w {path}` first")


def _check_owner(path: Path) -> None:
    if (owner := _owner(path)) not in _trusted():
        raise InputError(
            f"{path}: belongs to another user ({owner}), who may change what is run there; work "
            "as that user, or in a folder of your own"
        )


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _trusted() -> tuple[int, int]:
    return os.geteuid(), 0


def _shared(path: Path) -> tuple[str, str] | None:
    """Users besides the owner who may write there, and chmod's letter for them; None if no one."""
    mode = _mode(path)
    if mode & stat.S_IWOTH:
        return "every user", "o"
    if mode & stat.S_IWGRP and not _is_private(path):
        return f"users of the group {_group(path.stat().st_gid)}", "g"
    return None


def _is_private(path: Path) -> bool:
    """Whether the file's owner is the only user of the file's group."""
    import grp  # not on Windows
    import pwd

    entry = path.stat()
    # With an access control list, the group bits are an upper bound for all users on the list.
    if _has_list(path):
        return False
    try:
        owner, group = pwd.getpwuid(entry.st_uid), grp.getgrgid(entry.st_gid)
    except KeyError:  # an account that this machine does not list: who is in its group is unknown
        return False
    others = [user for user in pwd.getpwall() if user.pw_uid != owner.pw_uid]
    alone = all(user.pw_gid != entry.st_gid for user in others)
    return owner.pw_gid == entry.st_gid and alone and not group.gr_mem


def _has_list(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except (AttributeError, OSError):  # a system without such lists, or a file without one
        return False


def _group(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def write(path: Path, content: bytes | str) -> None:
    """Write a file in one step: a temporary file beside it, flushed, then renamed over it.

    Makes the folder if it is missing. If the path is a link, the link is replaced, not followed.
    Raises InputError, which names the path, if the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    # In the same folder, because a rename is atomic only within one file system.
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with _new(partial) as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())  # before the rename: otherwise a power cut could leave it empty
        partial.replace(path)
    except BaseException as e:  # also an interruption: it must not leave a partial file
        # On a read-only file system removing fails as well; the first error is the one to report.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise InputError(f"{path}: cannot be written: {e.strerror}") from None
        raise


def _new(path: Path) -> IO[bytes]:
    # O_EXCL: fail if somebody has put a file or link in this place since it was checked.
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")


def append(path: Path, line: str) -> None:
    """Add a line to a file; make the file if it is missing.

    Raises InputError, which names the path, if that fails or the path is a link.
    """
    kind = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NOT_THROUGH_LINKS
    try:
        with os.fdopen(os.open(path, kind, 0o666), "ab") as f:
            f.write(line.encode() + b"\n")
    except OSError as e:
        why = "a link to another place" if path.is_symlink() else e.strerror
        raise InputError(f"{path}: cannot be written: {why}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises DataError, which names the file, if it holds none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:  # RecursionError: brackets nested very deeply
        raise DataError(f"{path}: damaged ({shown(str(e), 200)})") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: damaged (not a JSON object)")
    return content


def is_file(path: Path) -> bool:
    """Whether it is an existing file. Raises DataError if the system cannot tell."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Whether it is an existing folder. Raises DataError if the system cannot tell."""
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    # In a folder that may not be entered, a file may or may not exist. os.path would say that it
    # does not; this raises.
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None


def make_folder(path: Path) -> None:
    """Make a folder for results. Raises InputError if it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits do not tell everything (quotas, read-only mounts), so a file is written.
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise InputError(f"{path}: is not a folder; give another place") from None
    except OSError as e:
        raise InputError(
            f"{path}: cannot be written to: {e.strerror}; give another place"
        ) from None


def check_page(path: Path) -> None:
    """Raise InputError if the path of an HTML page to write is that of another kind of file."""
    if path.suffix.lower() != ".html":
        raise InputError(f"{path}: the report is an HTML page; give it a name that ends in .html")
    try:
        with path.open("rb") as f:
            start = f.read(200)
    except FileNotFoundError:
        return
    except OSError as e:
        raise InputError(f"{path}: cannot be replaced: {e.strerror}") from None
    # With a mistyped path, a report could replace one of the user's own files.
    if not start.lstrip().lower().startswith(b"<!doctype html"):
        raise InputError(f"{path}: exists and is not an HTML page; give another name")


def clean(value: Any) -> Any:
    """A value that JSON can hold: NaN becomes null, infinity the text "inf"."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    # Arrays, tensors and numpy's numbers, recognised without importing numpy or torch.
    return clean(value.tolist()) if hasattr(value, "tolist") else value
