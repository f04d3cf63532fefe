"""Checkpoints: a round on disk, whole or not at all, so that a killed run can go on from it.

Each round has a folder with `state.safetensors` (the server's parts, the clients' states, the
cohort and its weights) and `round.json` (everything else, and the checksums of both files). Both
are written and flushed under a temporary name first. The folder's rename is the moment at which the
checkpoint exists.

Nothing is pickled. Random streams have no state to save: they derive from (seed, round, client).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.engine.checks.gate import Dropped
from fedshift.engine.round import Round
from fedshift.engine.storage.client_states import Shelf
from fedshift.engine.storage.tensor_file import map_tensors, places_in, write_tensors
from fedshift.errors import DataError, InputError, shown
from fedshift.tree import Params, Parts, flatten, unflatten

FORMAT = 2
# Two are kept: if the newest is damaged, the one before it is read.
KEEP = 2
STATE, ABOUT = "state.safetensors", "round.json"
PREFIX, PARTIAL = "round-", ".part"


class Saved(NamedTuple):
    """A round that was saved, with the facts that were saved beside it."""

    round: Round
    facts: dict[str, Any]


def write_checkpoint(folder: Path, current: Round, facts: Mapping[str, Any]) -> Path:
    """Save a round with `facts` (values that JSON can hold), and remove all but the last two.

    Raises InputError, with the place, if it cannot be written; older checkpoints then stay.
    """
    place = _place(folder, current.t)
    partial = place.with_name(place.name + PARTIAL)
    about = _about(current) | {"facts": dict(facts)}
    _checksum(about)  # raises for values that JSON cannot hold, before anything is written
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        # Flushed to disk first: a round.json that names its checksum must not outlive a lost file.
        written = write_tensors(partial / STATE, lambda: _tensors(current), os.fsync)
        about |= {"sha256": written.sha256}
        text = json.dumps(about | {"checksum": _checksum(about)}, allow_nan=False)
        _write(partial / ABOUT, text.encode())
        _sync(partial)
        if place.exists():  # a damaged one of the same round, from which nothing could be resumed
            shutil.rmtree(place)
        partial.rename(place)
        # A rename survives a power cut only once its folder is flushed, and so on upwards: the
        # folder of checkpoints, and those above it, may be new.
        _sync(folder)
        for one in folder.absolute().parents[:2]:
            with contextlib.suppress(OSError):  # folders of other users may not be readable
                _sync(one)
    except OSError as e:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{place}: cannot be written: {e.strerror}") from None
    for old in _places(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def read_checkpoint(folder: Path, shelf: Shelf = Shelf()) -> Saved | None:
    """The newest undamaged checkpoint in `folder`; None if there is none at all.

    shelf: where the clients' states go. Raises DataError if all are damaged, with the fault of the
    newest, and for a checkpoint of a newer format.
    """
    places = _places(folder)
    wrong: list[DataError] = []
    for place in places:
        try:
            return _read(place, shelf)
        except DataError as e:
            wrong.append(e)
    if wrong:
        raise DataError(
            f"{wrong[0]}; no other checkpoint is whole. Delete {folder} to start from round 1"
        )
    return None


def rounds_in(folder: Path) -> tuple[int, ...]:
    """The rounds of the checkpoints in `folder`, the newest first."""
    names = (place.name.removeprefix(PREFIX) for place in _places(folder))
    return tuple(int(name) for name in names if name.isdecimal())


def read_round(folder: Path, t: int, shelf: Shelf = Shelf()) -> Saved:
    """The checkpoint of round t. Raises DataError if it is damaged."""
    return _read(_place(folder, t), shelf)


def remove_round(folder: Path, t: int) -> None:
    """Remove the checkpoint of round t."""
    shutil.rmtree(_place(folder, t), ignore_errors=True)


def _place(folder: Path, t: int) -> Path:
    return folder / f"{PREFIX}{t:08d}"


def _tensors(current: Round) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a round by unique names, one at a time: states may not fit into memory."""
    for path, v in flatten(current.server).items():
        yield f"server/{path}", v
    for i, state in current.states.items():
        for path, v in flatten(state).items():
            yield f"client.{i}/{path}", v
    yield "round/cohort", current.cohort
    yield "round/weights", current.weights


def _about(current: Round) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "round": current.t,
        "trained": list(current.trained),
        "loss": None if math.isnan(current.loss) else current.loss,
        "dropped": [list(one) for one in current.dropped],
        "skipped": [current.skipped, current.skips],
        "server": list(current.server),
        "states": {str(i): list(state) for i, state in current.states.items()},
    }


def _checksum(about: Mapping[str, Any]) -> str:
    """SHA-256 of the values, independent of key order and spacing."""
    text = json.dumps(about, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _places(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first. Raises DataError if it cannot be read."""
    try:
        folders = [p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as e:
        raise DataError(f"{folder}: cannot be looked into: {e.strerror}") from None
    return sorted((p for p in folders if not p.name.endswith(PARTIAL)), reverse=True)


@torch.inference_mode(False)
def _read(place: Path, shelf: Shelf) -> Saved:
    try:
        about = json.loads((place / ABOUT).read_bytes())
        if about["format"] != FORMAT:
            raise DataError(
                f"{place}: a checkpoint of format {about['format']}, and this version of fedshift "
                f"reads {FORMAT}; use the version that wrote it"
            )
        # `pop` takes the checksum out before the rest is summed, which does not include it.
        if about.pop("checksum") != _checksum(about):
            raise DataError(f"{place / ABOUT}: damaged (its checksum differs)")
        if _digest(place / STATE) != about["sha256"]:
            raise DataError(f"{place / STATE}: damaged (its checksum differs)")
        tensors = map_tensors(place / STATE, places_in(place / STATE))
        return Saved(_round(about, tensors, shelf), about["facts"])
    except DataError:
        raise
    except OSError as e:
        raise DataError(f"{e.filename}: cannot be read: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as e:
        raise DataError(f"{place}: damaged ({type(e).__name__}: {shown(str(e), 200)})") from None


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _round(about: Mapping[str, Any], tensors: Params, shelf: Shelf) -> Round:
    # Sort names by owner in one pass: there are as many as clients times their tensors.
    of: dict[str, list[str]] = {}
    for path in tensors:
        of.setdefault(path.partition("/")[0], []).append(path)

    def parts(owner: str, names: list[str]) -> Parts:
        # Copies, because the file may be removed later; and torch aligns them, while kernels may
        # round differently on memory that is not aligned.
        entries = {p.partition("/")[2]: tensors[p].clone() for p in of.get(owner, [])}
        return unflatten(entries, names)

    # Each state goes to the shelf at once: all of them together may not fit into memory.
    states = shelf.draft({})
    for i, names in about["states"].items():
        states.put(int(i), parts(f"client.{i}", names))
    drawn = parts("round", [])
    return Round(
        about["round"],
        parts("server", about["server"]),
        states.all_states(),
        drawn["cohort"][""],
        drawn["weights"][""],
        tuple(about["trained"]),
        math.nan if about["loss"] is None else about["loss"],
        tuple(Dropped(*one) for one in about["dropped"]),
        *about["skipped"],
    )


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    """Flush a folder, so that renames in it survive a power cut; Windows needs no such call."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
