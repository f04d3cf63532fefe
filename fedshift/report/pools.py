"""Grouping runs into the lines of a report: a line has runs that differ only in their seed."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedshift.record.folder import Begun, RunResult
from fedshift.report.charts import shortened

# If a line's settings are longer than the first number, it is labelled by its name or folder.
LONGEST, LONGEST_LABEL = 60, 120
NOT_COMPLETE = "not complete"
Run = RunResult | Begun


@dataclass(frozen=True)
class Pool:
    """One line of the report: runs of one configuration, each with another seed.

    seeds  in words, one for each run
    begun  runs that are not complete. A line has either these or `runs`, since means are taken over
           complete runs only
    """

    label: str
    seeds: tuple[str, ...]
    runs: tuple[RunResult, ...] = ()
    begun: tuple[Begun, ...] = ()

    @property
    def first(self) -> RunResult:
        """The complete run that is shown where all of a line's runs look alike."""
        return self.runs[0]

    @property
    def alike(self) -> tuple[RunResult, ...]:
        """The complete runs with the same clients as the first: a seed may cut the data anew."""
        cut = self.first.summary.label_counts
        return tuple(run for run in self.runs if run.summary.label_counts == cut)

    @property
    def all(self) -> tuple[Run, ...]:
        """The runs, complete or not."""
        return self.runs or self.begun

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each run: the label, with the seed if there are several."""
        several = len(self.seeds) > 1
        return tuple(f"{self.label}, seed {s}" if several else self.label for s in self.seeds)


@dataclass(frozen=True)
class _Identity:
    """What identifies a run apart from its seeds, and what its label is made of.

    Two runs are of the same line if `configured` and `measured` are equal. The latter has what only
    a complete run knows.
    """

    configured: str
    measured: str
    seeds: str
    method: str
    name: str
    folder: str
    settings: Mapping[str, Any]
    split: object
    data: object

    @property
    def key(self) -> tuple[str, str]:
        return self.configured, self.measured

    def joins(self, line: Iterable[_Identity]) -> bool:
        """Whether the run is another seed of a line's runs.

        Its seed must be new to the line. With the same split seed, the data must be the same, too.
        """
        return all(
            self.seeds != of.seeds and (self.split != of.split or self.data == of.data)
            for of in line
        )


def pools(runs: Sequence[Run]) -> tuple[Pool, ...]:
    """The lines of these runs, in the order of their first runs."""
    groups: dict[tuple[str, str, int], dict[str, int]] = {}
    of = [_identity(run) for run in runs]
    for i, one in enumerate(of):
        again = 0
        # Two runs with equal files and the same seed must differ in something that no file says:
        # they go to different lines.
        while not one.joins(of[k] for k in groups.get((*one.key, again), {}).values()):
            again += 1
        groups.setdefault((*one.key, again), {})[one.seeds] = i
    lines = list(groups.values())
    labels = _line_labels([of[next(iter(line.values()))] for line in lines])
    short = [shortened(label, LONGEST_LABEL) for label in labels]
    if len(set(short)) < len(short):
        short = [f"{label} #{i + 1}" for i, label in enumerate(short)]
    return tuple(
        Pool(
            label,
            _seed_words(list(line)),
            tuple(run for i in line.values() if isinstance(run := runs[i], RunResult)),
            tuple(run for i in line.values() if isinstance(run := runs[i], Begun)),
        )
        for label, line in zip(short, lines, strict=True)
    )


def runs_of(lines: Sequence[Pool]) -> list[tuple[RunResult, str]]:
    """Every complete run with its name, line by line."""
    return [pair for line in lines for pair in zip(line.runs, line.names, strict=False)]


def firsts(lines: Sequence[Pool]) -> tuple[list[RunResult], list[str]]:
    """(the first complete run of every line, the labels)."""
    return [line.first for line in lines], [line.label for line in lines]


def name_of(run: Run) -> str:
    """The name that the user gave the run."""
    return run.summary.name if isinstance(run, RunResult) else run.name


def dataset_of(run: Run) -> str:
    """The name of the run's data set."""
    return run.summary.dataset if isinstance(run, RunResult) else run.dataset


