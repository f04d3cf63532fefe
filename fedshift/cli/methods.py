"""The output of `methods`: a description of every method, or of one, independent of any run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from typing import Any

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import Method
from fedshift.cli.console import counted, say, show_json
from fedshift.client.local import Local
from fedshift.client.objectives import Scaled
from fedshift.client.sharing import Share
from fedshift.model import Model
from fedshift.models.dense import Mlp

HANG = len("    reference  ")
# Local steps of the stand-in. A phase with fewer steps is described as a share of these.
STEPS = 10
PLAIN = Local(steps=STEPS)
# Fields that define a method. The others come from the setting, or are options.
AXES = (
    "inner", "objective", "mix", "align", "match", "fisher", "collaborate", "mode", "local",
    "personal", "tune", "share", "combine", "server",
)  # fmt: skip


def example(recipe: recipes.Recipe) -> Method:
    """The recipe with its defaults on a stand-in model, in order to read its fields."""
    # 1,000 rounds, because methods that reserve rounds for tuning need more than these.
    net = Mlp((1,), (1,), 1)
    net.head.weight.requires_grad_(not recipe.traits.fixed_head)
    setting = recipes.Setting(Model(net), (1.0,), PLAIN, rounds=1000, clients=1)
    return recipe.make(setting, **recipe.traits.example)


def axes_used(algorithm: Method) -> list[str]:
    """The fields that differ from plain FedAvg, as "name: what", after the method's own rule.

    The rule is the first paragraph of its class's docstring, or of its extra's; none for FedAvg.
    """
    plain = isinstance(algorithm, FedAvg)
    own = algorithm.extras if isinstance(algorithm, FedAvg) else (algorithm,)
    rules = [axis for one in own for axis in (_rule(one), *_changed(one, algorithm))]
    return [*rules, *(_changed(algorithm, algorithm) if plain else ())] or [
        "none: the plain method"
    ]


def _rule(one: object) -> str:
    first = (inspect.getdoc(type(one)) or "").partition("\n\n")[0]
    return f"{type(one).__name__}: {' '.join(first.replace('`', '').split())}"


def _changed(one: Any, algorithm: Method) -> list[str]:
    # Some fields do not exist in FedAvg. They are compared with a plain phase.
    plain = vars(FedAvg(algorithm.model, local=PLAIN)) | {"personal": PLAIN, "tune": PLAIN}
    changes = []
    for field in fields(one):
        name, value = field.name, getattr(one, field.name)
        usual = plain.get(name, field.default)
        if name in AXES and value != usual and (value is not None or usual is not MISSING):
            changes.append(f"{name}: {_in_words(value)}")
    return changes


def _in_words(value: object) -> str:
    parts = getattr(value, "terms", None)
    if parts:
        return " + ".join(map(_in_words, parts))
    if isinstance(value, Scaled):
        return f"{value.scale:.4g} {_in_words(value.term)}"
    if isinstance(value, tuple):
        return ", then ".join(map(_in_words, value))
    if isinstance(value, Local):
        oracles = " and ".join(type(oracle).__name__ for oracle in value.oracles)
        return f"{_length(value)}{_moving(value)}{f', with {oracles}' if oracles else ''}"
    if isinstance(value, Share):
        return f"{_names(value.private)} stays on the client"
    if isinstance(value, FedAvg):
        return "; ".join(["FedAvg", *_changed(value, value)])
    if not is_dataclass(value):
        return "none" if value is None else str(value)
    inner, name = getattr(value, "weights", None), type(value).__name__
    return f"{name}({type(inner).__name__})" if inner is not None else name + _numbers(value)


def _numbers(value: Any) -> str:
    """A part's numbers that differ from their defaults, such as "(momentum=0.9)"."""
    values = {f.name: getattr(value, f.name) for f in fields(value)}
    values = {f.name: values[f.name] for f in fields(value) if values[f.name] != f.default}
    texts = [f"{k}={v:g}" for k, v in values.items() if type(v) in (int, float)]
    return f"({', '.join(texts)})" if texts else ""


def _length(phase: Local) -> str:
    """The length of a phase: as a share of the configured steps, or in epochs."""
    if phase.steps is None:
        return counted(phase.epochs or 1, "epoch")
    share = Fraction(phase.steps, STEPS)
    return "as long as [training] says" if share == 1 else f"{share} of the steps"


def _moving(phase: Local) -> str:
    if phase.only:
        return f" on {_names(phase.only)}"
    return f" on all but {_names(phase.frozen)}" if phase.frozen else ""


def _names(prefixes: Sequence[str]) -> str:
    return "the " + " and ".join(prefix.removesuffix(".") for prefix in prefixes)


def method_row(one: recipes.Recipe) -> dict[str, Any]:
    """A method: name, summary, reference, options, axes, what leaves a client, its page."""
    algorithm = example(one)
    return {
        "name": one.name,
        "summary": one.summary,
        "reference": one.reference,
        "note": one.note,
        "options": {k: _default(p.default) for k, p in one.options.items()},
        "axes": axes_used(algorithm),
        "reveals": dict(algorithm.reveals()),
        "page": one.page,
    }


def _default(value: object) -> object:
    return value if isinstance(value, str | int | float | None) else str(value)


def methods_listed(name: str | None, *, as_json: bool) -> None:
    """Print every method, or the one of this name. Raises InputError for an unknown one."""
    if name is not None:
        row = method_row(recipes.recipe(name))
        show_json(row) if as_json else _show(row)
        return
    rows = [method_row(one) for one in recipes.recipes()]
    if as_json:
        show_json(rows)
        return
    for row in rows:
        _show(row)


def _show(row: dict[str, Any]) -> None:
    options = ", ".join(f"{k} = {v}" for k, v in row["options"].items())
    leaves = "; ".join(text for part, text in row["reveals"].items() if part != "register")
    say(f"{row['name']}: {row['summary']}")
    say(f"    reference  {row['reference']}", HANG)
    say(f"    options    {options or 'none'}", HANG)
    say(f"    axes       {'; '.join(row['axes'])}", HANG)
    say(f"    leaves     registers {row['reveals']['register']}; each round {leaves}", HANG)
    if row["note"]:
        say(f"    note       {row['note']}", HANG)
    say(f"    page       {row['page']}", HANG)
