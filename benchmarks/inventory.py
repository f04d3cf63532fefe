"""All that users can name, sorted, an item a line, of any source tree.

python benchmarks/inventory.py TREE [LIST] [--compact]

Names of `fedshift` and of the pages, with arguments and attributes; commands, options, their
values; keys of experiment files; methods, data sets, networks, tables; files of small runs, with
columns and keys; exit codes, extras, variables, how-to tasks. What cannot be read is an item
"unread". LIST: an earlier compact list, whose names are looked up even where no page has them any
more. --compact: one line for all items that differ in their last word alone.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Where things are, in the order tried.
APP = ("fedshift.cli.app.app", "fedshift.cli.app")
SCHEMA = ("fedshift.experiments.config.schema.Config", "fedshift.spec.Experiment")
SMALL = """
data = {name = "fashion-mnist-mini", limit = 300}
model.name = "linear"
training = {rounds = 3, steps = 1, batch = 4, cohort = 4}
"""
ROWS = """
data = {source = "rows.csv", client = "site", label = "y", target = "0", kind = "regression"}
model.name = "linear"
training = {rounds = 1, steps = 1, batch = 4}
"""
RUNS = (
    (SMALL, "compare f.toml --methods fedavg,fedpals --seeds 0-1 --jobs 1"),
    (SMALL, "run f.toml -c training.prior=calibrated --profile"),
    (SMALL, "run f.toml -c method.name=feddrm -c shift.target=clients -c shift.noise=0.1 "
            "-c model.name=lenet-gn-small"),
    (SMALL, "run f.toml -c method.name=labelset_fedavg"),
    (SMALL, "run f.toml -c method.name=feddisk -c method.density_rounds=1 "
            "-c method.weighing_rounds=1"),
    (ROWS, "run f.toml"),
)  # fmt: skip


def resolved(*paths: str) -> Any:
    """The object of the first of these dotted paths that there is; None if there is none."""
    for path in paths:
        parts = path.split(".")
        # The whole path last: a name goes before a module that is called so.
        for cut in (*range(len(parts) - 1, 0, -1), len(parts)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    thing = importlib.import_module(".".join(parts[:cut]))
                    for name in parts[cut:]:
                        thing = getattr(thing, name)
                return thing
            except (ImportError, AttributeError):
                continue
    return None


def documented(tree: Path) -> dict[str, str]:
    """Dotted paths in the reference, with the options there; and those that pages import."""
    pages = [tree / "README.md", *(tree / "docs").rglob("*.md"), *(tree / "examples").rglob("*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    imports = re.findall(r"^ *from (fedshift\S*) import (?:\(([^)]*)\)|(.*))", text, re.M)
    paths = {f"{a}.{n}": "" for a, *b in imports for n in re.findall(r"\w+", "".join(b))}
    return paths | dict(re.findall(r"^::: ([\w.]+)((?:\n +.*)*)", text, re.M))


def arguments(path: str, thing: Any) -> Iterator[str]:
    try:
        given = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return
    yield from (f"argument {path} {name}" for name in given if name not in ("self", "cls"))


def names(tree: Path, earlier: dict[str, list[str]]) -> Iterator[str]:
    package, pages = importlib.import_module("fedshift"), documented(tree)
    public = {f"fedshift.{name}" for name in package.__all__}
    for path in {*public, *pages, *earlier.get("name", ())}:
        if (thing := resolved(path)) is None:
            continue
        yield f"name {path}"
        yield from arguments(path, thing) if callable(thing) else ()
        # Of a class, what the reference shows of it: these members, or all.
        shown = re.findall(r"members:(.*)", pages.get(path, ""))
        some = {*earlier.get(f"attribute {path}", ()), *re.findall(r"\w+", "".join(shown))}
        for name in dir(thing) if inspect.isclass(thing) else ():
            homes = [c.__module__ for c in thing.__mro__ if name in vars(c)]
            ours = homes and homes[0].startswith("fedshift") and not name.startswith("_")
            if ours and (name in some or (path in public and not shown)):
                yield f"attribute {path} {name}"
                member = getattr(thing, name)
                yield from arguments(f"{path}.{name}", member) if callable(member) else ()


def commands(command: Any, path: str = "") -> Iterator[str]:
    for one in command.params:
        for word in [*one.opts, *one.secondary_opts]:
            yield f"command{path} {word}"
        for choice in getattr(one.type, "choices", ()):
            yield f"value{path} {one.opts[0]} {getattr(choice, 'value', choice)}"
    context = command.make_context("fedshift", [], resilient_parsing=True)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield f"command{path} {name}"
        yield from commands(command.get_command(context, name), f"{path} {name}")


def keys(schema: dict[str, Any], defs: dict[str, Any], path: str = "") -> Iterator[str]:
    if ref := schema.get("$ref"):
        yield from keys(defs[ref.rpartition("/")[2]], defs, path)
    yield from (f"value {path} {value}" for value in schema.get("enum", ()))
    for part in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from keys(part, defs, path)
    for name, inner in schema.get("properties", {}).items():
        yield f"key {path}.{name}".replace(" .", " ")
        yield from keys(inner, defs, f"{path}.{name}".lstrip("."))


def said(*words: str) -> str:
    """What a command prints; it is called in this process."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(resolved(*APP), list(words))
    return f"{result.output} {result.exception or ''}"


