"""What the clients of a federation registered, looked at before any of them trains.

How much one dishonest client could take, who has claimed more than it may have or other counts than
the experiment deals it, and whether gradients fit the labels that were claimed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from fedshift.algorithms.base import Algorithm
from fedshift.engine.run import Federation
from fedshift.errors import InputError
from fedshift.experiments.claims import audit_task
from fedshift.experiments.config.caps import Suspicion, beyond, cap_named, free_weights
from fedshift.experiments.config.schema import Config
from fedshift.experiments.task.preparing import Prepared
from fedshift.tree import Params

# A dishonest client claims so many times the examples of all; numbers up to 1e18 can be weighed.
MANY, MOST = 1e6, 1e15
# Share of false alarms of an audit, over all clients of an honest federation together.
ALARMS = 0.01
# Numbers of a model times examples: beyond, an audit would take minutes, and clients wait.
MOST_WORK = 1e11


def most_of_one(algorithm: Algorithm, federation: Federation, table: Params) -> float:
    """The weight that the client of least weight gets by claiming examples of the target."""
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
    config: Config, prepared: Prepared, algorithm: Algorithm, federation: Federation, table: Params,
    *, dealt: bool,
) -> dict[str, Any]:  # fmt: skip
    """The event "claims" of a run: table n [M] (and labels [M, K]) as the clients registered them.

    federation: as the server has dealt it; dealt: whether clients have the data that it dealt them,
    so that their claims can be compared.
    """
    cap, clients = cap_named(config) or 1.0, config.training.cohort or len(table["n"])
    most = most_of_one(algorithm, federation, table)
    server = algorithm.init(federation.params, federation.buffers, table)
    suspicions = list(beyond(free_weights(algorithm, server), table["n"], cap))
    inconsistent, audit = _audited(prepared, table, dealt)
    if dealt:
        suspicions += _otherwise(table, federation.table)
    odd, names = sorted([*suspicions, *inconsistent]), config.data.clients
    return {
        "event": "claims",
        "run": config.name,
        "cap": cap,
        "one_could_take": min(most, max(cap, 1.0 / clients)),
        "without_cap": most,
        "audit": audit,
        "suspicions": [
            {"client": i, "reason": why, **({} if names is None else {"name": names[i]})}
            for i, why in odd
        ],
    }


def _otherwise(table: Params, dealt: Params) -> Iterator[Suspicion]:
    """Clients that registered other counts than those of the data that they were dealt."""
    for i, (claimed, right) in enumerate(zip(table["n"], dealt["n"], strict=True)):
        # Clients that have not joined yet; without an example a client has no weight.
        if claimed == 0:
            continue
        if claimed != right:
            yield i, f"registered {claimed:,.0f} examples; the experiment deals it {right:,.0f}"
        elif "labels" in table and not torch.equal(table["labels"][i], dealt["labels"][i]):
            yield i, "registered other label counts than those of the data that it is dealt"


def _audited(prepared: Prepared, table: Params, dealt: bool) -> tuple[list[Suspicion], str]:
    """(clients whose claims do not fit their gradients, what came of the audit in a few words)."""
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
