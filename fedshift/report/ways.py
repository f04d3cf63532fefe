"""The ways to answer a query if clients serve models of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """A way to answer: its label, and its key in a summary's "last"."""

    label: str
    key: str


WAYS = (
    Way("own client's model (average accuracy)", "average_accuracy"),
    Way("worst client's own model", "worst_accuracy"),
    Way("one global model", "global_accuracy"),
    Way("vote of all models", "vote_accuracy"),
    Way("routed to the client of largest posterior", "routed_posterior"),
    Way("routed by density ratio", "routed_density"),
    Way("all models, mixed by the posterior", "mixture_accuracy"),
    Way("routed, router refitted", "refitted_accuracy"),
    Way("routed, router from moments", "moment_accuracy"),
    Way("routed to where the query comes from (oracle)", "oracle_routed"),
    Way("right client found by the router", "router_accuracy"),
    Way("... by the refitted router", "refitted_router_accuracy"),
    Way("... by the router from moments", "moment_router_accuracy"),
)


def over_rounds(rounds: Sequence[int]) -> str:
    """The rounds of one or several runs in words: "last round", "last 2 to 5 rounds"."""
    low, high = min(rounds), max(rounds)
    if high == 1:
        return "last round"
    return f"last {high} rounds" if low == high else f"last {low} to {high} rounds"
