"""Client features and client logits for a router's inputs.

Shapes: B queries, N clients, n examples of one client, e client features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedshift.client.origin import client_logits
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.router.queries import finite_logits, outputs
from fedshift.router.score import ClientHead, scores
from fedshift.tree import Params


class ClientOutputs(NamedTuple):
    """Client features [n, e] of all clients' examples, and their logits [n, N], or None."""

    features: list[Tensor]
    logits: list[Tensor] | None


@dataclass(frozen=True, eq=False)
class Sight:
    """The shared network, and a client head if it is not the network's own."""

    model: Model
    shared: tuple[Params, Params]
    head: ClientHead | None
    sizes: Tensor

    def features(self, x: Tensor) -> Tensor:
        """h [B, e]. Raises InputError for a model that does not return them."""
        return client_features(outputs(self.model, self.shared, x))

    def logits(self, x: Tensor) -> Tensor:
        """z [B, N], by the refitted head if there is one."""
        return self.logits_of(outputs(self.model, self.shared, x))

    def logits_of(self, out: Params) -> Tensor:
        """z [B, N] from the network's outputs."""
        if self.head is not None:
            return finite_logits(self.head(client_features(out)), self.sizes)
        return finite_logits(client_logits(out, len(self.sizes)), self.sizes)

    def of_clients(self, inputs: Sequence[Tensor], what: str) -> ClientOutputs:
        """Outputs for each client's inputs [n, ...]; no rows for clients that get no queries."""
        N = len(self.sizes)
        if len(inputs) != N:
            raise InputError(f"{len(inputs)} clients given, the router tells {N} apart; give all")
        # Leave clients that get no queries out of fits as well.
        ids = [i for i in self.sizes.nonzero().flatten().tolist() if len(inputs[i])]
        pair = self.model, self.shared
        outs = {i: outputs(*pair, inputs[i], f"client {i}: {what.split()[-1]}") for i in ids}
        if not outs:
            raise InputError(f"none of these clients has {what} to refit with")
        features = _in_order({i: client_features(out) for i, out in outs.items()}, N)
        if self.head is None and not all(_has_columns(out, N) for out in outs.values()):
            return ClientOutputs(features, None)
        # As scores, in which clients that get no queries are at minus infinity, as in routing.
        z = {i: scores(self.logits_of(out), self.sizes) for i, out in outs.items()}
        return ClientOutputs(features, _in_order(z, N))


def _in_order(values: dict[int, Tensor], clients: int) -> list[Tensor]:
    nothing = next(iter(values.values()))[:0]  # no rows, but the right width and type
    # On the CPU, because fits use scipy and small factorisations in float64.
    return [values.get(i, nothing).cpu() for i in range(clients)]


def _has_columns(out: Params, clients: int) -> bool:
    """Whether the network has a column for each client. (A new client has none yet.)"""
    return "client_logits" in out and out["client_logits"].shape[1:] == (clients,)


def client_features(out: Params) -> Tensor:
    """The client features [B, e] among a model's outputs. Raises InputError without them."""
    if "client_features" not in out:
        raise InputError(
            f'this needs "client_features", and the model returns {sorted(out)}; let its forward '
            'return {"client_features": h, "client_logits": ...}, h what the client head reads'
        )
    return out["client_features"].flatten(1)
