"""Jobs and replies as trees, for pipes between processes of one machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from fedshift.client.local import Local
from fedshift.client.plans import Drawn, Draws
from fedshift.data import ClientData, Plan, Surveyed
from fedshift.engine.backends import FAILED, Block, Job, Reply
from fedshift.engine.fold import Share
from fedshift.engine.replies import odd_kind
from fedshift.engine.shares import apart
from fedshift.engine.wire import in_a_row, inside, under
from fedshift.errors import InputError
from fedshift.tree import Params, Parts, size_in_bytes

Jobs = tuple[Job, ...]
# Bytes that the answers of a share may take.
ROOM = 1 << 28


def cut(jobs: Jobs, count: int) -> Iterator[Jobs]:
    """Equal shares, so many unless a share's answers would take more than `ROOM`."""
    known: dict[int, int] = {}  # most of a message is one tree for all clients

    def size(parts: Parts) -> int:
        total = 0
        for tree in filter(None, parts.values()):  # clients that keep nothing say so in empty ones
            if id(tree) not in known:
                known[id(tree)] = size_in_bytes({"": tree})
            total += known[id(tree)]
        return total

    # About as much comes back as was sent, for each client.
    sent = max((size(job.message) + size(job.state) for job in jobs), default=1)
    each = max(1, min(-(-len(jobs) // count), ROOM // max(1, sent)))
    return (jobs[i : i + each] for i in range(0, len(jobs), each))


def check_clients(clients: Sequence[ClientData], jobs: Jobs) -> None:
    """InputError where jobs have other examples than those that workers were forked with."""
    if isinstance(clients, Surveyed):  # made on demand: no two are the same object
        return
    for job in jobs:
        if job.client >= len(clients) or not _same(clients[job.client], job.data):
            raise InputError(
                f"client {job.client} has other examples than the one that these workers were made "
                "for; make them with the clients of the federation that runs"
            )


def _same(one: ClientData, other: ClientData) -> bool:
    if one is other:
        return True
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def named(jobs: Jobs) -> str:
    """Their clients, for a message: the first five."""
    ids = ", ".join([*(str(job.client) for job in jobs[:5]), *(["..."] if len(jobs) > 5 else [])])
    return f"clients {ids}" if len(jobs) > 1 else f"client {ids}"


def by_themselves(jobs: Jobs) -> Jobs:
    """Jobs whose plans are drawn together, without those of jobs that go elsewhere."""
    draws = dict[tuple[int, int, int], Draws]()
    found: list[Job] = []
    for job in jobs:
        plans = job.plans
        if isinstance(plans, Drawn):
            old = plans.draws
            drawn = _together(draws, (old.phases, old.t, old.seed), job.client, job.data)
            job = Job(job.client, job.message, job.state, job.data, drawn, job.t, job.how)
        found.append(job)
    return tuple(found)


def _together(
    draws: dict[tuple[int, int, int], Draws], how: tuple[Mapping[str, Local], int, int],
    client: int, data: ClientData,
) -> Drawn:  # fmt: skip
    """A client's plans, drawn with those that were added before of the same phases and seed for its
    round.
    """
    phases, t, seed = how
    found = draws.get((id(phases), t, seed))
    if found is None:
        found = draws[id(phases), t, seed] = Draws(phases, t, seed, {})
    found.clients[client] = data
    return Drawn(found, client)


def packed(jobs: Jobs, message: Parts) -> tuple[list[Any], list[Parts]]:
    """Jobs for a pipe, but for what the message before each, first this one, holds already.

    Of plans that are not drawn yet, how to draw them. Jobs that differ by their client alone are
    packed as one.
    """
    about, trees = [], []
    for job, *others in in_a_row(jobs, _alike):
        new = {k: v for k, v in job.message.items() if message.get(k) is not v}
        tree = under("message", new) | under("state", job.state)
        if isinstance(job.plans, Drawn):
            drawing: Any = job.plans.draws.phases, job.plans.draws.seed
        else:
            drawing = {k: p[3:] for k, p in job.plans.items()}
            tree |= under("plan", {k: _tensors(p) for k, p in job.plans.items()})
        clients = (job.client, *(other.client for other in others))
        about.append((clients, job.t, tuple(job.message), drawing, job.how))
        trees.append(tree)
        message = job.message
    return about, trees


def _alike(one: Job, other: Job) -> bool:
    """Whether jobs differ by their client, and its examples, alone."""
    a, b = one.plans, other.plans
    if not (isinstance(a, Drawn) and isinstance(b, Drawn)) or any(other.state.values()):
        return False
    alike = one.t == other.t and one.how is other.how and a.draws.seed == b.draws.seed
    alike = alike and a.draws.phases is b.draws.phases
    for x, y in ((one.message, other.message), (one.state, other.state)):
        alike = alike and [*x] == [*y]
    told = map(is_, one.message.values(), other.message.values())
    return alike and all(told) and not any(one.state.values())


def _tensors(plan: Plan) -> Params:
    return {"rows": plan.rows, "weight": plan.weight, "lr": plan.lr}


def unpacked(
    about: list[Any], trees: Sequence[Parts], message: Parts, clients: Sequence[ClientData]
) -> list[Job]:
    """What `packed` packed."""
    jobs, draws = [], dict[tuple[int, int, int], Draws]()
    for (alike, t, names, drawing, how), tree in zip(about, trees, strict=True):
        held = message | inside("message", tree)
        message = {name: held[name] for name in names}
        state, plans = inside("state", tree), inside("plan", tree)
        drawn: Mapping[str, Plan]
        if not isinstance(drawing, tuple):
            drawn = {
                k: Plan(p["rows"], p["weight"], p["lr"], *drawing[k]) for k, p in plans.items()
            }
        for client in alike:
            data = clients[client]
            if isinstance(drawing, tuple):
                drawn = _together(draws, (drawing[0], t, drawing[1]), client, data)
            # Dictionaries of its own: one that is written to is no other client's.
            own = {part: dict(tree) for part, tree in state.items()}
            jobs.append(Job(client, dict(message), own, data, drawn, t, how))
    return jobs


def packed_replies(came: Sequence[Reply | Block], share: Share | None) -> tuple[Any, list[Parts]]:
    """Replies for a pipe, and the sums over them that were made here."""
    plain = [one for whole in came for one in _plain(whole)]
    trees = [under("update", one[1]) | under("changed", one[2]) for one in plain]
    summed = None if share is None else (share.clients, share.kinds)
    trees += [] if share is None else [share.totals]
    return ([(one[0], one.t) for one in plain], summed), trees


def unpacked_replies(
    about: Any, trees: Sequence[Parts]
) -> tuple[list[Reply | Block], Share | None]:
    """What `packed_replies` packed, `apart`."""
    plain, summed = about
    came: list[Reply | Block] = []
    for (who, t), tree in zip(plain, trees[: len(plain)], strict=True):
        if isinstance(who, tuple):
            came.append(Block(who, inside("update", tree), inside("changed", tree), t))
        else:
            came.append(_reply_of(who, t, tree))
    share = None if summed is None else Share(summed[0], trees[-1], summed[1])
    return list(apart(came, share)), share


def _reply_of(client: int, t: int, parts: Parts) -> Reply:
    # What a client keeps outlives the round; as views it would keep the update alive, too.
    changed = {k: {n: v.clone() for n, v in t.items()} for k, t in inside("changed", parts).items()}
    return Reply(client, inside("update", parts), changed, t)


def _plain(came: Reply | Block) -> Sequence[Reply | Block]:
    """What came, or as each client's failure what cannot travel or would arrive as another kind."""
    for parts, did in ((came[1], "sent"), (came[2], "would keep")):
        if odd := odd_kind(parts):
            clients = came.clients if isinstance(came, Block) else (came.client,)
            reason = torch.frombuffer(bytearray(f"{did} {odd}".encode()), dtype=torch.uint8)
            return [Reply(client, {FAILED: {"reason": reason}}, {}, came.t) for client in clients]
    return [came]
