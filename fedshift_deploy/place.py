"""A federation's folder: the files of the server, and those for each client.

ca.crt, ca.key            the federation's own authority; ca.key signs, and never leaves this folder
server.crt, server.key    the server's certificate
clients/client-I/         for client I only: ca.crt, key, key.pub, client.json; if clients have data
                          of their own, also site.toml and experiment.toml
experiment.toml           what the federation runs; `fedshift run` with it gives the same numbers
app/pyproject.toml        a Flower app that consists of the installed library and the experiment
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedshift.errors import InputError
from fedshift.files import check_unshared, is_file, private
from fedshift_deploy.chosen import APP, CHOICES, SITE
from fedshift_deploy.keys import (
    check_server,
    read_client_key,
    renew_server,
    write_authority,
    write_client_key,
)

PROJECT = """\
# A Flower app whose code is the installed library. Written by `fedshift deploy init`.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedshift-federation"
version = "1.0.0"
description = "An experiment of fedshift on a federation"
dependencies = []

[tool.flwr.app]
publisher = "fedshift"

[tool.flwr.app.components]
serverapp = "fedshift_deploy.machines.deployed:server_app"
clientapp = {app}

[tool.flwr.app.config]
experiment = {experiment}
site = {site}
out = ""
patience = 600.0
timeout = 3600.0
min_clients = 0
refit = false
"""
EXPERIMENT = "experiment.toml"


@private()
def make_place(
    folder: Path,
    experiment: str,
    clients: int,
    hosts: Sequence[str],
    *,
    site: str = CHOICES[SITE],
    beside: Sequence[Mapping[str, str]] = (),
    keys: Path | None = None,
) -> None:
    """Write a federation's folder, which only its owner can read.

    experiment  the TOML of a run
    site        "module:name" of what loads clients' data
    beside      more files for each client's folder, by name
    keys        another federation's folder, to take over its authority and clients' keys, and
                without `hosts` also its server's names

    Raises InputError for a folder that is not empty, or cannot be written; then it is left empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as e:
        raise InputError(f"{folder}: cannot be made: {e.strerror}") from None
    if used:
        raise InputError(f"{folder}: exists and is not an empty folder; give another")
    check_unshared(folder)
    if keys is not None:
        check_place_unshared(keys)
    try:
        _fill(folder, experiment, clients, hosts, site, keys)
        # Check again: access rules of an existing folder may share what is created in it.
        check_place_unshared(folder)
        for i, files in enumerate(beside):
            for name, text in files.items():
                place = folder / "clients" / f"client-{i}"
                (place / name).write_text(text, encoding="utf-8")
    except BaseException as e:
        # Remove everything, because the next attempt needs an empty folder.
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        # Errors of the disk need a message; those of hosts and keys have one.
        if isinstance(e, OSError):
            path = e.filename or folder
            raise InputError(f"{path}: cannot be written: {e.strerror}") from None
        raise


def _fill(
    folder: Path, experiment: str, clients: int, hosts: Sequence[str], site: str, keys: Path | None
) -> None:
    before = {} if keys is None else {place.name: place for place in clients_of(keys)}
    if keys is None:
        write_authority(folder, hosts)
    else:
        for name in ("ca.key", "ca.crt", "server.crt"):
            if not is_file(keys / name):
                raise InputError(f"{keys / name}: is missing; it is needed for the new certificate")
            shutil.copy(keys / name, folder / name)
        renew_server(folder, hosts)
    for i in range(clients):
        place = folder / "clients" / f"client-{i}"
        place.mkdir(parents=True)
        shutil.copyfile(folder / "ca.crt", place / "ca.crt")
        if place.name in before:
            # The private key may be missing: the server's operator may have moved it to the client.
            for key in before[place.name].glob("key*"):
                shutil.copy(key, place)
        else:
            write_client_key(place / "key")
        description: dict[str, int | str] = {"partition": i, "partitions": clients}
        # A client loads its data with what its own file names, whatever the server says.
        description |= {} if site == CHOICES[SITE] else {"site": site}
        (place / "client.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    (folder / EXPERIMENT).write_text(experiment, encoding="utf-8")
    (folder / "app").mkdir()
    names = {"app": CHOICES[APP], "experiment": experiment, "site": site}
    text = PROJECT.format(**{key: json.dumps(value) for key, value in names.items()})
    (folder / "app" / "pyproject.toml").write_text(text, encoding="utf-8")


def renew_certificate(folder: Path, hosts: Sequence[str] = ()) -> bool:
    """Renew the server's certificate; True if clients need a new ca.crt (`renew_server`)."""
    check_place_unshared(folder)
    again = renew_server(folder, hosts)
    for place in clients_of(folder) if again else ():
        shutil.copyfile(folder / "ca.crt", place / "ca.crt")
    return again


def renew_client(folder: Path, client: int) -> Path:
    """Give a client a new key, and return its folder. Raises InputError for a missing client."""
    check_place_unshared(folder)
    # Not `clients_of`, which raises for two clients with one key: this call is the cure.
    places = {place.name: place for place in _places(folder)}
    if (name := f"client-{client}") not in places:
        raise InputError(
            f"{folder / 'clients' / name}: is not there; there are {', '.join(places)}"
        )
    write_client_key(places[name] / "key")
    return places[name]


def clients_of(folder: Path) -> list[Path]:
    """The clients' folders in order.

    Raises InputError for a folder without the server's files, and for two clients with one key.
    """
    places, keys = _places(folder), dict[bytes, Path]()
    for place in places:
        sent, _ = read_client_key(place / "key.pub")
        if (other := keys.setdefault(sent, place)) != place:
            raise InputError(
                f"{place / 'key.pub'}: the same key as {other / 'key.pub'}, and each client needs "
                f"its own: run `fedshift deploy renew {folder} --client {_number(place)}`, and "
                f"hand out the new pair to {place.name}"
            )
    return places


def _places(folder: Path) -> list[Path]:
    """The clients' folders in order. Raises InputError for a folder without the server's files."""
    check_server(folder)
    folders = [path for path in (folder / "clients").glob("client-*") if _number(path) is not None]
    if not folders or not is_file(folder / "app" / "pyproject.toml"):
        raise InputError(
            f"{folder}: no federation's folder; make it with `fedshift deploy init` (the server "
            "needs app and the clients' key.pub, too)"
        )
    for path in folders:
        if not is_file(path / "key.pub"):
            raise InputError(f"{path / 'key.pub'}: is missing; the server must know this key")
    return sorted(folders, key=lambda path: _number(path) or 0)


def check_place_unshared(folder: Path) -> None:
    """Raise InputError if other users may change a federation's code, keys or settings."""
    names = ("ca.crt", "ca.key", "server.crt", "server.key", EXPERIMENT, "flower", "app", "clients")
    # All files in app: Flower sends them, and the server runs them.
    app, clients = (folder / "app").rglob("*"), (folder / "clients").glob("client-*")
    places = [path for place in clients for path in (place, place / "key.pub")]
    check_unshared(folder, *(folder / name for name in names), *app, *places)


def _number(place: Path) -> int | None:
    number = place.name.removeprefix("client-")
    return int(number) if number.isdecimal() else None
