"""Reading events.jsonl: each round's metrics and time, and why a run stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedshift.errors import DataError, shown
from fedshift.record.drops import UNSCORED, Drop
from fedshift.record.rounds import REDO, Round

# Keys of round and evaluation events that are no columns of metrics.csv.
BESIDE = {"time", "event", "run", "round", "rounds", "clients", "seconds", "scored_by"}


@dataclass
class Course:
    """How one model was trained; of: the number of planned rounds; other fields are by round."""

    of: int = 0
    rows: dict[int, dict[str, float | None]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    dropped: dict[int, tuple[Drop, ...]] = field(default_factory=dict)
    unscored: dict[tuple[int, int], Drop] = field(default_factory=dict)

    @property
    def missing(self) -> dict[int, tuple[Drop, ...]]:
        """By round: clients that dropped out of it, and those that sent no scores after it."""
        rounds = sorted({*self.dropped, *(t for t, _ in self.unscored)})
        of = {t: [one for (at, _), one in self.unscored.items() if at == t] for t in rounds}
        return {t: (*self.dropped.get(t, ()), *of[t]) for t in rounds}

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The metrics as rows of metrics.csv; rounds without evaluation have the training loss."""
        return tuple(Round(t, row) for t, row in sorted(self.rows.items()))


@dataclass
class Events:
    """The courses by the model's name; a run with `ess = "auto"` has several.

    stopped: why the run stopped; "" if it did not, or if no event says so
    """

    courses: dict[str, Course] = field(default_factory=dict)
    stopped: str = ""

    def course(self, chosen: object = None) -> Course:
        """The course of the chosen candidate, or else the latest; an empty one without events."""
        ends = "" if chosen is None else f" {chosen}"
        kept = [of for name, of in self.courses.items() if name.endswith(ends)]
        return kept[-1] if kept else Course()


def read_events(path: Path) -> Events:
    """Read the whole file. Raises DataError, with the line, for a line that no run writes."""
    events, number = Events(), 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                # A line without an end is the last one of a process that was killed.
                if line.endswith("\n"):
                    _enter(events, json.loads(line))
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from None
    except (
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
    ) as e:
        why = shown(f"{type(e).__name__}: {e}", 100)
        raise DataError(f"{path}, line {number}: no event of a run ({why}); {REDO}") from None
    return events


def _enter(events: Events, event: Mapping[str, Any]) -> None:
    kind = event["event"]
    events.stopped = shown(str(event["error"]), 300) if kind == "failed" else ""
    if kind not in ("start", "round", "evaluation", "unscored"):
        return
    course = events.courses.setdefault(str(event["run"]), Course())
    if kind == "start":
        course.of, after = int(event["rounds"]), int(event.get("after", 0))
        # A resumed run repeats the rounds after its checkpoint, so their entries are dropped.
        course.unscored = {at: one for at, one in course.unscored.items() if at[0] <= after}
        return
    t = int(event["round"])
    if kind == "round":
        # Assigned and not merged, since the round may be repeated.
        course.seconds[t] = float(event["seconds"])
        course.rows[t] = {"train_loss": _finite(event["train_loss"])}
        course.dropped[t] = tuple(map(_drop, event.get("dropped", ())))
    elif kind == "unscored":
        one = _drop(event)
        course.unscored[t, one.client] = one._replace(kind=f"{UNSCORED}{one.kind}")
    else:
        numbers = {k: _finite(v) for k, v in event.items() if k not in BESIDE}
        course.rows.setdefault(t, {}).update(numbers)


def _drop(one: Mapping[str, Any]) -> Drop:
    return Drop(int(one["client"]), str(one.get("kind", "")), shown(str(one["reason"]), 500))


def _finite(value: Any) -> float | None:
    """A number of a file; None for null and for infinity, which files hold as text."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
