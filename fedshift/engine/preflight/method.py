"""The method: what its phases, its router and its schedules need of a federation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from fedshift.algorithms.base import Algorithm, Capabilities, ask, rows
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
def check_router(algorithm: Algorithm, federation: Federation, cohort: int | None = None) -> None:
    """InputError unless a router can be trained, where the method trains one.

    The network must have N client logits, and a round more clients than one, see `check_company`.
    """
    if not ask(algorithm, Capabilities.trains_router):
        return
    check_company(algorithm, len(federation.clients), cohort)
    data = first_with_examples(federation)
    if data is not None:
        outputs = dry_pass(algorithm.model, federation.params, federation.buffers, data.x[:2])
        client_logits(outputs, len(federation.clients))


@torch.inference_mode(False)
def check_features(algorithm: Algorithm, federation: Federation) -> None:
    """InputError for a method that looks at what the network does not return beside its logits.

    A client's first state is made on trial, since methods such as FedPAC look there.
    """
    data, params, buffers = first_with_examples(federation), federation.params, federation.buffers
    if data is None:
        return
    if any(term.reads_features() for term in objectives_of(algorithm)):
        features_of(dry_pass(algorithm.model, params, buffers, data.x[:2]))
    algorithm.init_client(params, buffers, data)


def check_company(algorithm: Algorithm, clients: int, cohort: int | None) -> None:
    """InputError for a router that no round can move: its softmax runs over the round's cohort.

    Over one client of several it is 1 whatever the logits, and its gradient 0. With one client in
    all there is nothing to learn, and the router is right.
    """
    alone = cohort == 1 and clients > 1
    if alone and ask(algorithm, Capabilities.trains_router):
        raise InputError(
            f"a cohort of 1 client of {clients} trains no router: it learns to tell the clients of "
            "a round apart; give a cohort of 2 or more, or a method without a router, as fedper"
        )


def check_whole_models(algorithm: Algorithm, cure: str, *, sent: bool = True) -> None:
    """InputError where no client may have the server's whole model: label sets are private.

    Its head has the rows of all labels: which of them move tells what others hold. sent: whether
    clients are sent it at all.
    """
    rules = ask(algorithm, Capabilities.label_rules) if sent else None
    if rules is not None and rules["mode"] == "private":
        raise InputError(
            'mode = "private" keeps rows of the head from clients that lack their labels, and '
            f"clients that score the server's model are sent all of them; {cure}"
        )


def check_training(algorithm: Algorithm, params: Params, rounds: int) -> None:
    """Raise InputError for a loss without examples, and for a phase that trains no parameter.

    Also for a phase that names parameters which the network lacks. Only the phases of the first and
    the last round are looked at: what is wrong with stages between them shows when they train.
    """
    for term in objectives_of(algorithm):
        if not term.reads_data():
            raise InputError(
                f"the objective {term} does not depend on the clients' examples, so nothing would "
                f"be learned; add a loss, CrossEntropy() + {term}"
            )
    for stage in (algorithm.at(1), algorithm.at(max(1, rounds))):
        model = ask(stage, Capabilities.trained_model)
        if model is None:
            continue
        initial = params if model is algorithm.model else model.init()[0]
        for phase in stage.phases().values():
            phase.check(model, initial)


def check_schedule(algorithm: Algorithm, first: int, last: int) -> None:
    """Raise now, not after days, the error of a schedule that ends early or falls below 0."""
    previous: Algorithm | None = None
    # The last round first: a schedule that knows its end says what it was made for.
    for t in range(last, first - 1, -1):
        stage = algorithm.at(t)
        if stage is not previous:  # a million rounds of one stage ask for its phases once
            previous, phases = stage, [p for p in stage.phases().values() if callable(p.lr)]
        for phase in phases:
            phase.rate(t)


def objectives_of(method: Any) -> Iterator[Term]:
    """The losses of a method and of those within it."""
    for one in fields(method) if is_dataclass(method) else ():
        value = getattr(method, one.name)
        if isinstance(value, Term):
            yield value
        elif hasattr(value, "client_update"):
            yield from objectives_of(value)


def pals_of(algorithm: Algorithm) -> Pals | None:
    """The FedPALS rule of a method, or of the one that it wraps; None for other weights."""
    combine, inner = (getattr(algorithm, name, None) for name in ("combine", "inner"))
    if isinstance(combine, Mean):
        return combine.weights if isinstance(combine.weights, Pals) else None
    return None if inner is None else pals_of(inner)


def warn_of_ess(algorithm: Algorithm, server: Parts, clients: int) -> None:
    """Warn where an ESS fraction is asked for that lambda = 0 has already, over all clients.

    Not for rounds that draw cohorts: each has weights of its own.
    """
    rule = pals_of(algorithm)
    if rule is not None and rule.ess is not None:
        note = rule.solved(rows(server, torch.arange(clients))).note
        if note:
            warnings.warn(note, NeedlessWarning, stacklevel=3)
