"""The app that a client runs: always that of its own installation, whatever a server sends.

Flower's servers send the code of an app, which clients unpack and run. Here that code is neither
unpacked nor run; only the name of the app in it is compared.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedshift.errors import InputError, shown
from fedshift.flower.installed import put_in_place
from fedshift_deploy.chosen import APP, chosen, imported
from fedshift_deploy.log_records import leave_out_tracebacks
from fedshift_deploy.notices import notify


def check_app(sent: bytes) -> None:
    """Raise InputError if the app (FAB) that the server sent is not the one chosen here."""
    from flwr.common.config import get_fab_config

    named = get_fab_config(sent)["tool"]["flwr"]["app"]["components"].get("clientapp")
    if str(named) != chosen(APP):
        raise InputError(
            f'the server sends the app "{shown(str(named))}", and this client runs "{chosen(APP)}" '
            "alone; the server's operator brings back the app of `fedshift deploy init`, or name "
            'it as "app" in client.json'
        )


def run_the_installed_app() -> None:
    """Make this process, Flower's for one task of a client, run the installed app."""

    def check(sent: bytes, **_: object) -> None:
        try:
            check_app(sent)
        except InputError as e:
            notify(trouble=f"this client gave the server no answer: {e}")
            raise

    leave_out_tracebacks()
    process: Any = import_module("flwr.supernode.runtime.run_clientapp")
    put_in_place(process, "install_from_fab", check)
    put_in_place(process, "get_load_client_app_fn", lambda **_: lambda *_: imported(chosen(APP)))
