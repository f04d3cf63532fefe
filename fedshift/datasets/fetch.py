"""Downloading the known data sets from their official places, with checksums."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from fedshift.datasets.base import cache_folder
from fedshift.datasets.catalogue import entry
from fedshift.datasets.entry import Entry, Remote
from fedshift.errors import DataError, InputError, NetworkError

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

_CHUNK = 1 << 18
# The largest official member, CIFAR-100's training file, has 154 MB of pixels and a few MB of
# names. A member above this limit means a forged archive.
_LARGEST_MEMBER = 1 << 28
_SECONDS = 30.0


class Readable(Protocol):
    """A stream from which a download is read."""

    def read(self, size: int, /) -> bytes: ...


Opener = Callable[[str], AbstractContextManager[Readable]]


def open_url(url: str) -> AbstractContextManager[Readable]:
    """The response of `url`; gives up after 30 s of silence."""
    response: AbstractContextManager[Readable] = urllib.request.urlopen(url, timeout=_SECONDS)
    return response


def fetch(
    name: str,
    folder: Path | str | None = None,
    progress: Progress | None = None,
    opener: Opener = open_url,
) -> Path:
    """Download a known data set, and return its folder, in which `load` finds it.

    `folder` (default: the user's cache folder) gets one sub-folder per set. Files that are present
    with the right checksum are not downloaded again; a file gets its name only once it is complete
    and right, so an interrupted download leaves nothing behind. `progress(done, total)` is called
    in bytes.

    Raises InputError for an unknown name, a set that needs no download or must be fetched by hand,
    and a folder that cannot be written; NetworkError without a connection, for an error of the
    server and a truncated or wrong download, with where to put the files by hand; DataError for an
    archive whose md5 is right but which is not the official one.
    """
    dataset = entry(name)
    if dataset.by_hand:
        raise InputError(
            f'"{name}" has no official file to fetch directly. To get it: {dataset.how}.'
        )
    if not dataset.remotes:
        raise InputError(f'"{name}" needs no download ({dataset.how}); load it by its name.')
    parent = cache_folder() if folder is None else Path(os.path.expanduser(folder))
    target = parent / dataset.folders[0]
    total, done = sum(remote.size for remote in dataset.remotes), 0
    with _remove_empty_folders_on_failure(target):
        for remote in dataset.remotes:
            if not _present(target, remote):
                _fetch_one(dataset, remote, target, _report_total(progress, done, total), opener)
            done += remote.size
            if progress is not None:
                progress(done, total)
    return target


@contextmanager
def _remove_empty_folders_on_failure(target: Path) -> Iterator[None]:
    """Remove newly made folders that are still empty after a failure."""
    # Inner folders first: an outer one is empty only when they are gone.
    new = [path for path in (target, *target.parents) if not os.path.exists(path)]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise


def _report_total(progress: Progress | None, before: int, total: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if progress is not None:
            progress(before + done, total)

    return report


def _present(target: Path, remote: Remote) -> bool:
    return all(_md5(target / name) == md5 for name, md5 in remote.files)


def _md5(path: Path) -> str | None:
    if not os.path.isfile(path):
        return None
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, _new_md5).hexdigest()


def _new_md5() -> hashlib._Hash:
    # The sum is no protection against attackers, see `catalogue`. Without the flag, machines in
    # FIPS mode refuse md5.
    return hashlib.md5(usedforsecurity=False)


def _fetch_one(
    dataset: Entry, remote: Remote, target: Path, report: Callable[[int], None], opener: Opener
) -> None:
    def failed(reason: str) -> NetworkError:
        return _failed(dataset, remote, target, reason)

    try:
        target.mkdir(parents=True, exist_ok=True)
        with _partial(target / remote.name) as part:
            chunks = _counted(_chunks(remote.url, opener, failed), remote.size, report, failed)
            digest = _write(part, chunks)
            # Renamed only when complete and right, so that no bad file ever has the final name.
            if digest != remote.md5:
                raise failed(f"its md5 is {digest}, expected {remote.md5}")
            if remote.members:
                _unpack(part, remote, target)
            else:
                os.replace(part, target / remote.name)
    # A NetworkError is an OSError too, but already has its message.
    except NetworkError:
        raise
    except OSError as error:
        raise InputError(
            f"{target}: cannot be written ({error.strerror or error}). {_advice(error)}"
        ) from error


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there or name another folder to download to."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "It is closed to you; name a folder that you may write to."
    return "No folder can be made there; name another to download to."


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; removed at the end unless it was renamed."""
    # The process's number keeps two downloads at once from writing into the same file.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _chunks(url: str, opener: Opener, failed: Callable[[str], NetworkError]) -> Iterator[bytes]:
    try:
        with opener(url) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    # Both are needed: a truncated answer is an HTTPException, a lost connection an OSError.
    except (OSError, http.client.HTTPException) as error:
        raise failed(_reason(error)) from error


def _counted(
    chunks: Iterable[bytes],
    size: int,
    report: Callable[[int], None],
    failed: Callable[[str], NetworkError],
) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        done += len(chunk)
        # Stop here, because an endless answer would fill the disk.
        if done > size:
            raise failed(f"more than the expected {size:,} bytes arrived")
        yield chunk
        report(done)
    if done < size:
        raise failed(f"only {done:,} of {size:,} bytes arrived")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", "") or error or type(error).__name__)


def _failed(dataset: Entry, remote: Remote, target: Path, reason: str) -> NetworkError:
    names = ", ".join(r.name for r in dataset.remotes)
    members = ", ".join(name for name, _ in remote.members)
    place = (
        f", unpack it and put {members} in {target}" if members else f" and put them in {target}"
    )
    debian = f" On Debian: apt-get install {dataset.package}." if dataset.package else ""
    return NetworkError(
        f"{remote.url} could not be downloaded: {reason}. Nothing was kept of it. Try again later, "
        f"or without a network: take {names} from {remote.url.rpartition('/')[0]}/ on another "
        f"machine{place}.{debian}"
    )


def _write(path: Path, chunks: Iterable[bytes]) -> str:
    digest = _new_md5()
    with path.open("wb") as stream:
        for chunk in chunks:
            digest.update(chunk)
            stream.write(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, remote: Remote, target: Path) -> None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name, md5 in remote.members:
                _unpack_member(tar, name, md5, target)
    except (tarfile.TarError, KeyError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        names = ", ".join(name for name, _ in remote.members)
        raise DataError(
            f"{remote.name}: not the official archive although its md5 is right ({error}). "
            f"Put {names} in {target} by hand."
        ) from error


def _unpack_member(tar: tarfile.TarFile, name: str, md5: str, target: Path) -> None:
    # Wanted files are copied out by name: paths, links and modes in the archive have no effect.
    member = tar.getmember(f"{target.name}/{name}")
    stream = tar.extractfile(member)
    if stream is None or member.size > _LARGEST_MEMBER:
        raise tarfile.ReadError(f"{member.name} is not a file of at most {_LARGEST_MEMBER:,} bytes")
    with _partial(target / name) as part:
        digest = _write(part, iter(lambda: stream.read(_CHUNK), b""))
        if digest != md5:
            raise tarfile.ReadError(f"{member.name} has the md5 {digest}, expected {md5}")
        os.replace(part, target / name)
