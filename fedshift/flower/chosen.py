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
    APP: "fedshift.experiments.deployed:client_app",
    SITE: "fedshift.experiments.on_flower:configured_site",
}


def chosen(variable: str) -> str:
    """What is chosen on this machine: the environment variable, or what `CHOICES` says."""
    return os.environ.get(variable, CHOICES[variable])


def imported(name: str) -> Any:
    """What "module:name" stands for. Raises InputError where it is not there."""
    module, _, inner = name.partition(":")
    try:
        return getattr(import_module(module), inner)
    except (ImportError, AttributeError, ValueError) as e:
        raise InputError(f'"{shown(name)}" cannot be loaded: {e}') from None


def check_site(named: str) -> None:
    """Raise InputError where a server names another source of data than this machine has chosen.

    A server may name none, or the default. A name that it could choose would be code that it runs.
    """
    mine = chosen(SITE)
    if named not in ("", CHOICES[SITE], mine):
        raise InputError(
            f'the server wants data from "{shown(named)}", and this client gives it from '
            f'"{shown(mine)}"; if that is right, write "site": "{shown(named)}" into client.json'
        )
