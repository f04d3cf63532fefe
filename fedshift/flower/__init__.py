"""Flower: any algorithm of this library as a Flower strategy and client app, and FedPALS for apps.

Names are loaded on first use, so that Flower is imported only if it is needed, and after
`fedshift.flower.quiet` has set its environment. Needs the extra "flower".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedshift.flower.client import Site as Site
    from fedshift.flower.client import client_app as client_app
    from fedshift.flower.local import LocalGrid as LocalGrid
    from fedshift.flower.pals import FedPALS as FedPALS
    from fedshift.flower.rounds import play as play
    from fedshift.flower.strategy import AlgorithmStrategy as AlgorithmStrategy

_PLACES = {
    "AlgorithmStrategy": "strategy",
    "FedPALS": "pals",
    "LocalGrid": "local",
    "Site": "client",
    "client_app": "client",
    "play": "rounds",
}
__all__ = ["AlgorithmStrategy", "FedPALS", "LocalGrid", "Site", "client_app", "play"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedshift.flower.installed import check_flower

    check_flower()
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()} - {"TYPE_CHECKING", "Any", "annotations", "import_module"})
