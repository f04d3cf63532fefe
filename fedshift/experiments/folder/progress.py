"""What a run has measured so far, kept with its checkpoints, and when these are written."""

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

# How often a checkpoint is written unless the user says: a minute of work is lost at most.
SECONDS = 60.0
STATES = "states"
MIB = 1 << 20
# A function that gives the exit code if a stop was requested, else None.
Asked = Callable[[], int | None]


class Missed(NamedTuple):
    """Counts of the answers that a run's rounds lacked.

    answers  answers that did not come, or were refused
    used     answers that entered a model; those of skipped rounds do not
    rounds   rounds that lacked at least one answer
    skipped  rounds that changed nothing, since too many answers were missing
    """

    answers: int = 0
    used: int = 0
    rounds: int = 0
    skipped: int = 0

    def after(self, played: Round) -> Missed:
        """These counts with one more round added."""
        return Missed(
            self.answers + len(played.dropped),
            self.used + len(played.trained),
            self.rounds + bool(played.dropped),
            self.skipped + bool(played.skipped),
        )

    def sentence(self, rounds: int, means: bool = False) -> str:
        """A sentence on these counts for readers of the results; "" if nothing was missing.

        means: whether the weights in the results are means over the rounds.
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
    """The last complete round, and all that was measured up to it.

    best: the round with the best estimate so far; None unless `training.keep` is "best"
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
        """Everything but the two rounds, as values that JSON can hold."""
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
        Missed(*facts["missed"]),
        weight_sums_of(facts["played"]),
    )


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with NaN and infinities as text, and None as it is."""

    # JSON has no NaN. It cannot be null: null stands for values that do not exist.
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

    every     rounds between two checkpoints; None: one whenever `SECONDS` have passed
    asked     called after each round; if it gives an exit code, the run writes a checkpoint and
              stops
    shelf     where clients' states are kept
    identity  a hash of the configuration and data; a checkpoint with another one is refused
    """

    folder: Path
    identity: str
    every: int | None = None
    asked: Asked = no_stop
    shelf: Shelf = Shelf()

    def progress(self, label: str) -> Progress:
        """The progress in the checkpoint of a run, or of one of its candidates.

        Empty without a checkpoint. Raises DataError for a checkpoint of another run.
        """
        saved = read_checkpoint(self.folder / slug(label), self.shelf)
        if saved is None:
            return Progress()
        # Going on from another run's round would give results that belong to neither run.
        if saved.facts.get("identity") != self.identity:
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
    """Decides after each round whether to write a checkpoint; without a keeper it never does."""

    def __init__(self, keeper: Keeper | None, label: str) -> None:
        self.keeper, self.label = keeper, label
        self.written = time.monotonic()

    def start(self, *, best: bool = False) -> Progress:
        """The progress to go on from, empty for a new run; best: whether to read the best round."""
        if self.keeper is None:
            return Progress()
        progress = self.keeper.progress(self.label)
        if best and progress.after is not None:
            progress.best = self.keeper.progress(self._best_label).after
        return progress

    def after_round(self, progress: Progress, *, last: bool) -> None:
        """Write a checkpoint after a round if one is due.

        Raises KeyboardInterrupt, with an exit code, if a stop was requested.
        """
        if self.keeper is None or progress.after is None:
            return
        t, code = progress.after.t, self.keeper.asked()
        # By time and not by rounds, since a round takes from milliseconds to minutes.
        late = time.monotonic() - self.written >= SECONDS
        due = late if self.keeper.every is None else t % self.keeper.every == 0
        if due or code is not None or last:
            # The best round first. If the run is killed between the two writes, it goes on from the
            # older progress and plays the best round again; in the other order it would be lost.
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
    """A label as the name of a folder; "." and ".." would be other folders."""
    name = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)
    return name if name.strip(".") else name.replace(".", "_")


@contextlib.contextmanager
def shelf_in(folder: Path, mebibytes: float | None) -> Iterator[Shelf]:
    """A shelf for clients' states that keeps this many MiB in memory and the rest in files.

    None keeps all in memory. The files are in a subfolder of `folder` that is deleted at the end,
    and so are those that a killed run has left. Raises InputError for a negative number.
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
