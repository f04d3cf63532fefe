"""Turning a task, a network and a method into an ordinary experiment."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.method import Method as Algorithm
from fedshift.arguments import called, check_whole
from fedshift.client.objectives import Term
from fedshift.errors import InputError
from fedshift.experiments.config.custom import Custom, Metric
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import PYTHON, Config, Training
from fedshift.experiments.measures.custom_metrics import check_metrics
from fedshift.experiments.task.custom_data import facts_on, prepare_built
from fedshift.experiments.task.custom_loss import loss_term
from fedshift.experiments.task.preparing import Prepared
from fedshift.fitting.calls import call_of
from fedshift.fitting.class_weights import Weights, weights_of
from fedshift.fitting.keys import in_python_words, sorted_keys
from fedshift.fitting.methods import Method, as_method, made_by_user
from fedshift.fitting.networks import ALIKE, first_model, reference_of
from fedshift.fitting.sources import mark_of
from fedshift.model import Model
from fedshift.record.folder import FIT
from fedshift.tasks.building import Built
from fedshift.tasks.task import Task

Loss = Term | Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment that is ready to run; notes: sentences for its user."""

    config: Config
    prepared: Prepared
    notes: tuple[str, ...]


def plan(
    task: Task, net: Any, method: str | Callable[..., Algorithm] | Algorithm | Method, *,
    seed: int = 0,
    name: str | None = None,
    metrics: Mapping[str, Metric] | Metric | None = None,
    loss: Loss | None = None,
    class_weights: Weights | None = None,
    head: Sequence[str] = (),
    built: Built | None = None,
    **keys: Any,
) -> Plan:  # fmt: skip
    """The experiment that `fit` runs; built: the cut task, by default `task.build()`.

    Raises InputError for arguments that do not fit together, before anything is trained.
    """
    check_task(task)
    check_whole("seed", seed, 0)
    chosen = as_method(method, keys)
    schedule = _own_schedule(keys)
    with in_python_words():
        tables = sorted_keys(chosen, keys, with_options=not isinstance(method, Method))
        config = _config(task, net, chosen, tables, int(seed), name)
    made = task.build() if built is None else built
    training = _corrected(config.training, made, keys, loss, class_weights)
    config = config.model_copy(update={"training": training})
    added = Custom(
        method=_custom_recipe(chosen),
        loss=None if loss is None else loss_term(loss),
        schedule=schedule,
        metrics=checked_metrics(metrics),
        class_weights=weights_of(class_weights, made),
        head=_head(head, made),
    )
    check_metrics(added.metrics, task.kind)
    seed, freeze = config.seeds.resolved().init, config.model.freeze_norm
    model = _model(task, net, chosen, made, seed, freeze)
    notes = made.notes + ((ALIKE,) if _alike(net, chosen) else ())
    call = call_of(
        net, method, keys, schedule=schedule, metrics=metrics, loss=loss,
        class_weights=class_weights, head=head, name=name,
    )  # fmt: skip
    texts = {FIT: facts_on(made, notes, None if model is None else reference_of(net), call)}
    added = replace(added, mark=_mark(chosen, added, loss, made, net), texts=texts)
    return Plan(config, prepare_built(config, made, model, added), notes)


def _corrected(
    training: Training, built: Built, keys: Mapping[str, Any], *weighing: Any
) -> Training:
    """[training] with the default of `fit` for `prior`: the model is corrected for the target.

    It is not corrected if no single model predicts classes for a target, nor if the user weighs
    classes or losses, since a correction would undo these weights. Without validation rows the
    correction cannot be calibrated.
    """
    task = built.task
    weighs = any(one is not None for one in weighing)
    if "prior" in keys or weighs or task.kind != "classification" or task.tests:
        return training
    prior = "calibrated" if any(map(len, task.validation)) else "target"
    return training.model_copy(update={"prior": prior})


def _own_schedule(keys: dict[str, Any]) -> Any:
    """Take a schedule that is a function out of the keys; None if it is none."""
    schedule = keys.pop("schedule") if callable(keys.get("schedule")) else None
    if schedule is not None and "lr" in keys:
        raise InputError("lr and a schedule that is a function both give the rate; leave out lr")
    return schedule


def _mark(chosen: Method, added: Custom, loss: Loss | None, built: Built, net: Any) -> str:
    """A hash of code and numbers that the configuration cannot hold; "" if there are none."""
    weights = added.class_weights
    parts = {
        "method": chosen.recipe.make if chosen.custom else None,
        "loss": loss,
        "schedule": added.schedule,
        "transform": built.augment and built.augment.transform,
        **({"augment": net.augment} if isinstance(net, Model) and net.augment else {}),
        "weights": None if weights is None else weights.tolist(),
        **({"head": added.head} if added.head else {}),
        **added.metrics,
    }
    given = {name: mark_of(value) for name, value in parts.items() if value is not None}
    return hashlib.sha256(repr(given).encode()).hexdigest() if given else ""