def listed() -> Iterator[str]:
    for method in json.loads(said("methods", "--format", "json")):
        yield f"method {method['name']}"
        yield from (f"option {method['name']}.{name}" for name in method["options"])
    for kind, command in (("dataset", "datasets"), ("table", "reproduce")):
        yield from (
            f"{kind} {one['name']}" for one in json.loads(said(command, "--format", "json"))
        )
    Path("f.toml").write_text('model.name = "none"', encoding="utf-8")
    allowed = said("run", "f.toml").partition("allowed")[2].partition("FILE.py")[0]
    yield from (
        f"network {name}" for name in re.findall(r"[a-z][\w-]{2,}", allowed) if name != "are"
    )


def fields(value: Any, path: str) -> Iterator[str]:
    """Keys of JSON, a list's being those of all its entries; "*" for those that data name."""
    for one in value if isinstance(value, list) else [value]:
        for name, inner in one.items() if isinstance(one, dict) else ():
            deeper = f"{path}{'*' if re.search(r'[ =%/]|^[0-9]', name) else name}"
            yield deeper
            yield from fields(inner, f"{deeper}.")


def files() -> Iterator[str]:
    """The files of small runs, with the columns of tables and the keys of JSON in them."""
    rows = "".join(f"{i % 3},{i % 7},{i % 5}\n" for i in range(90))
    for i, (text, command) in enumerate(RUNS):
        Path("rows.csv").write_text(f"site,x,y\n{rows}", encoding="utf-8")
        Path("f.toml").write_text(text, encoding="utf-8")
        answer = said(*command.split(), "--out", str(i))
        if not any(Path(str(i)).rglob("summary.json")):
            yield f"unread {command}: {' '.join(answer.split())[-200:]}"
        for file in Path(str(i)).rglob("*.*"):
            yield f"file {file.name}"
            if file.suffix == ".csv":
                line = next(csv.reader(file.read_text(encoding="utf-8").splitlines()))
                yield from (f"column {file.name} {re.sub('^label_.*', 'label_*', c)}" for c in line)
            if file.suffix == ".json":
                yield from fields(json.loads(file.read_text()), f"field {file.name} ")
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else ()
            for event in map(json.loads, lines):
                yield from fields({event["event"]: event}, f"field {file.name} ")


def texts(tree: Path) -> Iterator[str]:
    """What the project's files say: extras, variables, exit codes, how-to tasks."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    yield from (f"extra {name}" for name in project["optional-dependencies"])
    code = "".join(p.read_text(encoding="utf-8") for p in tree.glob("fedshift*/**/*.py"))
    yield from (f"variable {name}" for name in re.findall(r"\"(FEDSHIFT_[A-Z_]+)\"", code))
    for name, kind in vars(importlib.import_module("fedshift.errors")).items():
        yield from [f"exit {name} {kind.exit_code}"] if hasattr(kind, "exit_code") else []
    for page in (tree / "docs" / "how-to").glob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for title in re.findall(r"^##? (.+)$", text, re.M):
            yield f"how-to {page.name} {re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"


def inside(tree: Path, earlier: dict[str, list[str]]) -> Iterator[str]:
    """All items of a tree, from which this process imports fedshift."""
    import typer

    for read in (
        lambda: names(tree, earlier),
        lambda: commands(typer.main.get_command(resolved(*APP))),
        lambda: keys((schema := resolved(*SCHEMA).model_json_schema()), schema["$defs"]),
        listed,
        files,
        lambda: texts(tree),
    ):
        try:
            yield from read()
        except Exception as error:  # a tree may have moved anything
            yield f"unread {type(error).__name__}: {error}"


def main() -> None:
    """Read the tree in a process of its own, in an empty folder."""
    tree, *rest = sys.argv[1:]
    if tree == "--inside":
        groups = (line.partition(": ") for line in sys.stdin.read().splitlines())
        earlier = {group: words.split() for group, _, words in groups}
        print("\n".join(sorted(set(inside(Path(rest[0]), earlier)))))
        return
    given = "".join(Path(name).read_text() for name in rest if name != "--compact")
    root, here = str(Path(tree).resolve()), str(Path(__file__).resolve())
    env = {**os.environ, "PYTHONPATH": root, "COLUMNS": "1000", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, here, "--inside", root], cwd=place, env=env, input=given, check=True,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    if "--compact" not in rest:
        print(done.stdout, end="")
        return
    for group, items in itertools.groupby(done.stdout.splitlines(), lambda s: s.rpartition(" ")[0]):
        print(f"{group}:", *(item.rpartition(" ")[2] for item in items))


if __name__ == "__main__":
    main()
