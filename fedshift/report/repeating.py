"""The report's part with the commands that give the same numbers again."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from fedshift.record.folder import CONFIG, Begun, RunResult
from fedshift.report.layout import note, section, table
from fedshift.report.pools import Pool
from fedshift.report.shapes import escape
from fedshift.report.tables import Table

# The page shows configuration and versions of so many lines. More would fill most of it.
MOST_FILES = 10


def repeating(lines: Sequence[Pool]) -> str:
    """The section with the command of every run, and the files of each line's first run."""
    parts = [note(_words(lines))]
    for line in lines:
        commands = "\n".join(map(_line, line.seeds, line.all))
        parts.append(f"<h3>{escape(line.label)}</h3><pre>{escape(commands)}</pre>")
    parts += [_files(line.label, line.all[0]) for line in lines[:MOST_FILES]]
    if sum(len(line.all) for line in lines) > len(lines[:MOST_FILES]):
        parts.append(note("The files of the other runs are in their folders."))
    return section("provenance", "The commands that repeat this", *parts)


def _line(seed: str, run: RunResult | Begun) -> str:
    """A run's command, with its seed or folder behind a #."""
    beside = [f"seed {seed}"] * bool(seed)
    beside += [f"folder: {run.folder}"] * ("call" in run.fit)
    return "  # ".join([command(run), *filter(None, [", ".join(beside)])])


def command(run: RunResult | Begun) -> str:
    """A command, or a call in Python, that gives the run's numbers again."""
    if run.deployed:
        return _of_federation(run)
    last = str(run.lock.get("backend", "loop")).rpartition(", then ")[2]
    name, _, processes = last.strip().partition(" in ")
    if "call" in run.fit:
        backend = "" if name == "loop" else f', backend="{name}"'
        if processes:
            backend += f", workers={processes.split()[0]}"
        return f"fs.fit({run.fit['call']}, seed={_seed(run.config)}{backend})"
    if isinstance(run, Begun):
        return shlex.join(["fedshift", "run", "--resume", str(run.folder)])
    words = ["fedshift", "run", str(run.folder / CONFIG)]
    words += [] if name == "loop" else ["--backend", name]
    words += ["--workers", processes.split()[0]] if processes else []
    return shlex.join(words)


def _of_federation(run: RunResult | Begun) -> str:
    """The server's command; it needs the same clients, with the same data."""
    served = str(run.deployed.get("command", ""))
    return f"{served} --resume {shlex.quote(str(run.folder))}" if isinstance(run, Begun) else served


def _seed(config: str) -> Any:
    return tomllib.loads(config).get("seeds", {}).get("run", 0)


def _words(lines: Sequence[Pool]) -> str:
    runs = [run for line in lines for run in line.all]
    text = "Each command gives the same numbers again with the versions of lock.json."
    if any(run.deployed for run in runs):
        text += (
            " The command of a federation does so once its clients have joined, as long as they "
            "have the same data and none drops out."
        )
    if any(run.deployed.get("dealt") for run in runs):
        text += (
            " Its clients take their examples from the data set of the experiment, so that "
            f"`fedshift run` of its {CONFIG} gives the same numbers in one process."
        )
    if any(isinstance(run, Begun) for run in runs):
        text += " With --resume, a run that is not complete goes on."
    if any("call" in run.fit for run in runs):
        text += (
            " fs.fit needs the same task, cut by the task's seed, and the same network and "
            "functions, which no file holds."
        )
    if any(", then " in str(run.lock.get("backend")) for run in runs):
        text += " A run went on by another backend than it began with; its last digits may differ."
    return text


def _files(name: str, run: RunResult | Begun) -> str:
    rows = tuple(_flat(run.lock))
    if isinstance(run, RunResult):
        rows = (("fedshift", run.summary.fedshift or ""), *rows)
    lock = table(Table(("Key", "Value"), rows, ("", "")))
    return (
        f"<details><summary>{escape(name)}: lock.json</summary>{lock}</details>"
        f"<details><summary>{escape(name)}: config.resolved.toml</summary>"
        f"<pre>{escape(run.config)}</pre></details>"
    )


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of nested objects, by the names that the file has."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
