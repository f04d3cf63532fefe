"""A run whose clients' states beyond a memory budget lie in files of its run folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedshift.algorithms.base import Algorithm
from fedshift.engine.backends import Backend, loop
from fedshift.engine.run import Federation, Round
from fedshift.engine.storage.client_states import Shelf
from fedshift.errors import InputError
from fedshift.experiments.config import Config
from fedshift.experiments.experiment import Engine, trained_by
from fedshift.experiments.training import Play

STATES = "states"
MIB = 1 << 20


@contextlib.contextmanager
def shelf_in(folder: Path, mebibytes: float | None) -> Iterator[Shelf]:
    """A shelf of so many MiB with its files in a run folder, which are gone at the end; None: all
    in memory. Files that a killed run left are removed. Raises InputError for a negative number.
    """
    if mebibytes is None:
        yield Shelf()
        return
    if not mebibytes >= 0:
        raise InputError(f"--state-memory {mebibytes:g}: give MiB, 0 or more")
    place = folder / STATES
    shutil.rmtree(place, ignore_errors=True)
    try:
        yield Shelf(mebibytes * MIB, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class Shelved:
    """An engine with the clients' states of its runs on a shelf. Results stay the same."""

    engine: Engine
    shelf: Shelf

    @property
    def backend(self) -> str:
        """That of the engine."""
        return trained_by(self.engine)

    def __call__(self, config: Config, options: dict[str, Any]) -> Play:
        return partial(_play, self.engine(config, options), self.shelf)


def _play(
    play: Play,
    shelf: Shelf,
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    backend: Backend = loop,
    after: Round | None = None,
) -> Iterator[Round]:
    there = replace(federation, shelf=shelf)
    return play(algorithm, there, rounds, cohort=cohort, backend=backend, after=after)
