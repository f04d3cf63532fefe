"""A look at what the clients of a federation registered, before any of them trains.

It says how much weight one dishonest client could get, which clients claim more than the cap allows
or other counts than they were dealt, and whether gradients fit the labels that were claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from fedshift.algorithms.method import Method
from fedshift.engine.run import Federation
from fedshift.errors import InputError
from fedshift.experiments.claims import audit_task
from fedshift.experiments.measures.caps import Suspicion, beyond, free_weights
from fedshift.experiments.task.preparing import Prepared
from fedshift.server.cap import capped
from fedshift.tree import Params

# The imagined liar claims MANY times the examples of all clients, but MOST at most: weights are
# defined for counts up to 1e18.
MANY, MOST = 1e6, 1e15
# The chance that an audit of an honest federation raises any false alarm.
ALARMS = 0.01
# The largest audit, in parameters times examples: a larger one takes minutes, and clients wait.
MOST_WORK = 1e11


def most_of_one(algorithm: Method, federation: Federation, table: Params) -> float:
    """The weight that the client of least weight could get by a lie.

    It claims very many examples, with the target's label shares.
    """
    server = algorithm.init(federation.params, federation.buffers, table)
    liar = int(free_weights(algorithm, server).argmin())
    lie = {name: column.clone() for name, column in table.items()}
    claim = min(MANY * float(table["n"].sum()), MOST)
    if "labels" in lie:
        target = torch.tensor(federation.gate.target, dtype=torch.float64)
        lie["labels"][liar] = (claim * target).round()
    lie["n"][liar] = lie["labels"][liar].sum() if "labels" in lie else claim
    server = algorithm.init(federation.params, federation.buffers, lie)
    return float(free_weights(algorithm, server)[liar])


def opening_event(
    prepared: Prepared, algorithm: Method, federation: Federation, table: Params,
    *, run: str, cap: float | None, cohort: int | None, dealt: bool,
) -> dict[str, Any]:  # fmt: skip
    """The event "claims" of a run; table: n [M] (and labels [M, K]) as the clients registered them.

    federation  as the server dealt it
    dealt       whether clients have the data that the server dealt, so that claims can be compared
    cap         the experiment's, see `cap_named`
    cohort      number of clients in a round, None for all
    """
    cap, clients = cap or 1.0, cohort or len(table["n"])
    most = most_of_one(algorithm, federation, table)
    server = algorithm.init(federation.params, federation.buffers, table)
    free = free_weights(algorithm, server)
    suspicions = list(beyond(free, table["n"], cap))
    inconsistent, audit = _audited(prepared, table, dealt)
    if dealt:
        suspicions += _other_counts(table, federation.table)
    odd, first = sorted([*suspicions, *inconsistent]), int(free.argmax())
    bounded = float(capped(free, cap, table["n"] > 0)[first])

    def named(client: int) -> dict[str, Any]:
        names = prepared.custom.clients
        return {"client": client, **({"name": names[client]} if names else {})}

    return {
        "event": "claims",
        "run": run,
        "cap": cap,
        "one_could_take": min(most, max(cap, 1.0 / clients)),
        "without_cap": most,
        "largest": {**named(first), "weight": float(free[first]), "capped": bounded},
        "audit": audit,
        "suspicions": [{**named(i), "reason": why} for i, why in odd],
    }


def _other_counts(table: Params, dealt: Params) -> Iterator[Suspicion]:
    """Clients that registered other counts than those of the data that they were dealt."""
    for i, (claimed, right) in enumerate(zip(table["n"], dealt["n"], strict=True)):
        # The client has not joined yet. Without examples it has no weight.
        if claimed == 0:
            continue
        if claimed != right:
            yield i, f"registered {claimed:,.0f} examples; the experiment deals it {right:,.0f}"
        elif "labels" in table and not torch.equal(table["labels"][i], dealt["labels"][i]):
            yield i, "registered other label counts than those of the data that it is dealt"


def _audited(prepared: Prepared, table: Params, dealt: bool) -> tuple[list[Suspicion], str]:
    """(clients whose claims do not fit their gradients, the result of the audit in a few words)."""
    params, buffers = prepared.model.init()
    work = sum(v.numel() for v in params.values()) * sum(len(c.y) for c in prepared.task.clients)
    if not dealt or "labels" not in table or work > MOST_WORK:
        why = "the server has no examples of the clients" if not dealt else "it takes minutes"
        return [], f"not made: {why if 'labels' in table else 'clients register no label counts'}"
    if bool((table["n"] == 0).any()):
        return [], "not made: it needs all clients, with examples"
    try:
        claims = table["labels"].numpy()
        findings = audit_task(prepared, params, buffers, claims, level=ALARMS / len(claims))
    except InputError as e:
        return [], f"not made: {e}"
    tally = Counter(one.verdict for one in findings)
    why = "its label counts do not fit the gradients of its data (p = {:.2g})"
    odd = [(f.client, why.format(f.p)) for f in findings if f.verdict == "inconsistent"]
    return odd, ", ".join(f"{number} {verdict}" for verdict, number in sorted(tally.items()))
