"""Checkpoints: a round on disk, whole or not at all, so that a run goes on where it was killed.

A folder per round holds `state.safetensors` (the server's parts, every client's, the cohort and its
weights) and `round.json` (everything else, and the checksum of the former). Both are written and
flushed under a temporary name first; the rename is the moment at which the checkpoint exists.
Nothing is pickled. Random streams have no state to keep: they derive from (seed, round, client).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedshift.engine.gate import Dropped
from fedshift.engine.one_round import Round
from fedshift.errors import DataError, InputError
from fedshift.tree import Params, Parts, flatten, unflatten

FORMAT = 1
KEEP = 2
STATE, ABOUT = "state.safetensors", "round.json"
PREFIX, PARTIAL = "round-", ".part"


class Saved(NamedTuple):
    """A round as it was saved, with the facts that were saved beside it."""

    round: Round
    facts: dict[str, Any]


def write_checkpoint(folder: Path, current: Round, facts: Mapping[str, Any]) -> Path:
    """Save a round with `facts` (values that JSON can hold), and remove all but the last two.

    Raises InputError, naming the place, where it cannot be written; older checkpoints stay.
    """
    place = folder / f"{PREFIX}{current.t:08d}"
    partial = place.with_name(place.name + PARTIAL)
    state = save(_tensors(current))
    about = _about(current) | {"sha256": hashlib.sha256(state).hexdigest(), "facts": facts}
    text = json.dumps(about, allow_nan=False).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write(partial / STATE, state)
        _write(partial / ABOUT, text)
        _sync(partial)
        if place.exists():  # a damaged one of the same round, from which nothing could be resumed
            shutil.rmtree(place)
        partial.rename(place)
        _sync(folder)
    except OSError as e:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"{place}: cannot be written: {e.strerror}") from None
    for old in _places(folder)[KEEP:]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def read_checkpoint(folder: Path) -> Saved | None:
    """The newest checkpoint in `folder` that is whole; None where there is none.

    A damaged one is passed over for the one before it. Raises DataError where all are damaged, with
    what is wrong with the newest, and for checkpoints of a newer format.
    """
    places = _places(folder)
    wrong: list[DataError] = []
    for place in places:
        try:
            return _read(place)
        except DataError as e:
            wrong.append(e)
    if wrong:
        raise DataError(
            f"{wrong[0]}; no other checkpoint is whole. Delete {folder} to start from round 1"
        )
    return None


def _tensors(current: Round) -> Params:
    """All tensors of a round under names of their own, copied, since parts may share memory."""
    states = {
        f"client.{i}/{path}": v
        for i, state in current.states.items()
        for path, v in flatten(state).items()
    }
    server = {f"server/{path}": v for path, v in flatten(current.server).items()}
    drawn = {"round/cohort": current.cohort, "round/weights": current.weights}
    return {k: v.contiguous().clone() for k, v in (server | states | drawn).items()}


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


def _places(folder: Path) -> list[Path]:
    """The checkpoints' folders, the newest first."""
    try:
        found = [p for p in folder.iterdir() if p.name.startswith(PREFIX) and p.is_dir()]
    except OSError:
        return []
    return sorted((p for p in found if not p.name.endswith(PARTIAL)), reverse=True)


def _read(place: Path) -> Saved:
    try:
        about = json.loads((place / ABOUT).read_bytes())
        state = (place / STATE).read_bytes()
        if about["format"] > FORMAT:
            raise DataError(
                f"{place}: a checkpoint of format {about['format']}, and this version of fedshift "
                f"reads up to {FORMAT}; use the version that wrote it"
            )
        if hashlib.sha256(state).hexdigest() != about["sha256"]:
            raise DataError(f"{place / STATE}: damaged (its checksum differs)")
        return Saved(_round(about, load(state)), about["facts"])
    except OSError as e:
        raise DataError(f"{e.filename}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as e:
        raise DataError(f"{place}: damaged ({type(e).__name__}: {e})") from None


def _round(about: Mapping[str, Any], tensors: Params) -> Round:
    # One pass over all names: there are as many as clients times parts.
    of: dict[str, Params] = {}
    for path, v in tensors.items():
        owner, _, rest = path.partition("/")
        of.setdefault(owner, {})[rest] = v
    states = {int(i): _parts(of, f"client.{i}", names) for i, names in about["states"].items()}
    return Round(
        about["round"],
        _parts(of, "server", about["server"]),
        states,
        of["round"]["cohort"],
        of["round"]["weights"],
        tuple(about["trained"]),
        math.nan if about["loss"] is None else about["loss"],
        tuple(Dropped(*one) for one in about["dropped"]),
        *about.get("skipped", ("", 0)),
    )


def _parts(of: Mapping[str, Params], owner: str, names: list[str]) -> Parts:
    return unflatten(of.get(owner, {}), names)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync(folder: Path) -> None:
    """Make renames in a folder last; Windows opens no folders, and needs none opened."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
