"""The plan of `fedshift compare FILE.toml`: methods from --methods, and grids from -c."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from fedshift.errors import InputError, shown
from fedshift.experiments.config.custom import recipe_of
from fedshift.experiments.config.load import load_with_source
from fedshift.experiments.config.places import Source
from fedshift.experiments.config.python_names import is_python
from fedshift.experiments.config.schema import Config, Data
from fedshift.experiments.task.custom_source import task_of
from fedshift.experiments.task.from_files import custom_of, files_of
from fedshift.recipes import Recipe, fitting
from fedshift.sweeps.plan import Contender, Plan, Point, check_choosing, check_metric, seeded
from fedshift.sweeps.spans import values_of
from fedshift.sweeps.store import Run, run_of
from fedshift.sweeps.targets import about_targets, targets_of

# Keys that the command sets itself, and the options that it sets them from.
TAKEN = {"method.name": "--methods", "seeds.run": "--seeds"}
METHOD = "method."
# Sections on which the clients and the target depend.
POPULATION = ("data.", "shift.", "server.", "seeds.")
Values = Mapping[str, tuple[str, ...]]


def plan_of(
    file: Path,
    methods: Sequence[str],
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    *,
    vary: str = "training",
    base: str = "",
    metric: str | None = None,
    targets: Sequence[str] | None = None,
) -> tuple[Plan, Source]:
    """(the runs of an experiment file by each method, a Source that says where a key was set).

    overrides  as `section.key=value`; if one lists several values, each is tried. Options of a
               method apply to the methods that have them
    methods    names of recipes, or FILE.py:NAME; empty for the file's own method
    targets    with vary "target": the clients to hold out in turn; None for all

    Raises InputError for a configuration that is not valid, and for a grid without validation
    examples.
    """
    values = dict(map(values_of, overrides))
    _check_values(values)
    shared = [f"{key}={value[0]}" for key, value in values.items() if not key.startswith(METHOD)]
    config, source = load_with_source(file, shared)
    check_metric(metric, (extra.rpartition(":")[2] for extra in config.metrics.extra))
    typed = [text.strip("\"'") for text in values.get(f"{METHOD}weights", ())]
    weights = typed or config.method.options.get("weights")
    made = [(name, _recipe(file, name, weights)) for name in methods or [config.method.name]]
    _check_used(values, made)
    names, about = _targets(config.data, seeds, vary, targets)
    in_file = {METHOD + option for option in config.method.options}
    contenders = tuple(
        Contender(
            recipe.name,
            tuple(
                Point(label, _runs(one, seeds, vary, names))
                for label, one in _points(file, name, recipe, _chosen(recipe, values, in_file))
            ),
        )
        for name, recipe in made
    )
    units = tuple(range(len(names))) if names else tuple(seeds)
    rule = config.selection.rule
    plan = Plan(config.name, contenders, units, vary, base, metric, rule, names, about)
    if plan.has_grid:
        check_choosing(config)
    return plan, source


def _check_values(values: Values) -> None:
    """Raise InputError for keys that compare sets itself, and for a grid over data or clients."""
    for key, instead in TAKEN.items():
        if key in values:
            raise InputError(f"-c {key}: compare sets it itself; use {instead}")
    for key, listed in values.items():
        if len(listed) > 1 and key.startswith(POPULATION):
            raise InputError(
                f"-c {key} lists {len(listed)} values, and settings are chosen among on one "
                "population; compare once for each value, with an --out of its own"
            )


def _recipe(file: Path, name: str, weights: str | list[str] | None) -> Recipe:
    """A method by its name, with client weights of that name, or by FILE.py:NAME, which is run."""
    if not is_python(name):
        first, _, options = name.partition(":")
        if options:
            raise InputError(
                f'--methods "{shown(name)}": give {first}, and its options by -c, as in '
                f"-c method.{shown(options)}"
            )
        return fitting(name, {"weights": weights})
    config, _ = load_with_source(file, [f"method.name={name}"])
    return recipe_of(config.method, custom_of(config))


def _check_used(values: Values, made: Sequence[tuple[str, Recipe]]) -> None:
    """Raise InputError for an option that none of the methods has."""
    allowed = {f"{METHOD}{k}" for _, one in made for k in one.options}
    for key in values:
        if key.startswith(METHOD) and key not in allowed:
            listed = ", ".join(sorted(allowed)) or "no options"
            names = ", ".join(name for name, _ in made)
            raise InputError(f"-c {key}: none of {names} has it; they have {listed}")


def _chosen(recipe: Recipe, values: Values, in_file: set[str]) -> Values:
    """The values, with ess = "auto" added for a method that can choose it, unless it is given."""
    given = values.keys() | in_file
    if recipe.traits.auto_ess and not given & {f"{METHOD}ess", f"{METHOD}lam"}:
        return {**values, f"{METHOD}ess": ("auto",)}
    return values


def _targets(
    data: Data, seeds: Sequence[int], vary: str, targets: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the clients that are held out in turn, sentences on them)."""
    if vary != "target":
        if targets is not None:
            raise InputError("--targets is for --vary target; add that, or leave --targets out")
        return (), ()
    if len(seeds) > 1:
        raise InputError(
            "--vary target pairs differences by target, and there is one seed; give --seeds 0, or "
            "leave it out"
        )
    if data.source is None:
        raise InputError(
            "--vary target holds out one client after the other of your data; set data.source to a "
            'table, a folder, or "natural"'
        )
    # Each target takes the place of the file's, so the file may leave it out.
    whole = data.model_copy(update={"target": data.target or "pooled"})
    task = task_of(whole, seeds[0])
    names = targets_of(task, targets)
    return names, about_targets(task, names)


def _runs(
    config: Config, seeds: Sequence[int], vary: str, targets: Sequence[str]
) -> dict[int, Run]:
    """A setting's run for every seed, or for every target."""
    # The identity of a run includes the contents of its files, but not where they are.
    files = files_of(config)
    sums = sorted((os.path.basename(path), digest) for path, digest in files.items())
    beside = json.dumps(sums) if sums else ""
    if targets:
        first = seeded(config.seeds, seeds[0], "training")
        data = [config.data.model_copy(update={"target": name}) for name in targets]
        changes = {i: {"seeds": first, "data": one} for i, one in enumerate(data)}
    else:
        changes = {s: {"seeds": seeded(config.seeds, s, vary)} for s in seeds}
    made = {unit: config.model_copy(update=change) for unit, change in changes.items()}
    return {unit: run_of(one, beside) for unit, one in made.items()}


def _points(file: Path, name: str, recipe: Recipe, values: Values) -> Iterator[tuple[str, Config]]:
    """A method's settings, (label, configuration): all combinations of the values that it takes."""
    options = {METHOD + option for option in recipe.options}
    of = {k: v for k, v in values.items() if not k.startswith(METHOD) or k in options}
    for chosen in product(*of.values()):
        given = dict(zip(of, chosen, strict=True))
        pairs = [f"method.name={name}", *(f"{key}={value}" for key, value in given.items())]
        try:
            config, _ = load_with_source(file, pairs)
        except InputError as e:  # in the words of the command line
            raise InputError(str(e).replace("-c method.name", f"--methods {name}")) from None
        label = ", ".join(f"{_short(k, of)}={v}" for k, v in given.items() if len(of[k]) > 1)
        yield label, config


def _short(key: str, keys: Values) -> str:
    """ "lr" for "training.lr", unless another section has a key "lr", too."""
    last = key.rpartition(".")[2]
    return last if [k.rpartition(".")[2] for k in keys].count(last) == 1 else key
