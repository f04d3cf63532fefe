"""The cap on a client's weight: a default where an experiment sets none, and clients above it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedshift.algorithms.method import Method as Algorithm
from fedshift.algorithms.method import rows
from fedshift.engine.preflight.method import pals_of
from fedshift.experiments.config.schema import Method, Training
from fedshift.server.cap import capped
from fedshift.tree import Parts

# A warning says so if a client claims more than this many times the others' median of examples.
ODD = 10.0
# A warning is due if the rule would give a client more than this many times the cap. Sites of
# similar size differ by a few percent, and exceed a cap by as little: at this factor, one of two
# sites has 22 % more rows. A liar gains nothing by staying below, since the cap holds all the same.
# With a cap near 1 the mark is halfway to 1, because no weight is above 1.
MATTERS = 1.1
# (a client, why it is suspicious)
Suspicion = tuple[int, str]

# The default cap: a client may count as much as three average ones, and at most as much as all
# others together.
AVERAGE, HALF = 3.0, 0.5


def cap_named(method: Method, training: Training) -> float | None:
    """The cap that the experiment names, by the method or in [training]; None if it does not."""
    given = (method.options.get("cap"), training.max_weight)
    numbers = [float(cap) for cap in given if cap is not None]
    return min(numbers) if numbers else None


def with_cap(method: Method, training: Training, clients: int) -> tuple[Training, str]:
    """([training] with a cap in `max_weight`, a sentence that says which cap and why).

    The default for C clients in a round is min(1/2, 3/C), but at least 1/C. An experiment that
    names a cap keeps it. clients: the number of all clients.
    """
    if cap_named(method, training) is not None:
        return training, cap_text(method, training, clients)
    present = _in_a_round(training, clients)
    cap = max(1.0 / present, min(HALF, AVERAGE / present))
    training = training.model_copy(update={"max_weight": cap})
    if present == 1:
        return training, cap_text(method, training, clients)
    return training, (
        f"No client gets a weight above {cap:.3g} of 1, whatever it claims: training.max_weight in "
        f"experiment.toml, chosen for {present} clients in a round (as much as three average ones, "
        "at most as much as all others together). Set it there, to 1 for no limit."
    )


def cap_text(method: Method, training: Training, clients: int) -> str:
    """A sentence on what the experiment's cap means in a round; clients: the number of them all.

    One of C clients in a round has a weight of at least 1/C, so a smaller cap acts as 1/C
    (`fedshift.server.cap`).
    """
    named, clients = cap_named(method, training), _in_a_round(training, clients)
    if clients == 1:
        return "A round has one client, which has all of its weight: no cap can bound that."
    if named is None or named == 1.0:
        why = "as the experiment says" if named else "since the experiment names none"
        return (
            f"No cap, {why}: one client can have all the weight of a round, by what it claims. Set "
            "training.max_weight in experiment.toml to bound that."
        )
    if named < 1.0 / clients:
        return (
            f"No client gets a weight above 1/{clients}: {named:.3g} is less than 1/{clients}, the "
            f"least for {clients} clients in a round."
        )
    return f"No client gets a weight above {named:.3g}, as the experiment says."


def _in_a_round(training: Training, clients: int) -> int:
    return min(training.cohort or clients, clients)


def free_weights(algorithm: Algorithm, server: Parts) -> Tensor:
    """The weights [M] that the method's rule would give all clients if there were no cap."""
    everyone, rule = torch.arange(len(server["table"]["n"])), pals_of(algorithm)
    if rule is not None and rule.cap is not None:
        return replace(rule, cap=None, strict=True)(rows(server, everyone))
    return algorithm.weigh(server, everyone)


def beyond(free: Tensor, n: Tensor, cap: float) -> Iterator[Suspicion]:
    """Clients whose uncapped weight, in free [M], is far above the cap: `MATTERS` times, or more.

    With a cap near 1 the mark is (1 + cap) / 2. Without a cap, 1/2 stands for it. n [M]: the number
    of examples that they claim, 0 for clients that have not joined yet.
    """
    limit, bounded = HALF, capped(free, cap, n > 0)
    if cap < 1.0:  # a cap below an even share acts as an even share
        limit = max(cap, 1.0 / max(int((n > 0).sum()), 1))
    mark = min(MATTERS * limit, (1.0 + limit) / 2)
    for i in (free > mark).nonzero().flatten().tolist() if len(n) > 1 else ():
        left = f"the cap leaves it {bounded[i]:.3f}" if cap < 1.0 else "no cap bounds it"
        why = f"by what it registered it would have {free[i]:.3f} of the weight; {left}"
        others = torch.cat([n[:i], n[i + 1 :]])
        # Clients that have not joined must not lower the median.
        others = others[others > 0] if (others > 0).any() else others
        times = float(n[i] / others.median().clamp(min=1.0))
        more = f". It claims {n[i]:,.0f} examples, {times:,.0f} times the median of the others"
        yield i, f"{why}{more * (times > ODD)}"
