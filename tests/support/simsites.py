"""Clients of a simulation, which its worker processes build from this module by name."""

from __future__ import annotations

from functools import cache

from fedshift.algorithms.base import Algorithm
from fedshift.client.local import Local
from fedshift.engine.run import Federation
from fedshift.flower import Site
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import TARGET, make_federation
from support.routing import routed_model


@cache
def build(name: str) -> tuple[Algorithm, Federation]:
    """The method of a row of the contract, and the small federation."""
    model = routed_model()
    algorithm = MAKE[name](Setting(model, TARGET, Local(lr=0.1, epochs=1, batch=16)))
    return algorithm, make_federation(model)


def site(name: str, client: int) -> Site:
    """The site of a client."""
    algorithm, federation = build(name)
    first = (federation.params, federation.buffers)
    return Site(algorithm, federation.clients[client], federation.seeds.batch, first=first)
