"""The method: whether a federation has what its phases, its router and its schedules need."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from fedshift.algorithms.method import Method, rows
from fedshift.client.objectives import Term
from fedshift.client.origin import client_logits
from fedshift.client.prototypes import features_of
from fedshift.engine.federation import Federation
from fedshift.engine.preflight.network import first_with_examples
from fedshift.errors import InputError, NeedlessWarning
from fedshift.outputs import dry_pass
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from fedshift.tree import Params, Parts


@torch.inference_mode(False)
def check_router(algorithm: Method, federation: Federation, cohort: int | None = None) -> None:
    """InputError if the method trains a router, and this federation cannot train one.

    The network must have N client logits, and a round more than one client (`check_company`).
    """
    if not algorithm.trains_router():
        return
    check_company(algorithm, len(federation.clients), cohort)
    data = first_with_examples(federation)
    if data is not None:
        outputs = dry_pass(algorithm.model, federation.params, federation.buffers, data.x[:2])
        client_logits(outputs, len(federation.clients))


@torch.inference_mode(False)
def check_features(algorithm: Method, federation: Federation) -> None:
    """InputError if the method reads features that the network does not return.

    A client's first state is made as well, because methods such as FedPAC read features there.
    """
    data, params, buffers = first_with_examples(federation), federation.params, federation.buffers
    if data is None:
        return
    if any(term.reads_features() for term in objectives_of(algorithm)):
        features_of(dry_pass(algorithm.model, params, buffers, data.x[:2]))
    algorithm.init_client(params, buffers, data)


def check_company(algorithm: Method, clients: int, cohort: int | None) -> None:
    """InputError for a router that cannot learn, because rounds have one client of several.

    Its softmax runs over the round's clients. Over a single one it is 1 whatever the logits are,
    and its gradient is 0. With one client in all the router is right without learning.
    """
    alone = cohort == 1 and clients > 1
    if alone and algorithm.trains_router():
        raise InputError(
            f"a cohort of 1 client of {clients} trains no router: it learns to tell a round's "
            "clients apart; give 2 or more, or a method without a router, as fedper"
        )


def check_whole_models(algorithm: Method, cure: str, *, sent: bool = True) -> None:
    """InputError if clients would be sent the whole model although label sets are private.

    The head has a row for each label, and the rows that move tell which labels others have. sent:
    whether clients are sent the whole model at all.
    """
    rules = algorithm.label_rules() if sent else None
    if rules is not None and rules["mode"] == "private":
        raise InputError(
            'mode = "private" keeps rows of the head from clients that lack their labels, and '
            f"clients that score the server's model are sent all of them; {cure}"
        )


def check_training(algorithm: Method, params: Params, rounds: int) -> None:
    """Raise InputError for an objective that reads no examples, and for phases that train nothing.

    Also for a phase that names parameters which the network does not have. Only the phases of the
    first and the last round are checked; a mistake in a stage between them shows when it trains.
    """
    for term in objectives_of(algorithm):
        if not term.reads_data():
            raise InputError(
                f"the objective {term} does not depend on the clients' examples, so nothing would "
                f"be learned; add a loss, CrossEntropy() + {term}"
            )
    for stage in (algorithm.at(1), algorithm.at(max(1, rounds))):
        model = stage.trained_model()
        if model is None:
            continue
        initial = params if model is algorithm.model else model.init()[0]
        for phase in stage.phases().values():
            phase.check(model, initial)


def check_batches(algorithm: Method, federation: Federation) -> None:
    """Raise InputError for a client with a batch of one example, where BatchNorm takes none."""
    stage, n = algorithm.at(1), federation.table.get("n")
    model, data = stage.trained_model(), first_with_examples(federation)
    if model is None or not model.mixes or data is None or n is None:
        return
    alone = [(p.batch, i) for p in stage.phases().values() for i in p.leaves_one(n).nonzero()[:, 0]]
    if not alone:
        return
    first = (federation.params, federation.buffers) if model is algorithm.model else model.init()
    try:
        model.train(*first, data.x[:1])
    except ValueError as e:
        # Recognise it by its text, since torch has no error class for it.
        if "more than 1 value" not in str(e):
            raise
        size, client = alone[0]
        count = int(n[client])
        sizes = (b for far in range(1, 2 + size) for b in (size + far, size - far) if b > 1)
        other = next((b for b in sizes if count % b != 1), None)
        cure = f"use another batch size, such as {other}" if other else "leave this client out"
        raise InputError(
            f"client {int(client)} has n = {count} examples, of which a batch size of {size} "
            f"leaves one, and BatchNorm cannot normalise that: {cure}, or use GroupNorm"
        ) from e


def check_schedule(algorithm: Method, first: int, last: int) -> None:
    """Raise the error of a schedule that ends early or falls below 0; now, not after days."""
    previous: Method | None = None
    # The last round first: there, a schedule with a fixed end says what it was made for.
    for t in range(last, first - 1, -1):
        stage = algorithm.at(t)
        if stage is not previous:  # once per stage: there may be a million rounds
            previous, phases = stage, [p for p in stage.phases().values() if callable(p.lr)]
        for phase in phases:
            phase.rate(t)


def objectives_of(method: Any) -> Iterator[Term]:
    """The objectives of a method, and of the methods that it wraps."""
    for one in fields(method) if is_dataclass(method) else ():
        value = getattr(method, one.name)
        if isinstance(value, Term):
            yield value
        elif hasattr(value, "client_update"):
            yield from objectives_of(value)


def pals_of(algorithm: Method) -> Pals | None:
    """The FedPALS weight rule of a method, or of the one that it wraps; None for other weights."""
    combine, inner = (getattr(algorithm, name, None) for name in ("combine", "inner"))
    if isinstance(combine, Mean):
        return combine.weights if isinstance(combine.weights, Pals) else None
    return None if inner is None else pals_of(inner)


def warn_of_ess(algorithm: Method, server: Parts, clients: int) -> None:
    """Warn of an `ess` that changes nothing, because lambda = 0 has as much over all clients.

    Not for rounds that draw cohorts: each of them has other weights.
    """
    rule = pals_of(algorithm)
    if rule is not None and rule.ess is not None:
        note = rule.solved(rows(server, torch.arange(clients))).note
        if note:
            warnings.warn(note, NeedlessWarning, stacklevel=3)
