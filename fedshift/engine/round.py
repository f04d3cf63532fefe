"""One round, the same on every engine: opened before training, closed with the replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.client.local import plan_all
from fedshift.client.plans import PlansOfClient, PlansOfGroup
from fedshift.data import ClientData
from fedshift.engine.backends import Block, Job
from fedshift.engine.checks.gate import Admitted, Asked, Dropped, Gate, first_not_finite, reshaped
from fedshift.engine.sums.running import RunningSums, stack_blocks
from fedshift.errors import DivergedError, InputError, TrainingError
from fedshift.seeds import key
from fedshift.server.cap import capped
from fedshift.server.combine import check_weights
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts

States = Mapping[int, Parts]
# How many clients' batches are drawn at a time: enough to save time, few enough to save memory.
AHEAD = 16


@sketched
class Round(NamedTuple):
    """The state after round t, the clients drawn, those that trained, and the weights.

    t        the round, from 1 on
    server   the server's parts, such as "params" and "buffers"
    states   what the clients keep, by id
    cohort   ids [C] of the clients drawn, ascending
    weights  [C]; all 0 if no client of the cohort has an example
    trained  ids of the clients that trained
    loss     the mean of the clients' training losses, by their weights
    dropped  clients that were drawn but are not in `cohort`, because a message was lost or a reply
             could not be used. In one process there are none, unless the gate drops clients
             (`Gate.on_bad`): otherwise a bad reply ends the run
    skipped  why the round was skipped, and left everything as it was; "" if it was not
    skips    how many rounds in a row were skipped, this one included
    """

    t: int
    server: Parts
    states: States
    cohort: Tensor
    weights: Tensor
    trained: tuple[int, ...]
    loss: float
    dropped: tuple[Dropped, ...] = ()
    skipped: str = ""
    skips: int = 0


class Opened(NamedTuple):
    """A round before training.

    t        the round
    stage    the method of this round
    ids      [C] of the clients drawn, ascending
    weights  [C]
    asked    [C] bool: which of them are to train
    context  the server's parts with the cohort's, from which messages are made
    skipped  why no client is asked, or ""
    cap      the largest weight that a client may have
    """

    t: int
    stage: Algorithm
    ids: Tensor
    weights: Tensor
    asked: Tensor
    context: Parts
    skipped: str = ""
    cap: float = 1.0

    def message(self, client: int) -> Parts:
        """What the server sends to one client."""
        return self.stage.broadcast(self.context, client)


def open_round(
    algorithm: Algorithm, server: Parts, ids: Tensor, t: int, cap: float = 1.0
) -> Opened:
    """Weigh the cohort `ids` (ascending) of round t.

    Weights come before training, from the server's table: a client of weight exactly 0 need not
    train. A cohort without examples has no weights, and its round is skipped. cap: as in `weigh`.
    Raises InputError if no client at all has an example.
    """
    stage = algorithm.at(t)
    if not has_examples(server, ids):
        no_weights = torch.zeros(len(ids), dtype=torch.float64)
        why = f"round {t}: no client of its cohort has an example"
        return Opened(t, stage, ids, no_weights, no_weights > 0, server, why, cap)
    weights = weigh(stage, server, ids, cap)
    parts = server | {"cohort": {"id": ids, "weight": weights}}
    return Opened(t, stage, ids, weights, stage.trains(weights), parts, cap=cap)


def weigh(stage: Algorithm, server: Parts, ids: Tensor, cap: float) -> Tensor:
    """The weights [C] of the clients `ids` by the method, none above the cap (or 1/C, if more).

    All weights pass through here on their way from a rule to a round. Raises InputError for numbers
    that cannot be weights.
    """
    weights = stage.weigh(server, ids)
    check_weights(weights, len(ids))
    n = server.get("table", {}).get("n")
    return capped(weights, cap, None if n is None else n[ids] > 0)


def has_examples(server: Parts, ids: Tensor) -> bool:
    """Whether one of these clients registered an example; True if the server has no table.

    Raises InputError if no client at all did.
    """
    n = server.get("table", {}).get("n")
    # A method without a table must see to it in its weights.
    if n is None or bool(n[ids].any()):
        return True
    if not n.any():
        raise InputError(
            f"none of the {len(n)} clients has an example (importance 0 counts as none), so "
            "there is nothing to train on; give one of them data"
        )
    return False


def restrict_to(opened: Opened, server: Parts, present: Sequence[int]) -> Opened:
    """The round over the present clients alone (ascending), with new weights.

    Their messages stay as they were sent, and all of them count as asked. Raises TrainingError if
    the method has no weights over them.
    """
    ids = torch.tensor(present, dtype=torch.int64)
    try:
        weights = weigh(opened.stage, server, ids, opened.cap)
    except InputError as e:
        raise TrainingError(
            f"round {opened.t}: clients {list(present)} are left, and there are no weights over "
            f"them: {e}"
        ) from e
    return opened._replace(ids=ids, weights=weights, asked=torch.ones(len(ids), dtype=torch.bool))


def question(opened: Opened, infinite: Params | None = None) -> Asked:
    """What the gate must know of a round: clients, messages, parts; infinite: as in `Asked`."""
    asked = tuple(opened.ids[opened.asked].tolist())
    model = ask(opened.stage, Capabilities.trained_model)
    fixed = frozenset[str]() if model is None else model.fixed
    parts = frozenset(opened.stage.reveals())
    return Asked(opened.t, asked, opened.message, parts, fixed, infinite)


def job_of(
    stage: Algorithm, message: Parts, state: Parts, data: ClientData, client: int, t: int, seed: int
) -> Job:
    """One client's job in round t; its batches depend on (seed, round, client, phase) alone."""
    return Job(client, message, state, data, plan_all(stage.phases(), data, t, seed, client), t)


