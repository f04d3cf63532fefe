"""Check that Flower is installed, in a version that this library was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fedshift.errors import InputError

# By minor version: Flower changes private places that this package uses (`deploy.guard`, `local`).
TRIED = ("1.41",)
INSTALL = "pip install 'fedshift[flower]'"


def check_flower(*, simulation: bool = False) -> None:
    """Raises InputError, with what to install, where flwr (or ray for a simulation) is missing."""
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
