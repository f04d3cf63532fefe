"""`fedshift run`: train a new run, or resume one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedshift.cli import console
from fedshift.cli.results import draw, run_json, show_profile, show_run
from fedshift.cli.stopping import asked_to_stop
from fedshift.engine.profile import Clock, Idle, Stopwatch
from fedshift.errors import FedshiftError, InputError
from fedshift.experiments.config.load import load_with_source
from fedshift.experiments.config.places import Source
from fedshift.experiments.config.schema import Config
from fedshift.experiments.engines import Engine, backend_of, default_engine
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.progress import shelf_in
from fedshift.experiments.folder.run_folder import check_unused, kept_in, reserved
from fedshift.experiments.resume import begun_by, configured, reopened
from fedshift.experiments.task.feature_shift import grey_note
from fedshift.experiments.task.preparing import Prepared, prepare
from fedshift.fitting.keys import with_names
from fedshift.record.folder import CONFIG, deployed_of


@dataclass(frozen=True)
class Asked:
    """The arguments and options of `fedshift run`."""

    file: Path | None
    resume: Path | None
    out: Path | None
    overrides: Sequence[str]
    engine: str
    actors: int | None
    workers: int | None
    every: int | None
    backend: str | None = None
    state_memory: float | None = None
    profile: bool = False


def run_asked(asked: Asked, *, as_json: bool) -> None:
    """Train, and show the result. Raises InputError for options that do not fit together."""
    config, source = _configured(asked)
    console.tell_dropped(config.method.name, source.dropped)
    with source.placing():
        _run(asked, config, as_json=as_json)


def _run(asked: Asked, config: Config, *, as_json: bool) -> None:
    engine = _engine(asked, config)
    # On Flower, clients' states are lost when Flower's run ends, so it cannot be resumed.
    keeps = asked.engine == "in-process"
    if not keeps and (asked.resume is not None or asked.every is not None):
        raise InputError(
            "a run on Flower keeps no checkpoints, since its clients' states end with it; leave "
            "out --resume and --checkpoint-every, or use the engine in-process"
        )
    if not keeps and (asked.state_memory is not None or asked.profile):
        raise InputError(
            "--state-memory and --profile are for the engine in-process; leave them out"
        )
    clock: Clock = Stopwatch() if asked.profile else Idle()
    console.warn_of_data_folders()
    # Checked before the data are read, which may take minutes.
    check_unused(asked.out)
    prepared = prepare(config)
    grey = grey_note(config.shift, prepared.task.clients[0].x, prepared.seeds.split)
    if grey is not None:
        console.tell(f"note: {grey}")
    for note in prepared.custom.notes:
        console.tell(f"note: {note}")
    names = _with_names(prepared.custom.clients)
    with _folder(asked, config, prepared, engine) as folder, names, console.progress() as listen:
        if keeps:
            with asked_to_stop() as stop, shelf_in(folder, asked.state_memory) as shelf:
                keeper = replace(kept_in(folder, config, prepared, asked.every, stop), shelf=shelf)
                experiment = record(folder, config, prepared, listen, engine, keeper, clock)
        else:
            experiment = record(folder, config, prepared, listen, engine)
    page = draw([folder], folder)
    if as_json:
        console.show_json(run_json(folder, page))
    else:
        show_run(folder, page, choice=experiment.choice)
        show_profile(folder)


@contextlib.contextmanager
def _with_names(clients: Sequence[str]) -> Iterator[None]:
    """Within the block, errors about client 2 name `client "north"`."""
    try:
        yield
    except FedshiftError as e:
        e.args = (with_names(str(e), clients),)
        raise


def _engine(asked: Asked, config: Config) -> Engine:
    """The engine that was asked for; by default, a resumed run keeps the backend that began it.

    Raises InputError for options of another engine.
    """
    name, count = asked.backend, asked.workers
    if asked.engine == "flower-sim":
        from fedshift.experiments.on_flower import FlowerSimulation

        if count is not None:
            raise InputError("--workers is for the engine in-process; Flower's are --actors")
        if name is not None:
            raise InputError("--backend is for the engine in-process; leave it out")
        return FlowerSimulation(config, asked.actors)
    if asked.actors is not None:
        raise InputError("--actors is for --engine flower-sim; leave it out, or choose that engine")
    if asked.resume is not None and name is None and count is None:
        name, count = begun_by(asked.resume)
        name = None if (name, count) == ("loop", None) else name  # the default of a new run
    if name is None or not name.startswith(("auto", "cuda")):
        # A process that has used a GPU cannot fork others that train (`check_forked`).
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if name is None and count is None:
        return default_engine()
    return backend_of(name or "workers", count, console.tell)


def _configured(asked: Asked) -> tuple[Config, Source]:
    if asked.resume is None:
        if asked.file is None:
            raise InputError("give FILE.toml, or --resume FOLDER of a run that was interrupted")
        return load_with_source(asked.file, asked.overrides)
    if asked.file is not None or asked.out is not None or asked.overrides:
        raise InputError(
            "--resume goes on with a run as it was configured; leave out FILE.toml, --out and -c"
        )
    # The clients of a federation are elsewhere. Here the run would go on with other examples.
    if deployed := deployed_of(asked.resume):
        raise InputError(
            f"{asked.resume}: a run of a federation; `{deployed.get('command')} --resume "
            f"{asked.resume}` goes on with it"
        )
    # Messages name lines of the configuration in the run folder.
    config, file = configured(asked.resume), asked.resume / CONFIG
    return config, Source(str(file), file.read_text("utf-8"))


@contextlib.contextmanager
def _folder(asked: Asked, config: Config, prepared: Prepared, engine: Engine) -> Iterator[Path]:
    if asked.resume is None:
        with reserved(asked.out, config.name) as folder:
            yield folder
    else:
        with reopened(asked.resume, config, prepared, engine.backend) as (folder, moved):
            if moved:
                console.tell(f"note: {moved}")
            yield folder
