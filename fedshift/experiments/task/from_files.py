"""The parts of an experiment that its file names: a source of data, a method, metrics.

Building them runs the Python that the file names. Merely reading a configuration does not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fedshift import recipes
from fedshift.algorithms.method import Method as Algorithm
from fedshift.arguments import is_number, members
from fedshift.data import Examples
from fedshift.errors import InputError, nearest, shown
from fedshift.experiments.config.custom import Custom
from fedshift.experiments.config.python_names import digest_of, is_python, load_python
from fedshift.experiments.config.schema import Config, Method
from fedshift.experiments.measures.custom_metrics import check_metrics
from fedshift.experiments.task.custom_data import facts_on, prepare_built
from fedshift.experiments.task.custom_source import note_in_file_words, task_of
from fedshift.experiments.task.prepared import Prepared
from fedshift.experiments.task.server_rows import about_rows, lost_labels, set_apart, validating
from fedshift.record.folder import FIT
from fedshift.tasks.task import Task


def custom_of(config: Config) -> Custom:
    """The method and the metrics that a file names, if any.

    Raises InputError for a name without a function, and for options that the function lacks.
    """
    metrics = {}
    for name in config.metrics.extra:
        named = load_python("metrics.extra", name)
        metrics[name.rpartition(":")[2]] = partial(named.call, _is_number)
    try:
        check_metrics(metrics)
    except InputError as e:
        raise InputError(f"metrics.extra: {str(e).removeprefix('metrics: ')}") from None
    return Custom(method=_method(config.method), metrics=metrics, files=files_of(config))


def _method(section: Method) -> recipes.Recipe | None:
    if not is_python(section.name):
        return None
    named = load_python("method.name", section.name)
    try:
        recipe = recipes.made_by(named.value)
    except InputError:
        raise InputError(
            f"{named.where} ({named.path}, line {named.line}): expected {named.expects}"
        ) from None
    for key in section.options:
        if key not in recipe.options:
            allowed = ["name", *recipe.options]
            raise InputError(
                f"method.{shown(key)}: {recipe.name} in {named.path} has no such keyword-only "
                f"argument; allowed: {', '.join(allowed)}.{nearest(key, allowed)}"
            )
    if section.options.get("ess") == "auto" and not {"ess", "lam"} <= recipe.options.keys():
        raise InputError(
            'method.ess = "auto" tries values of the options ess and lam, and '
            f"{recipe.name} in {named.path} has not both; give ess a number"
        )
    return replace(recipe, make=partial(named.call, _is_algorithm))


def _is_number(value: object) -> bool:
    return is_number(value) or getattr(value, "ndim", None) == 0


def _is_algorithm(value: object) -> bool:
    return all(hasattr(value, name) for name in members(Algorithm))


def prepare_source(config: Config, custom: Custom, task: Task | None = None) -> Prepared:
    """The prepared experiment on the data that `data.source` names.

    task: these data, if they have been read already. Raises InputError or DataError.
    """
    wanted, seed = config.server, config.seeds.resolved().split
    whole = task_of(config.data, seed) if task is None else task
    task, apart = set_apart(whole, wanted, seed)
    built = task.build()
    labelled = validating(whole, apart.validation, built.task.target.numpy(), seed)
    notes = tuple(map(note_in_file_words, built.notes)) + about_rows(apart, len(labelled))
    notes += lost_labels(whole, task, wanted) if task.kind == "classification" else ()
    if len(labelled):
        y = torch.from_numpy(task.labels.codes[labelled]).long()
        examples = Examples(built.encoding.encoded(task.inputs, labelled), y)
        built = replace(built, task=replace(built.task, target_validation=examples))
    custom = replace(custom, texts={FIT: facts_on(built, notes)}, notes=notes, task=task)
    prepared = prepare_built(config, built, custom=custom)
    rows = apart.unlabeled
    inputs = built.encoding.encoded(task.inputs, rows) if len(rows) else None
    return replace(prepared, server_inputs=inputs)


def files_of(config: Config) -> dict[str, str]:
    """SHA-256 by path of every file that the configuration names, and of Python beside it."""
    data, model = config.data, config.model
    names = [
        ("data.source", data.source or ""),
        ("model.name", model.name),
        ("method.name", config.method.name),
        *(("metrics.extra", name) for name in config.metrics.extra),
    ]
    files: dict[str, str] = {}
    for key, name in names:
        if is_python(name):
            files |= load_python(key, name).files
    for path in (data.source, data.index, data.target, model.weights):
        if isinstance(path, str) and (digest := digest_of(Path(path))) is not None:
            files[path] = digest
    return dict(sorted(files.items()))
