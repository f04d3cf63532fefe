"""Every method under a cap: a client that claims 10^9 examples does not dominate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import Method
from fedshift.engine.checks.gate import Gate
from fedshift.engine.round import open_round, restrict_to
from fedshift.engine.run import Federation, Round, draw_cohort, play_round, start
from fedshift.recipes import Setting
from fedshift.server.cap import capped
from support.by_hand import final, max_difference
from support.every_method import MAKE, Make

pytestmark = pytest.mark.routed
LIAR, CAP = 2, 0.3


def capped_federation(federation: Federation, cap: float) -> Federation:
    return replace(federation, gate=Gate(max_weight=cap))


def lied_to(federation: Federation) -> Federation:
    """The federation as the server sees it after client 2's claim; the data do not change."""
    table = {name: column.clone() for name, column in federation.table.items()}
    share = table["labels"][LIAR] / table["n"][LIAR]
    table["n"][LIAR], table["labels"][LIAR] = 1e9, 1e9 * share
    return replace(federation, table=table)


def played(method: Method, federation: Federation, rounds: int, size: int = 6) -> list[Round]:
    """The rounds, without `run`'s check that the table is of these clients."""
    done = [start(method, federation)]
    for t in range(1, rounds + 1):
        ids = draw_cohort(6, size, t, 0)
        done.append(play_round(method, federation, done[-1].server, done[-1].states, ids, t))
    return done[1:]


@pytest.mark.few(4)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_claim_moves_no_weight_above_the_cap(
    make: Make, setting: Setting, federated: Any
) -> None:
    method, claimed = make(replace(setting, cap=CAP)), lied_to(federated())
    # AFL's weights move with what clients report. FedDisk itself ends a run with such a claim.
    rounds = played(
        method,
        capped_federation(claimed, CAP),
        3 if "mixture" in start(method, claimed).server else 1,
    )
    assert all(one.weights.max() <= CAP + 1e-12 for one in rounds)
    # No weight, no influence: with none above it, a cap is the run without one.
    free = played(make(setting), claimed, 1)[0]
    if "uniform" in str(method) or free.weights.max() <= CAP:
        assert torch.equal(rounds[0].weights, free.weights)


def test_without_a_cap_the_claim_is_all(setting: Setting, federated: Any) -> None:
    for name in ("fedavg", "afl", "local_only", "feddisk", "fednova", "labelset_fedavg"):
        free = played(MAKE[name](setting), lied_to(federated()), 1)[0]
        assert float(free.weights[LIAR]) > 0.999999, name


@pytest.mark.slow
def test_a_cap_of_one_changes_no_bits(setting: Setting, federated: Any) -> None:
    plain, one = federated(), capped_federation(federated(), 1.0)
    for make in (recipes.fedavg, recipes.fedas, recipes.afl, recipes.labelset_fedavg):
        method = make(setting)
        assert (
            max_difference(
                final(method, plain).server["params"], final(method, one).server["params"]
            )
            == 0
        )


def test_the_least_cap_is_a_plain_mean(setting: Setting, federated: Any) -> None:
    least = capped_federation(lied_to(federated()), 1 / 6)
    plain = final(recipes.fedavg_uniform(setting), federated())
    bounded = played(recipes.fedavg(setting), least, 2)[-1]
    assert max_difference(plain.server["params"], bounded.server["params"]) < 1e-6


def test_fedpals_own_cap_is_the_same(setting: Setting, federated: Any) -> None:
    free = final(recipes.fedpals(setting, lam=0.0), federated(), 1)
    assert float(free.weights.max()) > CAP
    fedpals = final(recipes.fedpals(setting, lam=0.0, cap=CAP), federated())
    given = final(
        recipes.fedpals(replace(setting, cap=CAP), lam=0.0), capped_federation(federated(), CAP)
    )
    assert torch.equal(fedpals.weights, given.weights)
    assert max_difference(fedpals.server["params"], given.server["params"]) == 0
    # Of two caps the smaller one counts.
    both = recipes.fedpals(replace(setting, cap=0.9), lam=0.0, cap=CAP)
    assert torch.equal(final(both, capped_federation(federated(), 0.9)).weights, fedpals.weights)


