"""Check that Flower is installed, in a version that this library was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from fedshift.errors import FedshiftError, InputError

# Minor versions that were tested. Others may have changed the private parts of Flower that this
# package uses (in `deploy.guard`, `uploads`, `deploy.inside`, `deploy.app`, `arriving`, `local`).
# They are the same in these two. 1.42 differs in what is not used here: traces of a task's
# requests, the number of tokens of an agent's context, and the release of uv that it needs.
TRIED = ("1.41", "1.42")
INSTALL = "pip install 'fedshift[flower]'"


def check_flower(*, simulation: bool = False) -> None:
    """Raise InputError, with what to install, if flwr (or ray for a simulation) is missing."""
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise InputError(f"this needs Flower, which is not installed: {INSTALL}") from None
    if ".".join(installed.split(".")[:2]) not in TRIED:
        raise InputError(
            f"flwr {installed} is installed, and this version of fedshift works with "
            f"{', '.join(TRIED)}: {INSTALL}"
        )
    if simulation and find_spec("ray") is None:
        raise InputError(
            f"a simulation on Flower needs Ray, which is not installed: {INSTALL}, or "
            "pip install 'flwr[simulation]'"
        )


def put_in_place(owner: Any, name: str, value: object) -> None:
    """Replace an attribute of Flower's, for which Flower has no setting.

    Raises FedshiftError if there is no such attribute: a version that has renamed it would silently
    run without our replacement, such as the guard.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", owner)
        raise FedshiftError(f"Flower has no {where}.{name}: this version cannot be deployed safely")
    setattr(owner, name, value)
