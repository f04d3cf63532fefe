"""`fedshift.fit` and `fedshift.load`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from fedshift.algorithms.method import Method as Algorithm
from fedshift.calls import called_as
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.custom import Metric
from fedshift.experiments.config.custom_network import Shape
from fedshift.experiments.config.schema import PYTHON, Config
from fedshift.experiments.engines import Engine, backend_of, default_engine
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.progress import Asked, Keeper, no_stop
from fedshift.experiments.folder.run_folder import kept_in, reserved
from fedshift.experiments.folder.run_models import (
    complete_config,
    encoding_in,
    input_shape,
    load_models,
    network_of,
)
from fedshift.experiments.listeners import join_listeners
from fedshift.experiments.resume import reopened
from fedshift.files import is_file, read_object
from fedshift.fitting.bars import shown_progress
from fedshift.fitting.class_weights import Weights
from fedshift.fitting.following import Callback, Logger, flat_keys, following, several
from fedshift.fitting.keys import by_name
from fedshift.fitting.methods import Method
from fedshift.fitting.networks import first_model, referred
from fedshift.fitting.planning import Loss, Plan, plan
from fedshift.fitting.result import Result
from fedshift.model import Model
from fedshift.randomness import put_back, states
from fedshift.record.folder import CONFIG, FIT, SUMMARY, read_run
from fedshift.tasks.encoding import Encoding
from fedshift.tasks.task import Task

ELSEWHERE = "it cannot go on: fs.load reads it, and another folder= takes a new run"
AGAIN, INTERRUPTED = 'fs.fit(..., folder="{}", resume=True)', 130


@contextlib.contextmanager
def leaving_torch() -> Iterator[None]:
    """Restore torch's number of threads and the random generators after a run, for the user."""
    threads, generators = torch.get_num_threads(), states()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        put_back(generators)


@called_as('fs.fit(task, net, method="fedavg")')
@leaving_torch()
def fit(
    task: Task,
    net: Any = None,
    *,
    method: str | Callable[..., Algorithm] | Algorithm | Method = "fedavg",
    seed: int = 0,
    name: str | None = None,
    metrics: Mapping[str, Metric] | Metric | None = None,
    loss: Loss | None = None,
    class_weights: Weights | None = None,
    head: Sequence[str] = (),
    callbacks: Sequence[Callback] | Callback = (),
    loggers: Sequence[Logger] | Logger = (),
    backend: str | None = None,
    workers: int | None = None,
    progress: bool | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    **keys: Any,
) -> Result:
    """Train a network on a task's clients by a method, and measure it on the task's target.

    net            a module, of which a copy is trained; a function of the task (input_shape,
                   classes) that makes one; or a name: "mlp", "linear", "lenet", ...
    method         a recipe's name, `method(name, option=...)`, a function of `Setting`, or an
                   `Algorithm`
    keys           the recipe's options (ess="auto"), and the keys of [training], [model] and
                   [selection] in docs/configuration.md: rounds, lr, epochs, batch, cohort,
                   patience, keep, hidden, ...; schedule="cosine", or a function of the round that
                   gives the learning rate
    seed           of first weights, batches and cohorts; the task has a seed of its own for its cut
    metrics        {"auc": f}, with f(probabilities [n, K], labels [n]) -> float on the target's
                   rows; for numbers f(predicted [n], true [n]), for several labels per row
                   f([n, L], [n, L]). A single function is named after itself
    loss           a `Term`, or loss(logits [B, K], y [B]) -> losses [B]; replaces the
                   cross-entropy, or the task's own loss if it has no classes
    class_weights  "balanced", or a weight for each class, by name or in order
    head           prefixes of the last layers' parameters, as ("4.",), for methods that treat these
                   differently (fedper, fedrep, ...); by default "head."
    callbacks      functions that are called after every round with a dict of its numbers
    loggers        `TensorBoard`, `MLflow`, `WandB`
    backend        as --backend of `fedshift run`; by default one process or all cores, whichever
                   is faster, with the same numbers bit for bit. workers: number of processes
    progress       whether to draw a bar on stderr; by default on a terminal and in notebooks
    folder         for the run folder; by default a temporary one, until `save`. With a folder,
                   Ctrl-C ends the run after the current round, and a second Ctrl-C at once
    resume         go on with the run in `folder`; if it is complete, give its result

    >>> columns = {"client": "hospital", "label": "outcome"}
    >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
    >>> result = fs.fit(task, "mlp", method="fedpals", ess=0.5, rounds=5)
    >>> result.accuracy > 0.8
    True

    Raises InputError for arguments that do not fit together, with a cure, before any training.
    """
    planned = plan(
        task, net, method, seed=seed, name=name, metrics=metrics, loss=loss,
        class_weights=class_weights, head=head, **keys,
    )  # fmt: skip
    engine = _engine(backend, workers)
    if folder is not None:
        planned = _identified(planned)
        if resume and is_file(Path(folder) / SUMMARY):
            return _complete(Path(folder), planned)
    with (
        by_name(task.clients),
        _place(planned, folder, resume, engine) as (place, keeper),
        shown_progress(progress) as bar,
        following(planned, several(callbacks), several(loggers)) as follow,
    ):
        record(place, planned.config, planned.prepared, join_listeners(bar, follow), engine, keeper)
        result = _result(place, planned.prepared.model)
    if folder is None:
        weakref.finalize(result, remove, place, os.getpid())  # until then `save` can copy it
    return result


