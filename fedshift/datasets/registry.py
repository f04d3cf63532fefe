"""Finding and loading the known data sets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshift.datasets.base import (
    Dataset,
    Samples,
    content_sha256,
    roots_of,
    unsearchable,
)
from fedshift.datasets.catalogue import SHIPPED, entries, entry
from fedshift.datasets.entry import Entry
from fedshift.datasets.images import check_not_enlarged
from fedshift.datasets.natural.entry import Natural
from fedshift.datasets.natural.loading import TABLES, find_table
from fedshift.errors import DataError, InputError

_PACKED = (".zip", ".tar", ".tar.gz", ".tgz")


# Users write `known`, `Known` and its field `found`: these names stay.
@dataclass(frozen=True)
class Known:
    """One line of `fedshift datasets`.

    Tables whose clients come with them (`load_table`) are the last lines. `available` says whether
    it can be expected to load; `found` is the folder that would be read (None for a generated set,
    or one that is not on this machine) and `how` the way to get it.
    """

    name: str
    summary: str
    classes: tuple[str, ...]
    size: str
    licence: str
    available: bool
    found: Path | None
    how: str


def known(folders: Sequence[Path | str] | None = None) -> tuple[Known, ...]:
    """Every known data set and where it is; `folders` replaces the usual search folders.

    Files are looked for, not opened: a damaged set shows as available and fails at `load`.
    """
    roots = roots_of(folders)
    return (
        *(_known(one, roots) for one in entries()),
        *(_known_table(one, roots) for one in TABLES),
    )


def load(
    name: str, folders: Sequence[Path | str] | None = None, size: int | None = None
) -> Dataset:
    """A known data set, read from the first search folder that has all of its files.

    The folders are those of `base.search_folders` (or `folders`); in each, the sub-folders that
    the set is commonly kept in are tried. What was read must be the official content.

    size: pixels a side, for sets that are decoded from photographs; 96 if left out.

    Raises InputError for an unknown name, with the nearest match, and a size for another set;
    DataError for a set that is not found, damaged, smaller than `size`, or not the official one.
    """
    one = entry(name)
    if size is not None and not one.sized:
        raise InputError(f'size={size} is for {", ".join(sized())}, not for "{name}"; leave it out')
    if one.read is None:
        return _generated(one)
    roots = roots_of(folders)
    folder = _folder(one, roots)
    try:
        train, test = _read(one.read, folder, size)
    except DataError as error:
        raise DataError(f"{error}{_others(one, roots, folder)}") from error
    digest = content_sha256(train, test)
    if not one.self_checked:
        _check_content(one, folder, (train, test), digest)
    return Dataset(one.name, train, test, one.classes, digest, str(folder), one.licence)


def _read(
    read: Callable[..., tuple[Samples, Samples]], folder: Path, size: int | None
) -> tuple[Samples, Samples]:
    if size is None:
        return read(folder)
    check_not_enlarged(folder, size)
    return read(folder, size)


def find(name: str, folders: Sequence[Path | str] | None = None) -> Path:
    """The folder (or archive) that `load` would read: the first that has all of the set's files.

    Raises InputError for an unknown or a generated set, DataError where it is not found.
    """
    one = entry(name)
    if one.read is None:
        raise InputError(f'"{name}" is {one.built_in}; it lies in no folder. Use load.')
    return _folder(one, roots_of(folders))


def sized() -> tuple[str, ...]:
    """Names of the sets whose images are decoded to a size of choice."""
    return tuple(one.name for one in entries() if one.sized)


def _generated(one: Entry) -> Dataset:
    if one.generate is None:
        raise InputError(f'the entry of "{one.name}" has neither read nor generate; give one')
    train, test = one.generate()
    digest = content_sha256(train, test)
    return Dataset(one.name, train, test, one.classes, digest, "generated", one.licence)


def _candidates(one: Entry, roots: Sequence[Path]) -> tuple[Path, ...]:
    paths = (root / sub for root in roots for sub in one.folders)
    return tuple(path for path in paths if os.path.exists(path))


def _find(one: Entry, roots: Sequence[Path]) -> Path | None:
    # A set that ships with the package has a digest, and no folder to look for.
    if one.content is not None and not one.folders:
        return SHIPPED
    return next((path for path in _candidates(one, roots) if not one.missing(path)), None)


def _others(one: Entry, roots: Sequence[Path], folder: Path) -> str:
    """A note for messages: another place of the set, which is read if this folder is removed."""
    others = [path for path in _candidates(one, roots) if path != folder and not one.missing(path)]
    return f" Or move {folder} away: {others[0]} is read then." if others else ""


def _folder(one: Entry, roots: Sequence[Path]) -> Path:
    place = _find(one, roots)
    if place is not None:
        return place
    partial = "".join(f" {path} {_lack(one, path)}." for path in _candidates(one, roots))
    packed = "".join(f" {path} is packed: unpack it beside itself." for path in _packed(one, roots))
    searched = ", ".join(map(_searched, roots)) or "no folder"
    raise DataError(
        f'data set "{one.name}" was not found. Looked in {searched}'
        f" for a sub-folder called {' or '.join(one.folders)}.{partial}{packed} Get it: {one.how}. "
        "If it is elsewhere, name the folder above it in $FEDSHIFT_DATA."
    )


def _packed(one: Entry, roots: Sequence[Path]) -> tuple[Path, ...]:
    """Archives that would have to be unpacked first: of the usual folders, and official ones."""
    names = [sub + ending for sub in one.folders for ending in _PACKED]
    # The archive under its official name, as a browser leaves it.
    names += [remote.name for remote in one.remotes if remote.members]
    paths = [root / name for root in roots for name in names if name not in one.folders]
    return tuple(path for path in paths if os.path.isfile(path))


def _lack(one: Entry, path: Path) -> str:
    # An archive is no folder, and nothing can be found in a closed one.
    if os.path.isdir(path) and (closed := unsearchable(path)):
        return f"cannot be searched: {closed}"
    return f"is incomplete: it lacks {', '.join(one.missing(path))}"


def _searched(root: Path) -> str:
    closed = unsearchable(root) if os.path.exists(root) else ""
    return f"{root} ({closed})" if closed else str(root)


def _known(one: Entry, roots: Sequence[Path]) -> Known:
    place = _find(one, roots) if one.read else None
    return Known(
        name=one.name,
        summary=one.summary,
        classes=one.classes,
        size=f"{one.amount}, {one.shape}",
        licence=one.licence,
        available=place is not None or one.read is None,
        found=place,
        how=one.how,
    )


def _known_table(one: Natural, roots: Sequence[Path]) -> Known:
    place = find_table(one, roots)
    return Known(
        name=one.name,
        summary=one.summary,
        classes=one.classes,
        size=f"{one.rows:,} rows of {one.clients} clients ({one.by}), {one.inputs}",
        licence=one.licence,
        available=place is not None,
        found=place,
        how=one.package.how,
    )


def _check_content(one: Entry, folder: Path, parts: tuple[Samples, Samples], digest: str) -> None:
    sizes = one.examples or tuple(map(len, parts))
    for part, samples, expected in zip(("training", "test"), parts, sizes, strict=True):
        if len(samples) != expected:
            raise DataError(
                f"{folder}: {len(samples):,} {part} examples; {one.name} has {expected:,}. "
                f"Replace the folder by the official set: {one.how}."
            )
        _check_classes(one, folder, part, samples)
    if one.content not in (None, digest):
        raise DataError(
            f"{folder}: the files can be read, but they are not {one.name} (content SHA-256 "
            f"{digest}, expected {one.content}). Replace the folder by the official set: {one.how}."
        )


def _check_classes(one: Entry, folder: Path, part: str, samples: Samples) -> None:
    # Sets without a digest of their own (see Entry) are balanced, which is checked instead.
    expected = len(samples) // len(one.classes)
    counts = samples.y.bincount(minlength=len(one.classes)).tolist()
    uneven = [c for c, count in zip(one.classes, counts, strict=True) if count != expected]
    if one.content is None and uneven:
        raise DataError(
            f"{folder}: {one.name} has {expected:,} {part} examples of every class, but not here "
            f"of {', '.join(uneven)}. Replace the folder by the official set: {one.how}."
        )
