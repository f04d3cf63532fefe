"""`fedshift deploy`: a federation of real machines."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedshift.cli import console
from fedshift.cli.choices import LogFormat
from fedshift.deploy.logs import line_of, log_line
from fedshift.errors import InputError
from fedshift.files import is_file, is_folder
from fedshift.flower.installed import check_flower


def init(file: Path, folder: Path, hosts: list[str], overrides: list[str]) -> None:
    """Write the federation's folder, and say what goes where."""
    check_flower()
    from fedshift.deploy.place import make_place
    from fedshift.experiments.caps import with_cap
    from fedshift.experiments.deployed import configured
    from fedshift.experiments.load import dumps, load_with_source

    config, source = load_with_source(file, overrides)
    config, cap = with_cap(config)
    text, clients = dumps(config), config.shift.clients
    with source.placing():
        # What only a simulation can do is refused now, not when all clients have joined.
        configured(text)
    # The server reaches itself under its own machine's names.
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    make_place(folder, text, clients, names)
    console.put(f"{folder}: certificates for {', '.join(names)}")
    console.say(cap, indent=0)
    for line in (
        f"Give {folder}/clients/client-I to client I of {clients}, by a way that you trust: it",
        "holds that client's private key. ca.key and server.key never leave this machine.",
        f"Then: fedshift deploy server {folder}, and on each client's machine",
        "      fedshift deploy client client-I --server HOST:PORT",
    ):
        console.put(line)


def server(
    folder: Path,
    out: Path | None,
    resume: Path | None,
    host: str,
    port: int,
    waits: dict[str, float],
    metrics: str | None,
    logs: LogFormat,
    *,
    as_json: bool,
) -> None:
    """Serve, then print what `fedshift run` prints, or a last line of the JSON log."""
    check_flower()
    from fedshift.cli.results import draw, run_json, show_run
    from fedshift.deploy.federation import serve
    from fedshift.deploy.monitoring import monitored
    from fedshift.experiments.folder import check_unused

    if resume is None:
        place = _next(folder) if out is None else out
        check_unused(place)
    else:
        place = _unfinished(resume, out)
    text = _experiment(folder)
    with _telling(logs) as tell, monitored(metrics, folder, tell) as (listen, beside):
        serve(
            folder, place, host=host, port=port, listen=listen, experiment=text, beside=beside,
            **waits,
        )  # fmt: skip
    page = draw([place], place)
    if as_json:
        console.show_json(run_json(place, page))
    elif logs is LogFormat.json:
        console.tell(log_line("done", folder=str(place), report=str(page)))
    else:
        show_run(place, page)


def _experiment(folder: Path) -> str:
    """The TOML of the federation's experiment, checked; "" in folders of earlier versions."""
    from fedshift.deploy.place import EXPERIMENT, clients_of
    from fedshift.experiments.deployed import configured
    from fedshift.experiments.load import dumps, load_with_source

    keys, file = len(clients_of(folder)), folder / EXPERIMENT
    if not is_file(file):
        return ""
    config, source = load_with_source(file)
    with source.placing():
        configured(dumps(config))
    if config.shift.clients != keys:
        raise InputError(
            f"{file}: shift.clients = {config.shift.clients}, and the federation has the keys of "
            f"{keys} clients; give {keys}, or make another federation with `fedshift deploy init`"
        )
    return dumps(config)


@contextlib.contextmanager
def _telling(logs: LogFormat) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What tells of a run's events: a line of JSON each, or progress for people."""
    if logs is LogFormat.json:
        yield lambda event: console.tell(line_of(event))
    else:
        with console.progress() as listen:
            yield listen


def _unfinished(place: Path, out: Path | None) -> Path:
    """The run folder, if there is something in it to go on from."""
    from fedshift.experiments.resume import configured
    from fedshift.record.folder import CHECKPOINTS

    if out is not None:
        raise InputError("--resume goes on in its folder; leave out --out")
    # For its errors: a complete run, or no run folder.
    configured(place)
    if not is_folder(place / CHECKPOINTS):
        raise InputError(
            f"{place}: no checkpoint: the server ended before round 1 was over; leave out --resume"
        )
    return place


def _next(folder: Path) -> Path:
    """folder/run, or the first of run-2, run-3, ... that is not there."""
    names = itertools.chain(["run"], (f"run-{n}" for n in itertools.count(2)))
    return next(folder / name for name in names if not os.path.exists(folder / name))


def client(place: Path, address: str, patience: float, logs: LogFormat) -> None:
    """Join, and stay until interrupted or refused."""
    check_flower()
    from fedshift.deploy.joining import join, node_command

    def say(text: str) -> None:
        console.tell(log_line("client", message=text) if logs is LogFormat.json else text)

    node_command(place, address)  # refuses a wrong folder or address before anything is printed
    first = f"joining {address}; what happens is in {place / 'supernode.log'}"
    if logs is LogFormat.json:
        say(first)
    else:
        console.put(f"{first}; Ctrl-C leaves")
        # The line must be there before the process waits for hours.
        sys.stdout.flush()
    join(place, address, patience=patience, say=say)
