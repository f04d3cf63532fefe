"""Replies of a round whose first bad one ends the run: used as they come, and let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fedshift.engine.backends import Reply
from fedshift.engine.gate import Admitted, Asked, Dropped, Gate
from fedshift.engine.replies import check_finite
from fedshift.errors import DivergedError, TrainingError

# Replies that pass the gate together: their majority says what a reply looks like, and their sums
# are read from and written to memory once.
SOME = 8


def in_turn(
    gate: Gate,
    replies: Iterable[Reply],
    asked: Asked,
    take: Callable[[Sequence[Reply]], Iterable[Reply]],
    some: int = SOME,
) -> Admitted:
    """Let replies, in any order, through the gate in ascending client id, `some` at a time.

    `take` is given those let through, and returns what is to be kept of them. Replies wait only for
    clients of smaller id. Raises TrainingError for the first client whose reply cannot be used:
    DivergedError where its numbers are not finite.
    """
    waiting: dict[int, Reply] = {}
    kept: list[Reply] = []
    left = [asked.clients[i : i + some] for i in range(0, len(asked.clients), some)]
    left.reverse()

    def let(clients: Sequence[int]) -> None:
        came = [waiting.pop(i) for i in clients if i in waiting]
        admitted = gate.admit(came, asked._replace(clients=tuple(clients)))
        if admitted.bad:
            raise _refusal(admitted.bad[0], came)
        kept.extend(take(admitted.good))

    silent = set(asked.clients)
    for reply in replies:
        if reply.client not in silent:
            twice = reply.client in asked.clients
            raise TrainingError(
                f"client {reply.client} {'answered twice' if twice else 'was not asked'}"
            )
        silent.remove(reply.client)
        waiting[reply.client] = reply
        del reply
        while left and all(i in waiting for i in left[-1]):
            let(left.pop())
    while left:
        let(left.pop())
    return Admitted(tuple(kept), ())


def _refusal(bad: Dropped, came: Sequence[Reply]) -> TrainingError:
    """What a reply that cannot be used ends the run with."""
    try:
        for reply in came:
            if reply.client == bad.client:
                check_finite(reply)
    except DivergedError:
        return DivergedError(bad.reason)
    except (RuntimeError, TypeError, AttributeError):  # no tensors at all: `bad` says so
        pass
    return TrainingError(bad.reason)
