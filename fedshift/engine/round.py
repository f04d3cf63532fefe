"""One round, the same on every engine: opened before training, closed with the replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Dropped, Gate
from fedshift.engine.checks.replies import (
    Form,
    Limits,
    fault_in,
    finite,
    in_order,
    usual_form,
)
from fedshift.engine.sums import Sums
from fedshift.errors import DivergedError, InputError, TrainingError
from fedshift.seeds import key
from fedshift.server.cap import capped
from fedshift.server.combine import check_weights
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts, stack

States = Mapping[int, Parts]


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
    stage: Method
    ids: Tensor
    weights: Tensor
    asked: Tensor
    context: Parts
    skipped: str = ""
    cap: float = 1.0

    def message(self, client: int) -> Parts:
        """What the server sends to one client."""
        return self.stage.broadcast(self.context, client)

    def clients(self) -> list[int]:
        """The clients that are to train, ascending."""
        return self.ids[self.asked].tolist()

    def cohort(self) -> Params:
        """The clients that train, as the server's step reads them."""
        cap = torch.tensor(self.cap, dtype=torch.float64)
        return {"id": self.ids[self.asked], "weight": self.weights[self.asked], "cap": cap}


def open_round(algorithm: Method, server: Parts, ids: Tensor, t: int, cap: float = 1.0) -> Opened:
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


def weigh(stage: Method, server: Parts, ids: Tensor, cap: float) -> Tensor:
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


def sums_of(opened: Opened, server: Parts) -> Sums:
    """Empty sums over the clients asked, of the parts that the method needs summed."""
    cohort = opened.cohort()
    return Sums(cohort["id"], opened.stage.sums(server, cohort))


def form_of(opened: Opened, replies: Sequence[Reply]) -> Form:
    """The form of the round's updates, by these replies; at least one."""
    model = opened.stage.trained_model()
    fixed = frozenset[str]() if model is None else model.fixed
    parts = frozenset(opened.stage.reveals())
    return usual_form(replies, opened.message(replies[0].client), parts, fixed)


def admit(
    replies: Iterable[Reply], opened: Opened, gate: Gate, infinite: Params
) -> tuple[list[Reply], list[Dropped]]:
    """(usable replies by ascending client, clients that drop out, with reasons).

    A client that answers twice drops out: nothing tells which answer is genuine. A client that was
    not asked is reported, and its reply is not used.
    """
    limits = Limits(opened.t, gate, opened.message, infinite)
    came, bad = dict[int, Reply](), dict[int, Dropped]()
    for reply in in_order(replies, opened.clients()):
        fault = reply if isinstance(reply, Dropped) else fault_in(reply, None, limits)
        if isinstance(reply, Reply) and fault is None and reply.client not in bad:
            came[reply.client] = reply
        elif fault is not None:
            bad[fault.client] = fault
            came.pop(fault.client, None)
    form = form_of(opened, [*came.values()]) if came else None
    for client, reply in [*came.items()]:
        if fault := fault_in(reply, form, limits):
            bad[client] = fault
            came.pop(client)
    return [came[i] for i in sorted(came)], [bad[i] for i in sorted(bad)]


def close_round(
    opened: Opened,
    server: Parts,
    replies: Sequence[Reply],
    dropped: Sequence[Dropped],
    gate: Gate,
    table: Params,
    seed: int,
    sums: Sums | None = None,
) -> Round:
    """Close the round over the clients with usable replies; if others are missing, weigh anew.

    The result has no states yet. replies: ascending. dropped: all clients that were drawn and are
    missing. sums: what was summed of the replies already, for a gate that stops, where no client is
    missing; None: nothing was.

    The round is skipped, and the server's parts stay, if it was opened to be skipped, no client is
    left, the method has no weights over those present, a limit of the gate is exceeded, or the
    server's step fails or leaves numbers that are not finite or tensors of another form. With
    `on_bad` "stop", TrainingError (or the error of the step) ends the run instead.
    """
    # By client id: what is recorded must not depend on the order of answers.
    missing = tuple(sorted(dropped))
    if opened.skipped:
        return skip(opened, server, opened.skipped, missing)
    remaining, present = opened, tuple(reply.client for reply in replies)
    try:
        if not present:
            raise TrainingError(
                f"round {opened.t}: none of {len(missing)} clients sent an update that can be "
                f"used; client {missing[0].client}: {missing[0].reason}"
            )
        if present != tuple(opened.clients()):
            remaining = restrict_to(opened, server, present)
        # A gap to no target is NaN, and reads no rows.
        rows = {k: column[remaining.ids] for k, column in table.items()} if gate.target else {}
        if why := gate.lacking(len(present), gate.gap(rows, remaining.weights)):
            raise TrainingError(f"round {opened.t}: {why}")
        after, loss = _server_step(remaining, server, replies, seed, sums)
    except (RuntimeError, ValueError, LookupError) as e:
        # With all clients present, an InputError is a mistake in the configuration: no skip helps.
        if gate.on_bad == "stop" or (isinstance(e, InputError) and not missing):
            raise
        return skip(remaining, server, str(e) or type(e).__name__, missing)
    return Round(opened.t, after, {}, remaining.ids, remaining.weights, present, loss, missing)


def _server_step(
    opened: Opened, server: Parts, replies: Sequence[Reply], seed: int, sums: Sums | None
) -> tuple[Parts, float]:
    """(the server's parts after the round, the mean of the clients' losses)."""
    if sums is None:
        sums = sums_of(opened, server)
        replies = [Reply(reply.client, sums.add(reply)) for reply in replies]
    cohort = opened.cohort()
    updates = stack([reply.update for reply in replies]) | sums.parts() | {"cohort": cohort}
    step = opened.stage.server_update(server, updates, key(seed, "server", opened.t))
    after, loss = server | step, cohort["weight"] @ updates["report"]["loss"].double()
    # All of its state is looked at, not the model alone: an infinity in the optimiser's moments
    # would stop all learning. Torch broadcasts tensors of unequal shapes in a sum without an error.
    for part, tree in after.items():
        for name, v in tree.items():
            was = server.get(part, {}).get(name)
            if v is not was and not finite(v) and (was is None or finite(was)):
                raise DivergedError(
                    f"round {opened.t}: the server's step left non-finite numbers in \"{part}/"
                    f'{name}"; lower the learning rates, or set max_norm'
                )
            if was is not None and (v.shape != was.shape or v.dtype != was.dtype):
                raise TrainingError(
                    f'round {opened.t}: the server\'s step gave "{part}/{name}" another form'
                )
    return after, float(loss)


def before_rounds(server: Parts) -> Round:
    """Round 0 of a server in this state."""
    empty = torch.zeros(0)
    return Round(0, server, {}, empty.long(), empty.double(), (), float("nan"))


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
