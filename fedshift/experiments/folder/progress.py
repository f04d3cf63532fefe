"""A run's measurements so far, stored with its checkpoints, and when checkpoints are written."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.engine.run import Round
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.engine.storage.client_states import Shelf
from fedshift.engine.traffic import Traffic
from fedshift.errors import DataError, InputError
from fedshift.experiments.measures.round_weights import WeightSums, weight_sums_of
from fedshift.record.rounds import Metrics, ServedMetrics
from fedshift.record.summary import SetRound

SECONDS = 60.0
STATES = "states"
MIB = 1 << 20
# The exit code if a stop was requested, else None.
Asked = Callable[[], int | None]


class Missed(NamedTuple):
    """Counts of a run: answers that were missing, those used, rounds that lacked some, and rounds
    that were skipped, whose answers are not used.
    """

    answers: int = 0
    used: int = 0
    rounds: int = 0
    skipped: int = 0

    def after(self, played: Round) -> Missed:
        """With one round more."""
        return Missed(
            self.answers + len(played.dropped),
            self.used + len(played.trained),
            self.rounds + bool(played.dropped),
            self.skipped + bool(played.skipped),
        )

    def sentence(self, rounds: int, means: bool = False) -> str:
        """A sentence on these counts for readers of the results; "" where nothing was missing.

        means: whether the results have means over the rounds' weights, not weights of all clients.
        """
        if not (self.rounds or self.skipped):
            return ""
        whose = "those of all clients"
        if means:
            whose = "means over the rounds that were played, 0 for a client that was not in one"
        return (
            f"Rounds that lacked answers: {self.rounds} of {rounds}, {self.answers} in all; "
            f"rounds that were skipped: {self.skipped}; answers used: {self.used}. Weights and "
            f"sample sizes are {whose}; events.jsonl says of each such round who "
            "dropped out or why it was skipped, and how far from the target the rest was."
        )


@dataclass(eq=False)
class Progress:
    """The last round that is complete, and all that was measured up to it.

    best: the round of the largest estimate so far, where that one is kept in the end
    """

    after: Round | None = None
    metrics: list[Metrics] = field(default_factory=list)
    served: list[ServedMetrics] = field(default_factory=list)
    sets: list[SetRound] = field(default_factory=list)
    traffic: Traffic = Traffic()
    missed: Missed = Missed()
    weight_sums: WeightSums = WeightSums()
    best: Round | None = None

    def facts(self) -> dict[str, Any]:
        """Everything but the rounds, as values that JSON can hold."""
        return {
            "metrics": [_as_json(asdict(one)) for one in self.metrics],
            "served": [_as_json(asdict(one)) for one in self.served],
            "sets": [_as_json(asdict(one)) for one in self.sets],
            "traffic": list(self.traffic),
            "missed": list(self.missed),
            "played": self.weight_sums.facts(),
        }


def progress_of(after: Round, facts: Mapping[str, Any]) -> Progress:
    """The inverse of `Progress.facts`."""
    return Progress(
        after,
        [Metrics(**_numbers(row)) for row in facts["metrics"]],
        [ServedMetrics(**_numbers(row)) for row in facts["served"]],
        [SetRound(**_numbers(row)) for row in facts["sets"]],
        Traffic(*facts["traffic"]),
        # Runs of earlier versions have no counts: counting starts here.
        Missed(*facts.get("missed", ())),
        weight_sums_of(facts["played"]) if "played" in facts else WeightSums(),
    )


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Non-finite numbers as text; None stays None."""

    # JSON has no NaN; None is taken, for values that do not exist.
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return _as_json(value)
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {k: plain(v) for k, v in row.items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    def number(value: Any) -> Any:
        if isinstance(value, dict):
            return _numbers(value)
        return float(value) if isinstance(value, str) else value

    return {k: number(v) for k, v in row.items()}


def no_stop() -> None:
    """No stop is requested."""


@dataclass(frozen=True)
class Keeper:
    """Where a run's checkpoints are, and when one is written.

    every     rounds; None: whenever `SECONDS` have passed since the last one
    asked     called after every round: whether to stop; the run stops after the next checkpoint
    shelf     where clients' states are kept
    identity  a hash that no other run has; a checkpoint with another one is refused
    former    the hash that earlier versions wrote for this run
    """

    folder: Path
    identity: str
    every: int | None = None
    asked: Asked = no_stop
    shelf: Shelf = Shelf()
    former: str = ""

    def progress(self, label: str) -> Progress:
        """The progress of the run or a candidate of it. Raises DataError for another run's."""
        saved = read_checkpoint(self.folder / slug(label), self.shelf)
        if saved is None:
            return Progress()
        # Results that go on from another run's round would belong to neither run.
        if saved.facts.get("identity") not in (self.identity, self.former):
            raise DataError(
                f"{self.folder}: checkpoints of another configuration, or of other data; delete "
                "the folder to start from round 1"
            )
        try:
            return progress_of(saved.round, saved.facts)
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            raise DataError(
                f"{self.folder}: measured by another version of fedshift ({e}); use the version "
                "that wrote it, or delete the folder to start from round 1"
            ) from None

    def keep(self, label: str, progress: Progress) -> None:
        """Write a checkpoint of `progress`."""
        if progress.after is not None:
            facts = progress.facts() | {"identity": self.identity}
            write_checkpoint(self.folder / slug(label), progress.after, facts)


class Saver:
    """Decides after each round whether to write a checkpoint; without a keeper never."""

    def __init__(self, keeper: Keeper | None, label: str) -> None:
        self.keeper, self.label = keeper, label
        self.written = time.monotonic()

    def start(self, *, best: bool = False) -> Progress:
        """Where to go on from; best: with the best round so far."""
        if self.keeper is None:
            return Progress()
        progress = self.keeper.progress(self.label)
        if best and progress.after is not None:
            progress.best = self.keeper.progress(self._best_label).after
        return progress

    def after_round(self, progress: Progress, *, last: bool) -> None:
        """After a round. Raises KeyboardInterrupt, with an exit code, where it is asked to stop."""
        if self.keeper is None or progress.after is None:
            return
        t, code = progress.after.t, self.keeper.asked()
        # By time, not by rounds: rounds take from milliseconds to minutes.
        late = time.monotonic() - self.written >= SECONDS
        due = late if self.keeper.every is None else t % self.keeper.every == 0
        if due or code is not None or last:
            # Before the other checkpoint: if the run is killed between the two, it plays the best
            # round again.
            self.keeper.keep(self._best_label, Progress(progress.best))
            self.keeper.keep(self.label, progress)
            self.written = time.monotonic()
        # After the last round there is nothing to stop: the run ends as usual.
        if code is not None and not last:
            raise KeyboardInterrupt(code)

    @property
    def _best_label(self) -> str:
        return f"{self.label} best"


def slug(label: str) -> str:
    """A label as the name of a folder; dots alone would name another folder."""
    name = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)
    return name if name.strip(".") else name.replace(".", "_")


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