@called_as('fs.load("runs/north", net=net)')
def load(folder: str | Path, *, net: Any = None) -> Result:
    """The result of `fit` that is saved in a folder.

    net  the network that was trained, or the function that made it. It is needed if the network was
         defined in a notebook or script, or made with arguments. Without it, the module that the
         folder names is imported to make the network, so load only folders that you trust

    >>> columns = {"client": "hospital", "label": "outcome"}
    >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
    >>> result = fs.fit(task, "linear", rounds=2, folder="run")
    >>> fs.load("run").accuracy == result.accuracy
    True

    Raises InputError if net is needed and missing, and for a folder without a complete run.
    """
    place = Path(folder)
    config = complete_config(place)
    about = read_object(place / FIT) if is_file(place / FIT) else {}
    run, encoding = read_run(place), encoding_in(place)
    shape = tuple(about["x"]) if "x" in about else None
    if encoding is not None and encoding.columns and encoding.layout is None:
        width = sum(column.width for column in encoding.columns)
        if shape != (width,):
            raise DataError(
                f"{place}: encoding.json makes {width} numbers of a row, fit.json {shape}"
            )
    if config.model.name != PYTHON:
        if shape is None:  # a run on a data set of the library, which has no fit.json
            shape = input_shape(config, place)
            about["x"] = list(shape)
        model = network_of(config, place, len(run.clients), shape)
    else:
        model = _network(place, net, about, run.summary.classes, encoding)
    try:
        models = load_models(place, model=model)
    except DataError as e:
        if config.model.name != PYTHON:
            raise
        what = str(e).partition(";")[0].replace(" of config.resolved.toml", "")
        raise InputError(f"{what}; give net= the network that was trained") from e
    return Result(run, models, encoding, about)


def _network(
    place: Path, net: Any, about: Mapping[str, Any], classes: tuple[str, ...],
    encoding: Encoding | None,
) -> Model:  # fmt: skip
    layout = None if encoding is None else encoding.layout
    shape = tuple(about.get("input_shape", ()))
    kind, outputs = (
        ("classification", ()) if encoding is None else (encoding.kind, encoding.outputs)
    )
    task = Shape(shape, classes, outputs, kind)
    if net is not None:
        return first_model(net, task, 0, layout)
    reference = about.get("net")
    model = referred(reference, task, layout) if reference else None
    if model is None:
        raise InputError(
            f"{place}: the folder has the network's weights, and not how to make it"
            f"{f' ({reference} is gone)' if reference else ''}; give fs.load(folder, net=...), the "
            "network or the function that was trained"
        )
    return model


def _result(place: Path, model: Model) -> Result:
    models, encoding = load_models(place, model=model), encoding_in(place)
    return Result(read_run(place), models, encoding, read_object(place / FIT))


