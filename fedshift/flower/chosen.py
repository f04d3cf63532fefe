"""What a client's machine decides, and no message changes: the app it runs, and where its data is.

Both are written "module:name". `fedshift deploy client` passes them on as environment variables.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from fedshift.errors import InputError, shown

APP, SITE = "FEDSHIFT_APP", "FEDSHIFT_SITE"
# By default: the library's app, and the share that the experiment deals to each client.
CHOICES = {
    APP: "fedshift.experiments.machines.deployed:client_app",
    SITE: "fedshift.experiments.machines.on_flower:configured_site",
}

# The same in federations that earlier versions made.
FORMER = {
    "fedshift.experiments.deployed:client_app": CHOICES[APP],
    "fedshift.experiments.on_flower:configured_site": CHOICES[SITE],
}


def present(name: str) -> str:
    """What a name of an earlier version is called now."""
    return FORMER.get(name, name)


def chosen(variable: str) -> str:
    """What is chosen on this machine: the environment variable, or what `CHOICES` says."""
    return present(os.environ.get(variable, CHOICES[variable]))


def imported(name: str) -> Any:
    """What "module:name" stands for. Raises InputError where it is not there."""
    module, _, inner = present(name).partition(":")
    try:
        return getattr(import_module(module), inner)
    except (ImportError, AttributeError, ValueError) as e:
        raise InputError(f'"{shown(name)}" cannot be loaded: {e}') from None


def check_source(named: str) -> None:
    """Raise InputError where a server names another source of data than this machine has chosen.

    A name that a server could choose would be code that it runs. The other way about, its report
    would say that clients had the experiment's data.
    """
    mine = chosen(SITE)
    if present(named) != mine:
        raise InputError(
            f'the server says that clients have data from "{shown(named)}", and this client gives '
            f'it from "{shown(mine)}"; write the same "site" into this client\'s client.json and '
            "into the server's app/pyproject.toml"
        )
