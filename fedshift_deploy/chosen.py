"""What only the client's machine decides, never a message: which app it runs, and its data source.

Both have the form "module:name". `fedshift deploy client` passes them on as environment variables.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from fedshift.errors import InputError, shown

APP, SITE = "FEDSHIFT_APP", "FEDSHIFT_SITE"
# The variable with the folder of `fedshift.flower.kept`.
KEEP = "FEDSHIFT_KEEP"
# Defaults: the library's app, and the share of the experiment's data that each client gets.
CHOICES = {
    APP: "fedshift_deploy.machines.deployed:client_app",
    SITE: "fedshift.experiments.on_flower:configured_site",
}


def chosen(variable: str) -> str:
    """This machine's choice: the environment variable, or the default."""
    return os.environ.get(variable, CHOICES[variable])


def imported(name: str) -> Any:
    """Import "module:name". Raises InputError if it does not exist."""
    module, _, inner = name.partition(":")
    try:
        return getattr(import_module(module), inner)
    except (ImportError, AttributeError, ValueError) as e:
        raise InputError(f'"{shown(name)}" cannot be loaded: {e}') from None


def check_source(named: str) -> None:
    """Raise InputError if the server names another source of data than this machine's choice.

    A client never imports a name that the server sends: that would let the server run code here.
    And it must not silently use its own: the server's report would name the wrong data.
    """
    mine = chosen(SITE)
    if named != mine:
        raise InputError(
            f'the server says that clients have data from "{shown(named)}", and this client gives '
            f'it from "{shown(mine)}"; write the same "site" into this client\'s client.json and '
            "into the server's app/pyproject.toml"
        )
