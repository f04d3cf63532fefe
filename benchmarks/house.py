"""The package before and after its rooms were put in order: lines, files, and what was measured.

    python benchmarks/house.py [--now COMMIT] [--measured 'NAME=BEFORE,NOW' ...] [--write]

Lines, files and functions are counted in two commits of this repository. What a clock or a walk
says stands in results/benchmarks/house.json. `--measured` puts a value there, as in --measured
'`make test`, seconds of processor time=565,147'; - stands for no value. Ratios of time are those
of results/commits.md. `--write` writes results/house.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "house.md"
RATIOS = ROOT / "results" / "commits.md"
MEASURED = ROOT / "results" / "benchmarks" / "house.json"
BEFORE = "f00c906"
Sources = Mapping[str, str]


@dataclass(frozen=True)
class Room:
    """Files of the package, by a pattern of their paths, and the lines that the plan gave them.

    budget: None for a room that was not there then.
    """

    name: str
    pattern: str
    budget: int | None = None


# The first pattern that matches a path counts. Budgets are those of the plan for this step.
ROOMS = (
    Room(
        "papers",
        r"papers/|experiments/(papers|reproduce)/|cli/reproduce"
        r"|datasets/(retina|pacs|iwildcam|heart|gaussians|sheet)\.py",
        5840,
    ),
    Room("tree, seeds, errors, files", r"(tree|seeds|errors|files|__init__|__main__)\.py", 490),
    Room("data, model, pooled", r"(data|model|pooled)\.py", 580),
    Room(
        "kernels",
        r"kernels/|(pooling|stateless|layout)\.py|client/products|engine/(allocator|levers)",
        400,
    ),
    Room("client/dense", r"client/(dense|chains|nets|winograd)", 480),
    Room("client", r"client/", 1700),
    Room("server", r"server/", 2700),
    Room("algorithms", r"algorithms/", 2580),
    Room("recipes", r"recipes/", 1180),
    Room("evaluation", r"evaluation/|engine/(serving|evaluate)\.py", 440),
    Room("engine", r"engine/", 3380),
    Room("diagnose, diagnosis, verdict, audit", r"(diagnose|diagnosis|verdict|audit)\.py", 820),
    Room("shifts, models, router", r"(shifts|models|router)/", 3530),
    Room("datasets", r"datasets/", 2250),
    Room("experiments/sites", r"experiments/sites/"),
    Room("experiments, record", r"(experiments|record)/|report/run_folder", 4590),
    Room("flower, deploy", r"(flower|deploy)/", 3120),
    Room("report", r"report/", 2130),
    Room("cli/init, first files", r"cli/(init|first_files|comparing|many_runs)\.py"),
    Room("cli", r"cli/", 1620),
    Room("testing", r"testing/", 770),
    Room("tasks", r"tasks/"),
    Room("fitting", r"fitting/"),
    Room("sweeps", r"sweeps/"),
    Room("arguments, calls, real, sketch", r"(arguments|calls|real|sketch)\.py"),
    Room("randomness, repeating, outputs", r"(randomness|repeating|outputs|modules|examples)\.py"),
    Room("other files", r"\w+\.py"),
)
# Lines of package code that later work was given beyond this step's 33,500.
LATER = {
    "your data: tasks, one call, many runs": 4500,
    "documentation, pictures, reports": 800,
    "real machines": 2200,
    "correction of the prior, weights of examples, baselines": 2000,
    "label sets and densities": 1300,
}
CORE_PLANNED, PAPERS_PLANNED = 33_500, 6000


def room_of(path: str) -> str:
    """The room that a file of the package is counted in, by its path below fedshift/."""
    return next(room.name for room in ROOMS if re.match(room.pattern, path))


def sources(commit: str, *places: str) -> Sources:
    """The Python of a commit, by path."""
    done = subprocess.run(
        ["git", "archive", commit, *places], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")]
        files = {m.name: archive.extractfile(m) for m in members}
        return {name: file.read().decode() for name, file in files.items() if file}


def tracked(commit: str) -> list[str]:
    """The files of a commit."""
    command = ["git", "ls-tree", "-r", "--name-only", commit]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def lines_by_room(files: Sources) -> dict[str, int]:
    """Lines of the package by room."""
    lines = dict.fromkeys((room.name for room in ROOMS), 0)
    for path, text in files.items():
        lines[room_of(path.removeprefix("fedshift/"))] += text.count("\n")
    return lines


def takers_of_config(files: Sources) -> int:
    """How many functions take the whole configuration of an experiment."""
    return sum(
        any(
            one.annotation and re.fullmatch(r"Config( \| None)?", ast.unparse(one.annotation))
            for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
        for text in files.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def counts(commit: str) -> tuple[dict[str, int], dict[str, int]]:
    """(rows of the table, lines by room) of a commit."""
    package, tests, files = sources(commit, "fedshift"), sources(commit, "tests"), tracked(commit)
    rooms = lines_by_room(package)
    whole = sum(rooms.values())
    rows = {
        "lines of the package": whole,
        "of them core": whole - rooms["papers"],
        "of them papers": rooms["papers"],
        "lines of tests": sum(text.count("\n") for text in tests.values()),
        "tracked files": len(files),
        "of them results": sum(f.startswith(("results/", "docs/results/")) for f in files),
        "functions that take the whole configuration": takers_of_config(package),
    }
    return rows, rooms


def cell(value: float | None) -> str:
    """A number as it is written in the table."""
    return "not measured" if value is None else f"{value:,}"


def ratios(page: str) -> dict[str, list[float | None]]:
    """Rows of times by workload, before as 1, from the table of results/commits.md."""
    rows = re.findall(r"^\| (W\w+) \| ([\w-]+) \|(?: \w+ \|){3} ([\d.]+) \|", page, re.M)
    times = {f"{name}, {backend}": [1, float(ratio)] for name, backend, ratio in rows}
    return {f"processor time of a round of {row}, before as 1": both for row, both in times.items()}


Numbers = Mapping[str, int]
Pairs = Mapping[str, Sequence[float | None]]


def features(source: str) -> list[str]:
    """Rows of what a stranger adds, of which tests/recipes/test_strangers.py has the code."""
    code = {
        node.targets[0].id: node.value.value.strip().count("\n") + 1
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    lines = {name: n for name, n in code.items() if name in ("RECIPE", "TERM", "BACKEND")}
    row = "`tests/support/every_method.py`"
    return [
        f"| a method of parts that are there | a file of `recipes/`, {lines['RECIPE']} lines; "
        f"{row}, 1 line | 2 lines |",
        f"| a loss term | `client/objectives.py`, {lines['TERM']} lines; {row}, 2 lines | none |",
        f"| a backend | a module, {lines['BACKEND']} lines; "
        "`engine/backend_names.py`, 1 line | none |",
    ]


def growth(then: Numbers, now: Numbers) -> tuple[int, int]:
    """(lines in rooms that were not there, more lines in those that were), without papers."""
    core = [room for room in ROOMS if room.name != "papers"]
    new = sum(now[room.name] for room in core if not then[room.name])
    return new, sum(now[room.name] - then[room.name] for room in core if then[room.name])


def grown(then: Numbers, now: Numbers) -> str:
    """The five rooms that were there and have grown most, in words."""
    core = [room.name for room in ROOMS if room.name != "papers" and then[room.name]]
    most = sorted(core, key=lambda name: then[name] - now[name])[:5]
    return "; ".join(f"{name} by {now[name] - then[name]:,}" for name in most)


def page(commit: str, rows: tuple[Numbers, Numbers], rooms: tuple[Numbers, Numbers],
         measured: Pairs) -> str:  # fmt: skip
    """results/house.md."""
    new, more = growth(*rooms)
    later = sum(LATER.values())
    core = rows[1]["of them core"]
    table = [f"| {name} | {cell(rows[0][name])} | {cell(rows[1][name])} |" for name in rows[0]]
    table += [f"| {name} | {cell(a)} | {cell(b)} |" for name, (a, b) in measured.items()]
    by_room = [
        f"| {room.name} | {'none' if room.budget is None else f'{room.budget:,}'} "
        f"| {rooms[0][room.name]:,} | {rooms[1][room.name]:,} |"
        for room in ROOMS
    ]
    budgets = [f"| {name} | {lines:,} |" for name, lines in LATER.items()]
    text = [
        "# The house, before and after",
        "",
        f"Counted in commits {BEFORE} and {commit} by `python benchmarks/house.py --write`. What a "
        "clock or a walk says is in [house.json](benchmarks/house.json).",
        "",
        "| | before | now |",
        "| --- | ---: | ---: |",
        *table,
        "",
        "The walks are listed in [the map](../ARCHITECTURE.md), and tests compare them. Intervals "
        "of the times are on [a page of their own](commits.md).",
        "",
        "## What a stranger touches",
        "",
        "By `tests/recipes/test_strangers.py`, which adds each to a copy and runs tests there.",
        "",
        "| to add | files of code, and lines | lines of documentation |",
        "| --- | --- | --- |",
        *features((ROOT / "tests" / "recipes" / "test_strangers.py").read_text()),
        "",
        "## Lines of the core",
        "",
        f"The core has {core:,} lines; the plan gave it {CORE_PLANNED:,}. It is above by "
        f"{core - CORE_PLANNED:,}.",
        "",
        f"- {new:,} lines are in rooms that did not exist before.",
        f"- {more:,} lines are what rooms that did exist have grown by. Those that grew most: "
        f"{grown(*rooms)}.",
        f"- Later work had {later:,} lines of its own, as the last table says. With them the plan "
        f"comes to {CORE_PLANNED + later:,}, and {core - CORE_PLANNED - later:,} are above it. "
        "Refusals of wrong use came later, too, without a budget.",
        "",
        "| room | budget | before | now |",
        "| --- | ---: | ---: | ---: |",
        *by_room,
        "",
        "| later work | lines planned |",
        "| --- | ---: |",
        *budgets,
        "",
        f"Papers have {rows[1]['of them papers']:,} lines; the plan gave them {PAPERS_PLANNED:,}. "
        "Tables and figures that came later had 1,300 more.",
    ]
    return "\n".join(text) + "\n"


def with_given(measured: Pairs, given: Sequence[str]) -> dict[str, list[float | None]]:
    """The measured values, with those of the command line: NAME=BEFORE,NOW; - for no value."""
    values = {name: list(pair) for name, pair in measured.items()}
    for text in given:
        name, _, pair = text.rpartition("=")
        both = [None if one == "-" else json.loads(one) for one in pair.split(",")]
        if len(both) != 2 or not name:
            raise SystemExit(f"--measured '{text}': write 'NAME=BEFORE,NOW', and - for no value")
        values[name] = both
    return values


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--now", default="HEAD")
    parser.add_argument("--measured", action="append", default=[], metavar="NAME=BEFORE,NOW")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    name = ["git", "rev-parse", "--short=7", options.now]
    commit = subprocess.run(name, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    measured = with_given(json.loads(MEASURED.read_text()), options.measured)
    (before, rooms_before), (now, rooms_now) = counts(BEFORE), counts(options.now)
    times = ratios(RATIOS.read_text())
    text = page(commit.strip(), (before, now), (rooms_before, rooms_now), {**measured, **times})
    if options.write:
        MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