def jobs_of(
    opened: Opened, clients: Sequence[ClientData], state_of: Callable[[int], Parts], seed: int
) -> Iterator[Job]:
    """The jobs of the clients asked, in ascending id; each state is read when its job is made.

    Batches are those of `job_of`, drawn when they are first used, for `AHEAD` clients at a time.
    """
    asked, phases = opened.ids[opened.asked].tolist(), opened.stage.phases()
    for phase in phases.values():
        phase.rate(opened.t)  # raises here, so that no client is blamed for a bad schedule
    for start in range(0, len(asked), AHEAD):
        group = {i: clients[i] for i in asked[start : start + AHEAD]}
        plans = PlansOfGroup(phases, opened.t, seed, group)
        for i, data in group.items():
            yield Job(i, opened.message(i), state_of(i), data, PlansOfClient(plans, i), opened.t)


def sums_of(opened: Opened, server: Parts) -> RunningSums:
    """Empty running sums over the clients asked, of the parts that the method needs summed."""
    return RunningSums.of(
        opened.stage, server, opened.ids[opened.asked], opened.weights[opened.asked], opened.cap
    )


def close_round(
    opened: Opened,
    server: Parts,
    blocks: Sequence[Block],
    seed: int,
    sums: RunningSums | None = None,
) -> tuple[Parts, float]:
    """Aggregate: (the server's parts after the round, the mean training loss by weights).

    blocks: those of all clients that were asked, in any order, after the gate. sums: the sums of
    the parts that these blocks no longer have; None: nothing has been summed yet.
    """
    if sums is None:
        sums = sums_of(opened, server)
        blocks = sums.add(sorted(blocks, key=lambda block: block.clients))
    updates = stack_blocks(blocks, [block.updates for block in blocks]) | sums.parts()
    weights = opened.weights[opened.asked]
    cap = torch.tensor(opened.cap, dtype=torch.float64)
    updates["cohort"] = {"id": opened.ids[opened.asked], "weight": weights, "cap": cap}
    changed = opened.stage.server_update(server, updates, key(seed, "server", opened.t))
    return server | changed, float(weights @ updates["report"]["loss"].double())