def test_a_small_cohort_has_no_less_than_its_share(setting: Setting, federated: Any) -> None:
    for make in (recipes.fedavg, lambda s: recipes.fedpals(s, lam=0.0)):
        method = make(replace(setting, cap=0.2))
        for one in played(method, capped_federation(lied_to(federated()), 0.2), 4, size=3):
            assert one.weights.tolist() == pytest.approx([1 / 3] * 3)


def _replies(federation: Federation, cap: float, **claims: list[float]) -> dict[str, Any]:
    """Updates of six clients, each of which moves every parameter by its own number."""
    ids = torch.arange(6)
    move = {
        k: torch.stack([torch.full_like(v, float(i == LIAR)) for i in ids.tolist()])
        for k, v in federation.params.items()
    }
    weight = torch.full((6,), 1 / 6).double()
    floats = {
        k: torch.stack([v] * 6) for k, v in federation.buffers.items() if v.is_floating_point()
    }
    counts = {k: torch.stack([v] * 6) for k, v in federation.buffers.items() if k not in floats}
    return {
        "cohort": {"id": ids, "weight": weight, "cap": torch.tensor(cap).double()},
        "delta": move, "buffers": floats, "counters": counts,
        "report": {"id": ids, "loss": torch.ones(6)},
        **{part: {name: torch.tensor(v).double()} for part, (name, v) in claims.items()},
    }  # fmt: skip


@pytest.mark.parametrize(("cap", "share"), [(1.0, 1.0), (CAP, CAP)])
def test_fisher_traces_are_claims(
    cap: float, share: float, setting: Setting, federated: Any
) -> None:
    federation, method = federated(), recipes.fedas(setting)
    server = start(method, federation).server
    claim = [1.0, 1.0, 1e12, 1.0, 1.0, 1.0]
    updates = _replies(federation, cap, fisher=("trace", claim))
    updates["delta"] = {k: v for k, v in updates["delta"].items() if k in server["params"]}
    updates["buffers"] = {k: v for k, v in updates["buffers"].items() if k in server["buffers"]}
    after = method.server_update(server, updates, 0)["params"]
    moved = [float((after[k] - v).mean()) for k, v in server["params"].items()]
    assert moved == pytest.approx([share] * len(moved), abs=1e-5)


@pytest.mark.parametrize(("cap", "share"), [(1.0, 1.0), (CAP, CAP)])
def test_losses_are_claims(cap: float, share: float, setting: Setting, federated: Any) -> None:
    """Without a cap all mass goes to a client that says its loss is 10^9, and all others idle."""
    federation, method = federated(), recipes.afl(setting, gamma=0.1)
    server = start(method, federation).server
    updates = _replies(federation, cap, risk=("loss", [1.0, 2.0, 1e9, 3.0, 1.0, 1.0]))
    after = server | method.server_update(server, updates, 0)
    mixture = after["mixture"]["mass"] / after["mixture"]["mass"].sum()
    assert float(mixture[LIAR]) == pytest.approx(share)
    assert float(mixture.sum()) == pytest.approx(1.0)
    idle = ["idle" in method.broadcast(after, i) for i in range(6)]
    assert all(idle[i] for i in range(6) if i != LIAR) == (cap == 1.0)


def test_a_client_that_is_missing(setting: Setting, federated: Any) -> None:
    """The others' weights are the rule's over them, under the cap."""
    federation = lied_to(federated())
    method = FedAvg(setting.model, local=setting.local)
    server = start(method, federation).server
    opened = open_round(method, server, torch.arange(6), 1, CAP)
    rest = restrict_to(opened, server, [0, 1, 2, 4])
    n = federation.table["n"][rest.ids]
    assert rest.weights.tolist() == capped(n / n.sum(), CAP).tolist()
    assert rest.weights.max() == CAP