def checked_metrics(given: Mapping[str, Metric] | Metric | None) -> dict[str, Metric]:
    """The metrics by name; a single function is named after itself. Raises InputError."""
    name = getattr(given, "__name__", "")
    if given is not None and not isinstance(given, Mapping) and name.isidentifier():
        given = {name: given} if callable(given) else given
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f'metrics is {called(given)}; give a dict, as {{"auc": f}}')
    return dict(given or {})


def _head(given: Sequence[str], built: Built) -> tuple[str, ...]:
    """The prefixes as they are once a wrapper unpacks the network's inputs."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(isinstance(one, str) and one for one in names):
        raise InputError(f'head is {called(given)}; give prefixes of parameters, as head=("4.",)')
    return tuple(f"net.{one}" if built.encoding.layout is not None else one for one in names)


def check_task(task: object) -> None:
    """Raise InputError for an object that is no task."""
    if not isinstance(task, Task):
        raise InputError(f"task is {called(task)}; give an fs.Task, such as fs.Task.from_csv(...)")


def _config(
    task: Task, net: Any, chosen: Method, tables: dict[str, dict[str, Any]], seed: int,
    name: str | None,
) -> Config:  # fmt: skip
    tables["method"] = _method_table(chosen, tables["method"])
    tables["model"]["name"] = net if isinstance(net, str) else PYTHON
    if isinstance(net, str) and net == PYTHON:
        raise InputError('net="python" is no network; give a module, or a name such as "mlp"')
    tested_on = "clients" if task.target.kind == "clients" else "drawn"
    return validate(
        {
            "name": file_name(task.name) if name is None else name,
            "data": {"source": PYTHON, "name": task.name},
            "shift": {"kind": "natural", "clients": len(task.clients), "target": tested_on},
            "seeds": {"run": seed, "split": task.seed},
            **tables,
        },
        origin="fit",
    )


def file_name(text: str) -> str:
    """A text as the name of a run, which may have letters, digits, spaces and . _ + = - only."""
    return re.sub(r"[^\w.+= -]+", "-", text).strip("-. ")[:60] or "run"


def _method_table(chosen: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """[method] of the configuration, without options that no file can hold.

    A method that can choose its effective sample size does so, unless the user gives one.
    """
    if not chosen.custom:
        automatic = chosen.recipe.traits.auto_ess and not {"ess", "lam"} & options.keys()
        return {"name": chosen.recipe.name, **options, **({"ess": "auto"} if automatic else {})}
    return {"name": PYTHON, **{k: v for k, v in options.items() if _plain(v)}}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str)


def _custom_recipe(chosen: Method) -> Any:
    if not chosen.custom:
        return None
    others = {k: v for k, v in chosen.options.items() if not _plain(v)}
    return replace(chosen.recipe, make=partial(made_by_user, chosen.recipe.make, **others))


def _model(
    task: Task, net: Any, chosen: Method, built: Built, seed: int, freeze_norm: bool
) -> Model | None:
    """The first model; None for a network that is given by name."""
    if chosen.algorithm is not None:
        model = chosen.algorithm.model
        if net is not None and net is not model and net is not model.net:
            raise InputError(
                f"{chosen.recipe.name} brings its own network; leave net out, or give a function "
                "of Setting in place of the Algorithm, which then trains net"
            )
        if built.encoding.layout is not None:
            raise InputError(
                f"{chosen.recipe.name} brings its own network, and this task packs its inputs; "
                "give net, and a function of Setting in place of the Algorithm"
            )
        if built.augment is not None:
            raise InputError(
                f"{chosen.recipe.name} brings its own network, to which the task's transform would "
                "not be applied; give Model(net, augment=...) in it, and the task no transform"
            )
        if freeze_norm and not model.freeze_norm:
            raise InputError(
                f"{chosen.recipe.name} brings its own network; leave freeze_norm out, and give the "
                "Algorithm Model(net, freeze_norm=True)"
            )
        return model
    if net is None:
        raise InputError('fit needs a network: a torch.nn.Module, a function, or a name as "mlp"')
    if isinstance(net, str):
        return None
    changed = built.augment is not None or built.encoding.layout is not None
    if isinstance(net, Model) and net.augment is not None and changed:
        why = "packs its inputs" if built.augment is None else "has a transform as well"
        raise InputError(
            f"Model(net, augment=...) changes training inputs, and this task {why}; give the task "
            "one transform that does it all, and fit the network itself"
        )
    return first_model(net, task, seed, built.encoding.layout, freeze_norm=freeze_norm)


def _alike(net: Any, chosen: Method) -> bool:
    return chosen.algorithm is not None or isinstance(net, torch.nn.Module | Model)
