"""A federation's folder: the files of the server, and those for each client.

ca.crt, ca.key            the federation's own authority; ca.key signs, and never leaves
server.crt, server.key    the server's certificate
clients/client-I/         for client I alone: ca.crt, key, key.pub, client.json
app/pyproject.toml        a Flower app of nothing but the installed library and the experiment
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedshift.deploy.keys import check_server, write_authority, write_client_key
from fedshift.errors import InputError
from fedshift.files import is_file

APP = """\
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
serverapp = "fedshift.experiments.deployed:server_app"
clientapp = "fedshift.experiments.deployed:client_app"

[tool.flwr.app.config]
experiment = {experiment}
site = {site}
out = ""
patience = 600.0
timeout = 3600.0
min_clients = 0
"""
SITE = "fedshift.experiments.on_flower:configured_site"


def make_place(
    folder: Path, experiment: str, clients: int, hosts: Sequence[str], *, site: str = SITE
) -> None:
    """Write the folder. `experiment` is the TOML of a run; `site` names what loads clients' data.

    Raises InputError for a folder that is not empty, or cannot be written; then it stays empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as e:
        raise InputError(f"{folder}: cannot be made: {e.strerror}") from None
    if used:
        raise InputError(f"{folder}: exists and is not an empty folder; give another")
    try:
        _fill(folder, experiment, clients, hosts, site)
    except BaseException as e:
        # Half a federation is useless, and the next attempt needs an empty folder.
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        # Of the disk; errors of hosts and keys are messages for the user already.
        if isinstance(e, OSError):
            path = e.filename or folder
            raise InputError(f"{path}: cannot be written: {e.strerror}") from None
        raise


def _fill(folder: Path, experiment: str, clients: int, hosts: Sequence[str], site: str) -> None:
    write_authority(folder, hosts)
    for i in range(clients):
        place = folder / "clients" / f"client-{i}"
        place.mkdir(parents=True)
        shutil.copyfile(folder / "ca.crt", place / "ca.crt")
        write_client_key(place / "key")
        description = {"partition": i, "partitions": clients}
        (place / "client.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    (folder / "app").mkdir()
    text = APP.format(experiment=json.dumps(experiment), site=json.dumps(site))
    (folder / "app" / "pyproject.toml").write_text(text, encoding="utf-8")


def clients_of(folder: Path) -> list[Path]:
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


def _number(place: Path) -> int | None:
    number = place.name.removeprefix("client-")
    return int(number) if number.isdecimal() else None
