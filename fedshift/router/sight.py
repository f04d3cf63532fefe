"""Client features and client logits for a router's inputs, and checks of these.

Shapes: B queries, N clients, n examples of one client, e client features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.client.origin import client_logits
from fedshift.data import first_not_finite
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.router.score import ClientHead, scores
from fedshift.tree import Params

Pair = tuple[Params, Params]
# Queries in one pass, so that memory does not depend on how many are asked at a time.
BLOCK = 1000


class ClientOutputs(NamedTuple):
    """Client features [n, e] of all clients' examples, and their logits [n, N], or None."""

    features: list[Tensor]
    logits: list[Tensor] | None


@dataclass(frozen=True, eq=False)
class Sight:
    """The shared network, and a client head if it is not the network's own."""

    model: Model
    shared: Pair
    head: ClientHead | None
    sizes: Tensor

    def features(self, x: Tensor) -> Tensor:
        """h [B, e]. Raises InputError for a model that does not return them."""
        return client_features(self._outputs(check_queries(x)))

    def logits(self, x: Tensor) -> Tensor:
        """z [B, N], by the refitted head if there is one."""
        return self.logits_of(self._outputs(check_queries(x)))

    def logits_of(self, out: Params) -> Tensor:
        """z [B, N] from the network's outputs. Raises InputError for a query that overflows.

        A logit of -inf leaves a client out, so it is allowed unless all clients with examples have
        it.
        """
        z = client_logits(out, len(self.sizes)) if self.head is None else self.head(
            client_features(out)
        )  # fmt: skip
        if bool(z.sum().isfinite()):  # then all are finite; the tests below take ten times as long
            return z
        most = z.masked_fill(self.sizes == 0, -torch.inf).amax(1)
        bad = ~((z < torch.inf).all(1) & (most > -torch.inf))  # NaN fails these comparisons, too
        if bool(bad.any()):
            raise InputError(
                f"query {int(bad.nonzero()[0])}: the client logits are not finite; its values are "
                "far from all that the network was trained on, leave it out"
            )
        return z

    def of_clients(self, inputs: Sequence[Tensor], what: str) -> ClientOutputs:
        """Outputs for each client's inputs [n, ...]; no rows for clients that get no queries.

        All clients' inputs take one joined pass.
        """
        N = len(self.sizes)
        if len(inputs) != N:
            raise InputError(f"{len(inputs)} clients given, the router tells {N} apart; give all")
        # Leave clients that get no queries out of fits as well.
        counted = [x if n else x[:0] for x, n in zip(inputs, self.sizes.tolist(), strict=True)]
        counts = [len(x) for x in counted]
        if not sum(counts):
            raise InputError(f"none of these clients has {what} to refit with")
        given = {i: x for i, x in enumerate(counted) if len(x)}
        first = next(iter(given.values()))
        for i, x in given.items():
            check_queries(x, f"client {i}: {what.split()[-1]}")
            if x.shape[1:] != first.shape[1:]:
                shapes = f"of shape {tuple(x.shape[1:])}, others of {tuple(first.shape[1:])}"
                raise InputError(f"client {i} has inputs {shapes}; give all of one shape")
        out = self._outputs(torch.cat(list(given.values())))
        # On the CPU, because fits use scipy and small factorisations in float64.
        features = list(torch.split(client_features(out).cpu(), counts))
        columns = out["client_logits"].shape[1:] if "client_logits" in out else ()
        if self.head is None and columns != (N,):  # a new client has no column yet
            return ClientOutputs(features, None)
        # As scores, in which clients that get no queries are at minus infinity, as in routing.
        z = scores(self.logits_of(out), self.sizes).cpu()
        return ClientOutputs(features, list(torch.split(z, counts)))

    def _outputs(self, x: Tensor) -> Params:
        """The network's outputs in blocks of `BLOCK`, without gradient."""
        parts = [read(self.model, self.shared, block) for block in torch.split(x, BLOCK)]
        return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def check_queries(x: object, what: str = "query") -> Tensor:
    """Return x. Raises InputError unless it is a tensor [B, ...] of at least one finite query.

    A query with NaN has no posterior, so any answer to it would be meaningless.
    """
    if not isinstance(x, Tensor) or not x.ndim or not len(x):
        given = "no queries" if isinstance(x, Tensor) and x.ndim else (
            "queries are a single number" if isinstance(x, Tensor)
            else f"queries are a {type(x).__name__}"
        )  # fmt: skip
        raise InputError(
            f"{given}; give at least one, in a tensor [B, ...], as torch.as_tensor(x), prepared as "
            "the clients' training inputs are"
        )
    bad = first_not_finite(x)
    if bad is not None:
        raise InputError(
            f"{what} {bad} holds NaN or infinity, and no client's data is like that; leave it out: "
            "x[x.flatten(1).isfinite().all(1)] are the others"
        )
    return x


def read(model: Model, pair: Pair, x: Tensor) -> Params:
    """The network's outputs for one block of queries that `check_queries` has accepted.

    Raises InputError for queries that the network cannot read.
    """
    try:
        out = _passed(model, pair, x)
        reason = f"it gives logits {tuple(out['logits'].shape)} for them"
        if out["logits"].ndim == 2 and len(out["logits"]) == len(x):
            return out
    except Exception as e:
        # A network may raise anything for inputs that it was not made for.
        reason = str(e)
    problem = f"the network cannot read queries {x.dtype} {tuple(x.shape)}: {reason}. "
    kind = next((v.dtype for v in pair[0].values()), x.dtype)
    # The likeliest mistakes: a wrong type, or one query without its axis.
    if x.dtype != kind:
        cure = f"Its parameters are {kind}: give it x.to({kind}), scaled as in training"
    elif _fits(model, pair, x[None]):
        cure = "This is one query: give x[None], a row per query"
    else:
        cure = (
            "Give a row per query, each of the shape of the clients' training inputs and prepared "
            "in the same way"
        )
    raise InputError(problem + cure)


def _passed(model: Model, pair: Pair, x: Tensor) -> Params:
    with torch.no_grad():
        return model(*pair, x)


def _fits(model: Model, pair: Pair, x: Tensor) -> bool:
    try:
        logits = _passed(model, pair, x)["logits"]
    except Exception:
        return False
    return logits.ndim == 2 and len(logits) == len(x)


def client_features(out: Params) -> Tensor:
    """The client features [B, e] among a model's outputs. Raises InputError without them."""
    if "client_features" not in out:
        raise InputError(
            f'this needs "client_features", and the model returns {sorted(out)}; let its forward '
            'return {"client_features": h, "client_logits": ...}, h what the client head reads'
        )
    return out["client_features"].flatten(1)
