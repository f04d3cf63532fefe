"""Checks of a router's inputs: queries that its network can read, and thresholds.

Shapes: B queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from numbers import Real

import torch
from torch import Tensor

from fedshift.arguments import check_kind
from fedshift.data import first_not_finite
from fedshift.errors import InputError, shown
from fedshift.model import Model
from fedshift.tree import Params

Pair = tuple[Params, Params]
# Queries in one pass, so that memory does not depend on how many are asked at a time.
BLOCK = 1000


def check_server(server: object) -> None:
    """Raise InputError unless this is a round's `server`, not, for example, the clients' states."""
    cure = "give Router.of(method, played.server, played.states)"
    check_kind("server", server, dict, cure)
    if isinstance(server, dict) and "params" not in server:
        raise InputError(f'server has no "params", as a round\'s has; {cure}')


def check_served(shared: Pair, served: Mapping[int, Pair]) -> None:
    """Raise InputError for a client's tensor of another type than the shared network's."""
    types = {k: v.dtype for part in shared for k, v in part.items()}
    for i, pair in served.items():
        for k, v in chain(pair[0].items(), pair[1].items()):
            if types.get(k, v.dtype) != v.dtype:
                raise InputError(
                    f'client {i}: "{shown(k)}" is {v.dtype}, and {types[k]} in the shared network; '
                    f"one network computes in one type: give the client's as v.to({types[k]})"
                )


def check_queries(x: object, what: str = "query") -> Tensor:
    """Return x. Raises InputError unless it is a tensor [B, ...] of at least one finite query.

    A query with NaN has no posterior, so any answer to it would be meaningless.
    """
    if not isinstance(x, Tensor):
        raise InputError(
            f"queries are a {type(x).__name__}; give a tensor [B, ...], as torch.as_tensor(x), "
            "prepared as the clients' training inputs are"
        )
    if x.ndim == 0:
        raise InputError("queries are a single number; give a tensor [B, ...], a row per query")
    if not len(x):
        raise InputError("no queries; give at least one")
    bad = first_not_finite(x)
    if bad is not None:
        raise InputError(
            f"{what} {bad} holds NaN or infinity, and no client's data is like that; leave it out: "
            "x[x.flatten(1).isfinite().all(1)] are the others"
        )
    return x


def outputs(model: Model, pair: Pair, x: Tensor, what: str = "query") -> Params:
    """The network's outputs for all queries x [B, ...], in blocks of `BLOCK`, without gradient.

    Raises InputError as `check_queries`, and for queries that the network cannot read.
    """
    x = check_queries(x, what)
    parts = [read(model, pair, block) for block in torch.split(x, BLOCK)]
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def read(model: Model, pair: Pair, x: Tensor) -> Params:
    """The network's outputs for one block of queries that `check_queries` has accepted.

    Raises InputError for queries that the network cannot read.
    """
    try:
        with torch.no_grad():
            out = model(*pair, x)
    except Exception as e:
        # A network may raise anything for inputs that it was not made for.
        raise InputError(_misfit(model, pair, x, str(e))) from e
    if out["logits"].ndim != 2 or len(out["logits"]) != len(x):
        reason = f"it gives logits {tuple(out['logits'].shape)} for them"
        raise InputError(_misfit(model, pair, x, reason))
    return out


def _misfit(model: Model, pair: Pair, x: Tensor, reason: str) -> str:
    """The message, with the likeliest mistake: a wrong type, or one query without its axis."""
    problem = f"the network cannot read queries {x.dtype} {tuple(x.shape)}: {reason}. "
    kind = next((v.dtype for v in pair[0].values()), x.dtype)
    if x.dtype != kind:
        return problem + f"Its parameters are {kind}: give it x.to({kind}), scaled as in training"
    if _fits(model, pair, x[None]):
        return problem + "This is one query: give x[None], a row per query"
    return problem + (
        "Give a row per query, each of the shape of the clients' training inputs and prepared in "
        "the same way"
    )


def _fits(model: Model, pair: Pair, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            logits = model(*pair, x)["logits"]
    except Exception:
        return False
    return logits.ndim == 2 and len(logits) == len(x)


def finite_logits(z: Tensor, sizes: Tensor) -> Tensor:
    """The logits z [B, N]. Raises InputError for a query whose logits overflow or are all -inf.

    A logit of -inf leaves a client out, so it is allowed unless all clients with examples (sizes
    [N]) have it.
    """
    if bool(z.sum().isfinite()):  # then all are finite; the tests below take ten times as long
        return z
    most = z.masked_fill(sizes == 0, -torch.inf).amax(1)
    bad = ~((z < torch.inf).all(1) & (most > -torch.inf))  # NaN fails these comparisons, too
    if bool(bad.any()):
        raise InputError(
            f"query {int(bad.nonzero()[0])}: the client logits are not finite; its values are far "
            "from all that the network was trained on, leave it out"
        )
    return z


def check_thresholds(min_posterior: float | None, max_novelty: float | None) -> None:
    """Raise InputError unless 0 <= min_posterior <= 1 and max_novelty >= 0, if given."""
    for name, v, largest in (
        ("min_posterior", min_posterior, 1.0),
        ("max_novelty", max_novelty, float("inf")),
    ):
        number = isinstance(v, Real) and not isinstance(v, bool)
        if v is not None and (not number or not 0.0 <= v <= largest):
            allowed = "a probability, 0 to 1" if largest == 1.0 else "a squared distance, 0 or more"
            raise InputError(f"{name} must be {allowed}, or None to refuse nothing, got {v!r}")
