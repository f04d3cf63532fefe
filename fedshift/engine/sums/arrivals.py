"""Replies checked and summed as they arrive, in rounds whose first bad reply ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fedshift.engine.backends import Block, Reply, joined
from fedshift.engine.checks.gate import Admitted, Asked, Dropped, Gate
from fedshift.engine.checks.replies import check_finite
from fedshift.engine.sums.running import Fold
from fedshift.errors import DivergedError, InputError, TrainingError
from fedshift.tree import Parts, same_parts, size_in_bytes

# Replies checked together: their majority says what a reply looks like, and their sums are read
# from memory and written to it once.
SOME = 8
# Given a client and what it keeps of the round.
Keep = Callable[[int, Parts], object]


def _as_one(
    came: Iterable[Reply | Block], asked: Asked, fold: Fold
) -> tuple[Block | None, Iterator[Reply]]:
    """(one block of all clients asked, no reply) where all arrived in blocks of one form that were
    checked and summed in their processes; else (None, each client's reply).
    """
    summed = fold.elsewhere
    rest, blocks = iter(came), list[Block]()
    for one in rest:
        if not (isinstance(one, Block) and summed.keys() >= set(one.clients)):
            return None, _singly([*blocks, one], rest)
        blocks.append(one)
    clients = sorted(client for block in blocks for client in block.clients)
    looks = [block.first().update for block in blocks]
    if tuple(clients) == asked.clients and all(same_parts(look, looks[0]) for look in looks):
        return joined(blocks), iter(())
    return None, _singly([*blocks], rest)


def _singly(ahead: list[Reply | Block], rest: Iterator[Reply | Block]) -> Iterator[Reply]:
    while (one := ahead.pop(0) if ahead else next(rest, None)) is not None:
        yield from one.replies() if isinstance(one, Block) else (one,)
        del one  # while the next one is trained


def _once_each(replies: Iterable[Reply], asked: Asked) -> Iterator[Reply]:
    silent = set(asked.clients)
    for reply in replies:
        if reply.client not in silent:
            twice = reply.client in asked.clients
            raise TrainingError(
                f"client {reply.client} {'answered twice' if twice else 'was not asked'}"
            )
        silent.remove(reply.client)
        yield reply
        del reply  # while the next one is trained


def in_turn(
    gate: Gate, came: Iterable[Reply | Block], asked: Asked, fold: Fold,
    keep: Keep | None = None, some: int = SOME,
) -> Admitted:  # fmt: skip
    """Check replies in ascending client id, `some` at a time, whatever the order they arrive in.

    Good ones are added to `fold`, and what their clients keep is given to `keep`; without it, that
    stays in the replies. A reply waits only for clients of smaller id. Numbers that are not finite
    are looked for in the sums first, and only then in each reply.
    Raises TrainingError for the first client whose reply cannot be used: DivergedError where its
    numbers are not finite.
    """
    whole, replies = _as_one(came, asked, fold)
    if whole is not None:
        if keep:
            for client in whole.clients:
                keep(client, whole.changed)
        return Admitted((), (), whole)
    waiting: dict[int, Reply] = {}
    kept: list[Reply] = []
    left = [asked.clients[i : i + some] for i in range(0, len(asked.clients), some)]
    left.reverse()

    def let(clients: Sequence[int]) -> None:
        came = [waiting.pop(i) for i in clients if i in waiting]
        left = _taken(gate, came, asked._replace(clients=tuple(clients)), fold)
        if keep:
            for reply in left:
                keep(reply.client, reply.changed)
            left = [reply._replace(changed={}) for reply in left]
        kept.extend(left)

    for reply in _once_each(replies, asked):
        waiting[reply.client] = reply
        del reply
        while left and all(i in waiting for i in left[-1]):
            let(left.pop())
    while left:
        let(left.pop())
    return Admitted(tuple(kept), ())


def _whole(reply: Reply, fold: Fold) -> Reply:
    """The reply with placeholders for what was summed elsewhere, whose form the gate compares."""
    if not isinstance(reply.update, dict):
        return reply
    return reply._replace(update={**fold.elsewhere.get(reply.client, {}), **reply.update})


def _taken(
    gate: Gate,
    came: Sequence[Reply],
    asked: Asked,
    fold: Fold,
) -> Sequence[Reply]:
    """Check replies together, add them to the sums, and return what was not summed.

    Replies summed by one process (`engine.sums.partial`) were checked there.
    """
    if fold.elsewhere:
        if len(came) == len(asked.clients) and fold.together(asked.clients):
            return fold.take(came)
        came = [_whole(reply, fold) for reply in came]

    def look(bad: Sequence[Dropped] = ()) -> None:
        # Check every number of every reply, to name the first client that is refused.
        if bad := gate.admit(came, asked).bad or bad:
            raise _refusal(gate, bad[0], came, asked)

    admitted = gate.admit(came, asked, fold.telling(asked.clients))
    if admitted.bad:
        look(admitted.bad)
    try:
        left = fold.take(admitted.good)
    except TrainingError:
        look()
        raise
    if not fold.finite():
        look()
    return left


def _refusal(gate: Gate, bad: Dropped, came: Sequence[Reply], asked: Asked) -> TrainingError:
    """The error that a refused reply ends the run with: DivergedError for numbers not finite."""
    try:
        for reply in came:
            # Not replies refused for their size: an expanded tensor may be far larger in memory.
            if reply.client == bad.client and size_in_bytes(reply.update) <= gate.max_bytes:
                check_finite(reply, asked.infinite)
    except DivergedError:
        return DivergedError(bad.reason)
    except (InputError, RuntimeError, TypeError, AttributeError):
        pass  # no tensors at all: `bad` says so
    return TrainingError(bad.reason)
