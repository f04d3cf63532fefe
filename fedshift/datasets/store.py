"""Where files lie: in a folder with all folders below it, or in a tar archive, read in place."""

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
    """Files by name, `/` between the parts of a name; `place` is where they lie."""

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

        A folder that links back to one it lies in is not entered again: all it holds is listed.
        Raises DataError for a link to nothing, and for a folder that cannot be opened, since what
        is behind it would be missing without a word.
        """
        return tuple(sorted(_files(self.place)))

    def read(self, name: str) -> bytes:
        """The file's bytes. Raises DataError where there are none to read."""
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
        held = max(0, os.path.getsize(self.place) - offset)
        if held < size:  # before reading: a damaged header may promise more than there can be
            raise damaged(self.place / name, f"the archive ends after {held} of {size} bytes")
        with self.place.open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)


def archive(path: Path) -> Archive:
    """Index a tar archive without unpacking it; devices in it are left out.

    Links to files of the archive are followed. Compressed archives are refused: every image would
    mean reading all those before it.

    Raises DataError for those, for links to folders or out of the archive, and for files stored
    with holes: what they stand for would be missing without a word.
    """
    members: dict[str, Place] = {}
    links: dict[str, str] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for m in tar:
                # What was added later replaces what has the same name.
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
    # A folder to look into, what its names begin with, and the folders that it lies in.
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(str(top), "", ())]
    while waiting:
        folder, prefix, above = waiting.pop()
        try:
            state = os.stat(folder)
            identity = (state.st_dev, state.st_ino)
            entries = [] if identity in above else list(os.scandir(folder))
        except OSError as error:
            raise damaged(Path(folder), f"cannot be opened ({error.strerror or error})") from error
        for entry in entries:
            name = prefix + entry.name
            if os.path.isdir(entry) if entry.is_symlink() else entry.is_dir():
                waiting.append((entry.path, f"{name}/", (*above, identity)))
                continue
            # Editors leave hidden links to nothing as their locks.
            if entry.is_symlink() and not os.path.exists(entry) and not _hidden(name):
                raise DataError(
                    f"{entry.path}: a link to {os.readlink(entry)}, which is not there. Bring back "
                    "what it links to, or remove the link."
                )
            yield name


def _linked(path: Path, members: Mapping[str, Place], links: Mapping[str, str]) -> dict[str, Place]:
    """What the links of an archive stand for."""
    places = {posixpath.normpath(name): place for name, place in members.items()}
    reached: dict[str, Place] = {}
    for name, target in links.items():
        place = places.get(posixpath.normpath(target))
        if place is not None:
            reached[name] = places[posixpath.normpath(name)] = place
        elif not _hidden(name):
            raise damaged(
                path,
                f"{name} is a link to {target}, which is no file of the archive; pack what it "
                "links to, with tar --dereference",
            )
    return reached


def _hidden(name: str) -> bool:
    return posixpath.basename(name).startswith(".")