def _identity(run: Run) -> _Identity:
    files = run.lock.get("files")
    tables = _by_name(tomllib.loads(run.config), files if isinstance(files, dict) else {})
    seeds, name = tables.pop("seeds", None), tables.pop("name", "")
    method = run.summary.method if isinstance(run, RunResult) else run.method
    lock, cut = run.lock, run.lock.get("seeds")
    # For the user's own data (these have a fit.json) the checksum depends on the split seed, so it
    # cannot be a part of the identity.
    data, cut_anew = lock.get("data_sha256"), "names_sha256" in lock or run.fit
    facts = [tables, method, dataset_of(run), None if cut_anew else data, _by_name(files)]
    # Arguments of `fedshift.fit` that no configuration can hold. Label counts stand for the data,
    # unless these are files, which have checksums.
    beside = ("target", "net", "call", *["labels"] * (not files))
    facts += [run.fit.get(key) for key in beside]
    measured = NOT_COMPLETE
    if isinstance(run, RunResult):
        # In regression, classes are bins at quantiles, which differ in another cut of the data.
        classes = None if run.summary.kind == "regression" else run.summary.classes
        clients = [client.name for client in run.clients]
        measured = f"{run.summary.kind} {classes} {clients} {run.summary.final.bytes_model}"
    return _Identity(
        # A run whose file has no seeds is a line of its own.
        json.dumps(facts, sort_keys=True, default=str) if seeds else str(run.folder),
        measured,
        json.dumps(seeds, default=str) if seeds else "",
        method,
        str(name or name_of(run)),
        str(run.folder),
        dict(_flat(tables)),
        cut.get("split") if isinstance(cut, dict) else None,
        data,
    )


def _seed_words(seeds: Sequence[str]) -> tuple[str, ...]:
    """Words that tell the seeds of a line apart: "3" or "run 3, split 0"; "" if they have none."""
    tables = [json.loads(one) if one else {} for one in seeds]
    keys = dict.fromkeys(k for table in tables for k in table)
    differ = [k for k in keys if any(t.get(k) != tables[0].get(k) for t in tables)] or ["run"]
    if all(len({str(table.get(k)) for k in differ}) == 1 for table in tables):
        return tuple(str(table.get(differ[0], "")) for table in tables)
    return tuple(", ".join(f"{k} {table.get(k, '')}" for k in differ) for table in tables)


def _line_labels(of: Sequence[_Identity]) -> list[str]:
    """A label for each line. Runs that are not complete get the label of the same complete runs."""
    complete = [one.configured for one in of if one.measured != NOT_COMPLETE]
    main = [one for one in of if one.measured != NOT_COMPLETE or one.configured not in complete]
    labels = dict(zip(map(id, main), _labels(main), strict=True))
    like = {one.configured: labels[id(one)] for one in reversed(main)}
    return [
        f"{like[one.configured]}, {NOT_COMPLETE}"
        if one.measured == NOT_COMPLETE
        else labels[id(one)]
        for one in of
    ]


def _labels(of: Sequence[_Identity]) -> tuple[str, ...]:
    """The shortest labels that tell all lines apart."""
    named = [f"{one.method} ({one.name})" for one in of]
    choices = (
        [one.method for one in of],
        [_with_settings(one, of) for one in of],
        named,
        [f"{one.method} ({one.folder})" for one in of],
    )
    for names in choices:
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name} #{i + 1}" for i, name in enumerate(named))


def _with_settings(one: _Identity, of: Sequence[_Identity]) -> str:
    """The method, with the settings in which it differs from other lines of the same method."""
    alike = [other.settings for other in of if other.method == one.method]
    keys = [k for k in one.settings if any(o.get(k) != one.settings[k] for o in alike)]
    words = ", ".join(f"{k.rpartition('.')[2]} = {_value(one.settings[k])}" for k in keys)
    return f"{one.method} ({words})" if 0 < len(words) <= LONGEST else one.method


def _by_name(value: Any, files: Collection[str] | None = None) -> Any:
    """The value with paths of files cut to their names, since projects may be moved.

    files: the paths to look for in values. None: the value is a dict, whose keys are all paths.
    """
    match value:
        case dict() if files is None:
            return {os.path.basename(path): digest for path, digest in value.items()}
        case dict():
            return {key: _by_name(of, files) for key, of in value.items()}
        case list():
            return [_by_name(of, files) for of in value]
        case str() if files and {value, value.rpartition(":")[0]} & set(files):
            return os.path.basename(value)
    return value


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its whole key, as in "training.lr"."""
    for key, value in tables.items():
        inner = isinstance(value, dict)
        yield from _flat(value, f"{prefix}{key}.") if inner else [(prefix + key, value)]
