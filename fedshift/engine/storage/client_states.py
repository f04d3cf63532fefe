"""What clients keep between rounds: in memory up to a budget, and in files beyond it.

A state on disk is a safetensors file that is mapped into memory while it is used. It is never
changed: an earlier round that refers to it still reads the old values. The file is removed with the
last round that refers to it, or at the end of the process.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedshift.arguments import check_fields
from fedshift.engine.round import States
from fedshift.engine.storage.tensor_file import Place, map_tensors, write_tensors
from fedshift.errors import InputError
from fedshift.sketch import sketched
from fedshift.tree import Parts, compact, flatten, size_in_bytes, unflatten


@dataclass(frozen=True)
class Shelf:
    """Where clients' states are kept.

    memory  bytes that the tensors of all states together may take in memory; inf: any number
    folder  where files of the other states go, made if missing; None: the system's folder for
            temporary files

    Raises InputError for a negative budget.
    """

    memory: float = math.inf
    folder: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.memory >= 0:
            raise InputError(f"{self.memory} bytes for clients' states; give 0 or more")

    def draft(self, states: States) -> Draft:
        """The states of the next round: those before it, to be replaced one by one."""
        return Draft(self, states)


@dataclass(eq=False)
class Draft:
    """The states before a round, with those that the round has changed so far."""

    shelf: Shelf
    before: States
    _new: dict[int, Parts | OnDisk] = field(default_factory=dict, repr=False)
    _taken: int = 0

    def __post_init__(self) -> None:
        # States before the round stay in memory until it is over, so they count as well.
        if math.isfinite(self.shelf.memory):
            self._taken = in_memory(self.before)

    def put(self, client: int, state: Parts) -> None:
        """Store a client's state. Raises InputError if its file cannot be written."""
        if math.isinf(self.shelf.memory):
            # States outlive the round: a view of a message would keep the whole message in memory.
            self._new[client] = {p: {k: compact(v) for k, v in t.items()} for p, t in state.items()}
            return
        size = size_in_bytes(state)
        if size and self._taken + size > self.shelf.memory:
            self._new[client] = _write(state, self.shelf.folder)
            return
        self._taken += size
        # A copy, because it may be a view of a file, or of memory much larger than this state.
        self._new[client] = {p: {k: v.clone() for k, v in t.items()} for p, t in state.items()}

    def all_states(self) -> States:
        """All states."""
        if math.isinf(self.shelf.memory):
            return {**self.before, **self._new}  # type: ignore[dict-item]
        # `entries`, because going through the mapping itself would read every file.
        before = self.before.entries if isinstance(self.before, StoredStates) else self.before
        return StoredStates({**before, **self._new})


@dataclass(frozen=True, eq=False)
class OnDisk:
    """A state in a file of its own, which is removed with this object."""

    path: Path
    parts: tuple[str, ...]
    places: tuple[Place, ...]

    def __post_init__(self) -> None:
        weakref.finalize(self, _remove, str(self.path), os.getpid())

    def read(self) -> Parts:
        """The state, mapped from its file."""
        return unflatten(map_tensors(self.path, self.places), self.parts)


@sketched
@dataclass(frozen=True, eq=False)
class StoredStates(Mapping[int, Parts]):
    """States by client; one on disk is mapped from its file at each access."""

    entries: Mapping[int, Parts | OnDisk]

    def __getitem__(self, client: int) -> Parts:
        entry = self.entries[client]
        return entry.read() if isinstance(entry, OnDisk) else entry

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def in_memory(states: States) -> int:
    """Bytes that the tensors of states take which are not on disk."""
    entries = states.entries if isinstance(states, StoredStates) else states
    return sum(size_in_bytes(e) for e in entries.values() if not isinstance(e, OnDisk))


def _write(state: Parts, folder: Path | None) -> OnDisk:
    flat = flatten(state)
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".safetensors", "fedshift-state-", folder)
        os.close(handle)
        try:
            places = write_tensors(Path(name), flat.items).places
        except BaseException:
            _remove(name, os.getpid())
            raise
    except OSError as e:
        where = folder or tempfile.gettempdir()
        raise InputError(f"{where}: a client's state cannot be written: {e.strerror}") from None
    return OnDisk(Path(name), tuple(state), places)


def _remove(path: str, owner: int) -> None:
    # Forked workers have copies of these objects, and must not remove files of the main process.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.unlink(path)
