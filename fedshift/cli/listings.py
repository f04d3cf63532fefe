"""What `methods`, `datasets` and `diagnose` print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fedshift import datasets, recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.cli.console import say, show_json
from fedshift.client.local import Local
from fedshift.client.objectives import Scaled
from fedshift.client.sharing import Share
from fedshift.model import Model
from fedshift.models.dense import Mlp

HANG = len("    reference  ")
AXES = ("objective", "local", "share", "combine", "server")


def example(recipe: recipes.Recipe) -> Algorithm:
    """The recipe with its defaults on a stand-in for a model, to read its fields from."""
    model, local = Model(Mlp((1,), (1,), 1)), Local(epochs=None, steps=10)
    setting = recipes.Setting(model, (1.0,), local, rounds=1000, clients=1)
    needed = {"ess": 0.5} if "ess" in recipe.options else {}
    return recipe.make(setting, **needed)


def axes_used(algorithm: Algorithm) -> list[str]:
    """The fields that differ from plain FedAvg, as "name: type"."""
    if not isinstance(algorithm, FedAvg):
        return [type(algorithm).__name__]
    plain = FedAvg(algorithm.model, local=Local(epochs=None, steps=10))
    changed = [a for a in AXES if getattr(algorithm, a) != getattr(plain, a)]
    return [f"{a}: {_shown(getattr(algorithm, a))}" for a in changed] or ["none: the plain method"]


def _shown(value: object) -> str:
    parts = getattr(value, "terms", None)
    if parts:
        return " + ".join(map(_shown, parts))
    if isinstance(value, Scaled):
        return f"{value.scale:.4g} {_shown(value.term)}"
    if isinstance(value, tuple):
        return ", then ".join(map(_shown, value))
    if isinstance(value, Local) and (value.only or value.frozen):
        moving = f"only {list(value.only)}" if value.only else f"all but {list(value.frozen)}"
        return f"{value.steps or value.epochs} {'steps' if value.steps else 'epochs'} of {moving}"
    inner = getattr(value, "weights", None)
    name = type(value).__name__
    if isinstance(value, Share):
        return f"private {list(value.private)}"
    return f"{name}({type(inner).__name__})" if inner is not None else name


def method_rows() -> list[dict[str, Any]]:
    """Every method as a row: name, summary, reference, options, axes, what leaves a client."""
    rows = []
    for one in recipes.recipes():
        algorithm = example(one)
        rows.append(
            {
                "name": one.name,
                "summary": one.summary,
                "reference": one.reference,
                "note": one.note,
                "options": {k: _default(p.default) for k, p in one.options.items()},
                "axes": axes_used(algorithm),
                "reveals": dict(algorithm.reveals()),
            }
        )
    return rows


def _default(value: object) -> object:
    return value if isinstance(value, str | int | float | None) else str(value)


def methods_listed(*, as_json: bool) -> None:
    """Print every method."""
    rows = method_rows()
    if as_json:
        show_json(rows)
        return
    for row in rows:
        options = ", ".join(f"{k} = {v}" for k, v in row["options"].items())
        say(f"{row['name']}: {row['summary']}")
        say(f"    reference  {row['reference']}", HANG)
        say(f"    options    {options or 'none'}", HANG)
        say(f"    axes       {'; '.join(row['axes'])}", HANG)
        leaves = f"registers {row['reveals']['register']}; each round {_leaves(row)}"
        say(f"    leaves     {leaves}", HANG)
        if row["note"]:
            say(f"    note       {row['note']}", HANG)


def _leaves(row: dict[str, Any]) -> str:
    parts = row["reveals"]
    return "; ".join(parts[k] for k in parts if k != "register")


def datasets_listed(*, as_json: bool) -> None:
    """Print the known data sets."""
    rows = datasets.known()
    if as_json:
        show_json(
            [{k: str(v) if isinstance(v, Path) else v for k, v in vars(r).items()} for r in rows]
        )
        return
    for r in rows:
        place = f"found in {r.found}" if r.found else ("generated" if r.available else "not found")
        say(f"{r.name}: {r.summary}")
        print(f"    {place}")
        say(f"    size     {r.size}; {len(r.classes)} classes", HANG - 2)
        say(f"    licence  {r.licence}", HANG - 2)
        if not r.available:
            say(f"    get it   {r.how}", HANG - 2)


def fetch_dataset(name: str, folder: Path | None, *, as_json: bool) -> None:
    """Download a data set with progress on stderr, and print where it is."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(name, total=None)

        def progress(done: int, total: int | None) -> None:
            bars.update(task, completed=done, total=total)

        place = datasets.fetch(name, folder, progress=progress)
    if as_json:
        show_json({"name": name, "folder": str(place)})
    else:
        print(f"{name}: {place}")
