"""`fedshift deploy`: a federation of real machines."""

from __future__ import annotations

import sys
from pathlib import Path

from fedshift.cli import console
from fedshift.errors import InputError
from fedshift.flower.installed import check_flower


def init(file: Path, folder: Path, hosts: list[str], overrides: list[str]) -> None:
    """Write the federation's folder, and say what goes where."""
    check_flower()
    from fedshift.deploy.place import make_place
    from fedshift.experiments.deployed import configured
    from fedshift.experiments.load import dumps, load_config

    config = load_config(file, overrides)
    text, clients = dumps(config), config.shift.clients
    configured(text)
    make_place(folder, text, clients, hosts or ["localhost", "127.0.0.1"])
    print(f"{folder}: certificates for {', '.join(hosts or ['localhost', '127.0.0.1'])}")
    print(f"Give {folder}/clients/client-I to client I of {clients}, by a way that you trust: it")
    print("holds that client's private key. ca.key and server.key never leave this machine.")
    print(f"Then: fedshift deploy server {folder}, and on each client's machine")
    print("      fedshift deploy client client-I --server HOST:PORT")


def server(
    folder: Path, out: Path | None, host: str, port: int, timeout: float, *, as_json: bool
) -> None:
    """Serve, then print what `fedshift run` prints."""
    check_flower()
    from fedshift.cli.results import draw, run_json, show_run
    from fedshift.deploy.federation import serve
    from fedshift.experiments.folder import CONFIG, check_unused
    from fedshift.experiments.load import load_config

    place = folder / "run" if out is None else out
    check_unused(place)
    with console.progress() as listen:
        serve(folder, place, host=host, port=port, timeout=timeout, listen=listen)
    page = draw([place], None)
    if as_json:
        console.show_json(run_json(place, page))
    else:
        cohort = load_config(place / CONFIG).training.cohort is not None
        show_run(place, page, cohort=cohort)


def client(place: Path, address: str) -> None:
    """Join, and stay until interrupted or refused."""
    check_flower()
    from fedshift.deploy.federation import join

    print(f"joining {address}; what happens is in {place / 'supernode.log'}; Ctrl-C leaves")
    code = join(place, address, say=lambda text: print(text, file=sys.stderr, flush=True))
    if code:
        raise InputError(
            f"the SuperNode ended with {code}: is this client's key registered at the server, and "
            f"is its certificate the one of {place / 'ca.crt'}? See {place / 'supernode.log'}"
        )