def remove(place: Path, owner: int) -> None:
    """Delete a temporary folder, but only in the process that made it."""
    if os.getpid() == owner:  # a process that was forked later runs this at its exit, too
        shutil.rmtree(place, ignore_errors=True)


def _engine(backend: str | None, workers: int | None) -> Engine:
    if backend is None and workers is None:
        return default_engine()
    # A number of workers without a backend asks for the only one that has workers.
    return backend_of(backend or "workers", workers)


@contextlib.contextmanager
def _place(
    planned: Plan, folder: str | Path | None, resume: bool, engine: Engine
) -> Iterator[tuple[Path, Keeper | None]]:
    """(run folder, keeper of checkpoints).

    A temporary folder has no checkpoints, and is deleted if the run fails.
    """
    config, prepared = planned.config, planned.prepared
    if folder is None:
        if resume:
            raise InputError("resume=True needs folder=, where the run to go on with is")
        temporary = Path(mkdtemp(prefix="fedshift-"))
        try:
            yield temporary, None
        except BaseException:
            remove(temporary, os.getpid())
            raise
        return
    place = Path(folder)
    begun = is_file(place / CONFIG)
    if begun and not resume:
        raise InputError(
            f"{place}: has a run; go on with it by resume=True, or give another folder="
        )
    with contextlib.ExitStack() as stack:
        if begun:
            path, _ = stack.enter_context(reopened(place, config, prepared, engine.backend, AGAIN))
        else:
            path = stack.enter_context(reserved(place, config.name, AGAIN))
        yield path, kept_in(path, config, prepared, asked=stack.enter_context(_asked_to_stop()))


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Asked]:
    """A function that gives 130 after the first Ctrl-C, and None before; a second one ends at once.

    If the program has its own handler, or this is not the main thread, Ctrl-C works as before.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield no_stop
        return
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(INTERRUPTED)
        with contextlib.suppress(OSError):  # not `print`: the signal may have interrupted a print
            os.write(2, b"stopping after this round; once more stops at once\n")

    signal.signal(signal.SIGINT, receive)
    try:
        yield lambda: received[0] if received else None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _identified(planned: Plan) -> Plan:
    """The plan with a hash of configuration, data, network and code added to its fit.json."""
    custom = planned.prepared.custom
    identity = kept_in(Path(), planned.config, planned.prepared).identity
    # Checkpoints hold the model before any correction, so their identity leaves `prior` out; the
    # result depends on it.
    prior = planned.config.training.prior
    identity = identity if prior == "none" else f"{identity} {prior}"
    about = json.loads(custom.texts[FIT]) | {"identity": identity}
    texts = {**custom.texts, FIT: json.dumps(about, indent=1) + "\n"}
    return replace(planned, prepared=replace(planned.prepared, custom=replace(custom, texts=texts)))


def _differences(then: Config, now: Config) -> str:
    """The keys that differ, as " (rounds: 8 there, 12 here)"."""
    there, here = (flat_keys(one.model_dump(exclude={"name"})) for one in (then, now))
    keys = [k for k in here.keys() | there.keys() if there.get(k) != here.get(k)]
    words = {"method.name": "method", "model.name": "net", "seeds.run": "seed"}
    each = [
        f"{words.get(key, key.rpartition('.')[2])}: {there.get(key)} there, {here.get(key)} here"
        for key in sorted(keys)[:5]
    ]
    return f" ({'; '.join(each)})" if each else ", data, network or code than these"


def _complete(place: Path, planned: Plan) -> Result:
    """The result of a complete run. Raises InputError if it is not the run that was planned."""
    ready = planned.prepared
    now = json.loads(ready.custom.texts[FIT])["identity"]
    if not is_file(place / FIT) or read_object(place / FIT).get("identity") != now:
        what = _differences(complete_config(place), planned.config)
        raise InputError(f"{place}: a complete run of another configuration{what}; {ELSEWHERE}")
    result = _result(place, ready.model)
    names = (tuple(client.name for client in result.run.clients), result.classes)
    if names != (ready.custom.clients, ready.task.classes):
        raise InputError(
            f"{place}: a complete run of other names of clients or classes; {ELSEWHERE}"
        )
    return result
