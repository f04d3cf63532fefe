"""`fedshift deploy`: a federation of real machines."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from fedshift.cli import console
from fedshift.errors import InputError
from fedshift.files import is_folder
from fedshift.flower.installed import check_flower


def init(file: Path, folder: Path, hosts: list[str], overrides: list[str]) -> None:
    """Write the federation's folder, and say what goes where."""
    check_flower()
    from fedshift.deploy.place import make_place
    from fedshift.experiments.deployed import configured
    from fedshift.experiments.load import dumps, load_with_source

    config, source = load_with_source(file, overrides)
    text, clients = dumps(config), config.shift.clients
    with source.placing():
        # What only a simulation can do is refused now, not when all clients have joined.
        configured(text)
    # The server reaches itself under its own machine's names.
    names = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    make_place(folder, text, clients, names)
    for line in (
        f"{folder}: certificates for {', '.join(names)}",
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
    min_clients: int | None,
    *,
    as_json: bool,
) -> None:
    """Serve, then print what `fedshift run` prints."""
    check_flower()
    from fedshift.cli.results import draw, run_json, show_run
    from fedshift.deploy.federation import serve
    from fedshift.experiments.folder import check_unused

    if resume is None:
        place = _next(folder) if out is None else out
        check_unused(place)
    else:
        place = _unfinished(resume, out)
    with console.progress() as listen:
        serve(folder, place, host=host, port=port, listen=listen, min_clients=min_clients, **waits)
    page = draw([place], place)
    if as_json:
        console.show_json(run_json(place, page))
    else:
        show_run(place, page)


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


def client(place: Path, address: str, patience: float) -> None:
    """Join, and stay until interrupted or refused."""
    check_flower()
    from fedshift.deploy.joining import join, node_command

    node_command(place, address)  # refuses a wrong folder or address before anything is printed
    console.put(f"joining {address}; what happens is in {place / 'supernode.log'}; Ctrl-C leaves")
    # The line must be there before the process waits for hours.
    sys.stdout.flush()
    join(place, address, patience=patience, say=lambda t: console.tell(t))