def before_rounds(server: Parts) -> Round:
    """Round 0 of a server in this state."""
    empty = torch.zeros(0)
    return Round(0, server, {}, empty.long(), empty.double(), (), float("nan"))


def settle(
    opened: Opened,
    server: Parts,
    admitted: Admitted,
    dropped: Sequence[Dropped],
    gate: Gate,
    table: Params,
    seed: int,
    sums: RunningSums | None = None,
) -> Round:
    """Close the round over the clients with usable replies; if others are missing, weigh anew.

    The result has no states yet. dropped: all clients that were drawn and are missing. sums: as in
    `close_round`; only for a gate that stops, where no client is missing.

    The round is skipped, and the server's parts stay, if it was opened to be skipped, no client is
    left, the method has no weights over those present, a limit of the gate is exceeded, or the
    server's step fails or leaves numbers that are not finite or tensors of another form. With
    `on_bad` "stop", TrainingError (or the error of the step) ends the run instead.
    """
    # By client id: what is recorded must not depend on the order of answers.
    missing = tuple(sorted(dropped))
    if opened.skipped:
        return skip(opened, server, opened.skipped, missing)
    remaining = opened
    present = admitted.clients
    try:
        if not present:
            raise _no_update(opened, missing)
        if admitted.bad:
            remaining = restrict_to(opened, server, present)
        _check_limits(remaining, gate, table, len(present))
        after, loss = close_round(remaining, server, admitted.good, seed, sums)
        if odd := first_not_finite(after, server):
            raise DivergedError(
                f'round {opened.t}: the server\'s step left non-finite numbers in "{odd}"; lower '
                "the learning rates, or set max_norm"
            )
        if odd := reshaped(after, server):
            raise TrainingError(f'round {opened.t}: the server\'s step gave "{odd}" another form')
    except (RuntimeError, ValueError, LookupError) as e:
        # With all clients present, an InputError is a mistake in the configuration: no skip helps.
        if gate.on_bad == "stop" or (isinstance(e, InputError) and not missing):
            raise
        return skip(remaining, server, str(e) or type(e).__name__, missing)
    return Round(opened.t, after, {}, remaining.ids, remaining.weights, present, loss, missing)


def skip(opened: Opened, server: Parts, why: str, dropped: tuple[Dropped, ...] = ()) -> Round:
    """A skipped round, which leaves everything as it was; it has no states yet."""
    ids, weights = opened.ids, opened.weights
    return Round(opened.t, server, {}, ids, weights, (), float("nan"), dropped, skipped=why)


def count_skips(played: Round, before: Round, gate: Gate, rounds: int | None = None) -> Round:
    """The round, with the number of rounds in a row that were skipped.

    Raises TrainingError if that is as many as the gate allows, or all `rounds` of a run. A cohort
    without examples is drawn by chance, and is no fault: it ends no run that has rounds left.
    """
    if not played.skipped:
        return played
    skips, drawn_empty = before.skips + 1, not played.weights.any()
    if (skips >= gate.max_skips and not drawn_empty) or skips == rounds:
        subject = f"{skips} rounds in a row were" if skips > 1 else "the only round was"
        raise TrainingError(f"{subject} skipped; the last one: {played.skipped}")
    return played._replace(skips=skips)


def _no_update(opened: Opened, dropped: Sequence[Dropped]) -> TrainingError:
    return TrainingError(
        f"round {opened.t}: none of {len(dropped)} clients sent an update that can be used; client "
        f"{dropped[0].client}: {dropped[0].reason}"
    )


def _check_limits(opened: Opened, gate: Gate, table: Params, used: int) -> None:
    # A gap to no target is NaN, and reads no rows.
    rows = {name: column[opened.ids] for name, column in table.items()} if gate.target else {}
    if why := gate.lacking(used, gate.gap(rows, opened.weights)):
        raise TrainingError(f"round {opened.t}: {why}")
