"""Files in a folder and below it, or in a tar archive that is read without unpacking."""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedshift.datasets.base import damaged
from fedshift.errors import DataError

# A file's first byte in the archive, and how many there are.
Place = tuple[int, int]


class Store(Protocol):
    """Files by name, with `/` between the parts of a name; `place` is the folder or archive."""

    @property
    def place(self) -> Path: ...

    def names(self) -> tuple[str, ...]: ...

    def read(self, name: str) -> bytes: ...


@dataclass(frozen=True)
class Folder:
    """The files of a folder and of all folders below it; links are followed."""

    place: Path

    def names(self) -> tuple[str, ...]:
        """All files, sorted.

        A link back to a parent folder is not followed: its files are listed already. Raises
        DataError for a broken link, and for a folder that cannot be opened: its files would be
        missing silently.
        """
        return tuple(sorted(_files(self.place)))

    def read(self, name: str) -> bytes:
        """The file's bytes. Raises DataError for a file that cannot be read."""
        try:
            return (self.place / name).read_bytes()
        except OSError as error:
            raise damaged(
                self.place / name, f"cannot be read ({error.strerror or error})"
            ) from error


@dataclass(frozen=True, eq=False)
class Archive:
    """The plain files of an uncompressed tar archive: name -> (offset, size) in bytes."""

    place: Path
    members: Mapping[str, Place]

    def names(self) -> tuple[str, ...]:
        """All files, sorted."""
        return tuple(sorted(self.members))

    def read(self, name: str) -> bytes:
        """The file's bytes. Raises DataError for a name that the archive lacks or a short file."""
        if name not in self.members:
            raise damaged(self.place / name, "no such file in the archive")
        offset, size = self.members[name]
        available = max(0, os.path.getsize(self.place) - offset)
        if available < size:  # checked first: a damaged header may claim far too much
            raise damaged(self.place / name, f"the archive ends after {available} of {size} bytes")
        with self.place.open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)


def archive(path: Path) -> Archive:
    """Index a tar archive without unpacking it; devices in it are left out.

    Links to files of the archive are followed. Compressed archives are refused: every image would
    mean reading all those before it.

    Raises DataError for those, for links to folders or out of the archive, and for files stored
    with holes: their content would be missing silently.
    """
    members: dict[str, Place] = {}
    links: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for m in tar:
                # A later entry replaces an earlier one of the same name.
                members.pop(m.name, None)
                links.pop(m.name, None)
                if m.isfile() and m.sparse is None:
                    members[m.name] = (m.offset_data, m.size)
                elif m.isfile():
                    raise damaged(path, f"{m.name} is stored with holes; pack it without --sparse")
                elif m.issym():
                    links[m.name] = posixpath.join(posixpath.dirname(m.name), m.linkname)
                elif m.islnk():
                    links[m.name] = m.linkname
    except DataError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        raise damaged(
            path, f"not a complete, uncompressed tar archive ({error}); unpack a compressed one"
        ) from error
    return Archive(path, members | _linked(path, members, links))


def open_store(path: Path) -> Store:
    """The files of a folder, or of a tar archive. Raises DataError when there is neither."""
    if os.path.isdir(path):
        return Folder(path)
    if not os.path.isfile(path):
        raise DataError(f"{path}: no such folder or archive. Name a folder or a .tar file.")
    return archive(path)


def _files(top: Path) -> Iterator[str]:
    """The names of all files below `top`, in any order."""
    # A folder to list, the prefix of its names, and the folders above it.
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(str(top), "", ())]
    while waiting:
        folder, prefix, above = waiting.pop()
        try:
            state = os.stat(folder)
            # Device and inode identify a folder under any name, and so find links in a circle.
            identity = (state.st_dev, state.st_ino)
            entries = [] if identity in above else list(os.scandir(folder))
        except OSError as error:
            raise damaged(Path(folder), f"cannot be opened ({error.strerror or error})") from error
        for entry in entries:
            name = prefix + entry.name
            if os.path.isdir(entry) if entry.is_symlink() else entry.is_dir():
                waiting.append((entry.path, f"{name}/", (*above, identity)))
                continue
            # Editors use hidden broken links as locks.
            if entry.is_symlink() and not os.path.exists(entry) and not _hidden(name):
                raise DataError(
                    f"{entry.path}: a link to {os.readlink(entry)}, which is not there. Bring back "
                    "what it links to, or remove the link."
                )
            yield name


def _linked(path: Path, members: Mapping[str, Place], links: Mapping[str, str]) -> dict[str, Place]:
    """The places of the files that an archive's links lead to."""
    # Links write "../a/b": both sides are compared in their shortest form.
    places = {posixpath.normpath(name): place for name, place in members.items()}
    targets: dict[str, Place] = {}
    for name, target in ((name, posixpath.normpath(to)) for name, to in links.items()):
        place = places.get(target)
        if place is not None:
            # A later link may lead to this one.
            targets[name] = places[posixpath.normpath(name)] = place
        elif not _hidden(name):
            raise damaged(
                path,
                f"{name} is a link to {target}, which is no file of the archive; pack what it "
                "links to, with tar --dereference",
            )
    return targets


def _hidden(name: str) -> bool:
    return posixpath.basename(name).startswith(".")
