"""What a claim of 10^9 gains besides weights of a round: nothing above the cap, either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift.client.local import Local
from fedshift.engine.run import start
from fedshift.recipes import Setting
from fedshift.router.moments import pooled
from fedshift.router.parts import Here, Part, Question
from fedshift.router.refit import refit
from fedshift.server.cap import capped_sizes
from fedshift.server.combine import Mean
from fedshift.server.heads import head_weights
from fedshift.server.weights import BySize
from support.by_hand import final, max_difference
from support.extras import fednova, scaffold
from support.routing import drawn

LIAR, CAP = 2, 0.3


def claimed(federation: Any) -> Any:
    """The federation with client 2's claim of 10^9 examples."""
    table = {name: column.clone() for name, column in federation.table.items()}
    table["labels"][LIAR] *= 1e9 / table["n"][LIAR]
    table["n"][LIAR] = 1e9
    return replace(federation, table=table)


def test_sizes_under_a_cap() -> None:
    n = torch.tensor([1e9, 30.0, 10.0, 0.0, 20.0]).double()
    m = capped_sizes(n, 0.4)
    assert m.tolist() == pytest.approx([40.0, 30.0, 10.0, 0.0, 20.0])
    assert float(m.max() / m.sum()) <= 0.4 + 1e-12
    assert capped_sizes(n, 1.0) is n
    assert capped_sizes(n[1:], 0.5).equal(n[1:])
    # The least cap makes all equal.
    assert capped_sizes(n, 0.01).tolist() == pytest.approx([10.0, 10.0, 10.0, 0.0, 10.0])


@pytest.mark.parametrize(("cap", "share"), [(1.0, 1.0), (CAP, CAP)])
def test_scaffolds_control(cap: float, share: float, setting: Setting, federated: Any) -> None:
    """c moves by p_i of a client's change: without a cap by all of the liar's."""
    federation = claimed(federated())
    method = scaffold(setting.model, local=setting.local, combine=Mean(BySize()))
    server, ids = start(method, federation).server, torch.arange(6)
    cohort = {"id": ids, "weight": torch.full((6,), 1 / 6).double(),
              "cap": torch.tensor(cap).double()}  # fmt: skip
    p = method.sums(server, cohort)["control"]
    assert float(p[LIAR]) == pytest.approx(share, abs=1e-6)
    assert float(p.sum()) == pytest.approx(1.0)
    move = {
        k: torch.stack([torch.full_like(v, float(i == LIAR)) for i in range(6)])
        for k, v in federation.params.items()
    }
    buffers = {k: torch.stack([v] * 6) for k, v in federation.buffers.items()}
    updates = {"cohort": cohort, "delta": move, "control": move,
               "buffers": {k: v for k, v in buffers.items() if v.is_floating_point()},
               "counters": {k: v for k, v in buffers.items() if not v.is_floating_point()},
               "report": {"id": ids, "loss": torch.ones(6)}}  # fmt: skip
    control = method.server_update(server, updates, 0)["control"]
    assert all(float(v.mean()) == pytest.approx(share, abs=1e-5) for v in control.values())


def _nova(
    setting: Setting, federation: Any, cap: float, reported: list[float], size: int = 16
) -> float:
    """How far the model moves where every client but the liar moves by 1, and it by 0."""
    local = Local(lr=0.1, epochs=1, batch=size)
    method = fednova(setting.model, local=local)
    server, ids = start(method, federation).server, torch.arange(6)
    weight = method.weigh(server, ids)
    updates = {
        "cohort": {"id": ids, "weight": torch.full_like(weight, 1 / 6),
                   "cap": torch.tensor(cap).double()},
        "delta": {k: torch.stack([torch.full_like(v, float(i != LIAR)) for i in range(6)])
                  for k, v in federation.params.items()},
        "buffers": {}, "counters": {},
        "normaliser": {"a": torch.tensor(reported).double()},
        "report": {"id": ids, "loss": torch.ones(6)},
    }  # fmt: skip
    after = method.server_update(server | {"buffers": {}}, updates, 0)["params"]
    return max(float((after[k] - v).abs().max()) for k, v in federation.params.items())


def test_fednovas_steps(setting: Setting, federated: Any) -> None:
    """A liar's steps enlarge the step of all others without a cap; with one they are bounded."""
    federation = federated()
    n = federation.table["n"]
    steps = (n / 16).ceil()
    plain = _nova(setting, federation, 1.0, steps.tolist())
    report = steps.clone()
    report[LIAR] = 1e9
    assert _nova(setting, federation, 1.0, report.tolist()) > 1e6 * plain
    # What it reports is not read; what it registered counts for no more than the cap's share.
    honest = _nova(setting, federation, CAP, steps.tolist())
    assert _nova(setting, federation, CAP, report.tolist()) == honest
    assert _nova(setting, claimed(federation), CAP, report.tolist()) < 2 * plain / (1 - CAP)
    # One that says it took hardly a step would have a huge share of the direction.
    report[LIAR] = 1e-9
    assert _nova(setting, federation, CAP, report.tolist()) == honest


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_that_sizes_imply(
    momentum: float, setting: Setting, federated: Any
) -> None:
    """Where no share is above it, a cap changes no bit: clients report what sizes imply."""
    for length in ({"epochs": 2}, {"steps": 5}):
        local = Local(lr=0.1, batch=8, momentum=momentum, **length)  # type: ignore[arg-type]
        method = fednova(setting.model, local=local)
        free = final(method, federated())
        gate = replace(federated().gate, max_weight=0.95)
        assert max_difference(final(method, replace(federated(), gate=gate)).server["params"],
                     free.server["params"]) == 0  # fmt: skip


def test_fedpacs_heads() -> None:
    """A client that claims variance 0 and the others' mean takes over their heads."""
    source = torch.Generator().manual_seed(0)
    variance = 0.5 + torch.rand(6, generator=source, dtype=torch.float64)
    means = 0.01 * torch.randn(6, 3, 4, generator=source, dtype=torch.float64)
    variance[LIAR], means[LIAR] = 0.0, means.mean(0)
    everyone = torch.ones(6, dtype=torch.bool)
    free = head_weights(variance, means, everyone)
    others = [i for i in range(6) if i != LIAR]
    assert float(free[others, LIAR].min()) > 0.99
    mix = head_weights(variance, means, everyone, CAP)
    assert float(mix[others, LIAR].max()) <= CAP + 1e-12
    assert float((mix.sum(1) - 1).abs().max()) < 1e-12
    # The best mixture under the cap: equal slopes where weights are free, smaller ones at the cap.
    rows, a = means.flatten(1), mix[0]
    slope = (torch.diag(variance) + (rows - rows[0]) @ (rows - rows[0]).T) @ a
    free_ones = [i for i in range(6) if i == 0 or 1e-9 < a[i] < CAP - 1e-9]
    assert float(slope[free_ones].max() - slope[free_ones].min()) < 1e-8
    assert float(slope[LIAR]) < float(slope[0])
    assert head_weights(variance, means, everyone, 1.0).equal(free)


class _Lies(Here):
    """Clients, of which the third multiplies all its sums by 10^7."""

    def ask(self, question: Question) -> list[Any]:
        sent = super().ask(question)
        return [_times(one, 1e7) if i == LIAR else one for i, one in enumerate(sent)]


def _times(one: Any, by: float) -> Any:
    return type(one)(*(by * v for v in one))


SAMPLES = [drawn((40, 3), seed=i) + float(i) for i in range(4)]


def test_a_routers_refit() -> None:
    """10^9 claimed examples make the others vanish from the fit; a cap leaves them their share."""
    clients = (_Lies(SAMPLES), Here(SAMPLES))
    free, plain = (refit(Part(each), penalty=1e-2).head for each in clients)
    other = SAMPLES[1].double()
    assert float(plain(other).log_softmax(1).exp()[:, 1].mean()) > 0.4
    assert float(free(other).log_softmax(1).exp()[:, 1].mean()) < 0.01
    part = Part(_Lies(SAMPLES), CAP)
    assert float(part.sizes[LIAR] / part.sizes.sum()) == pytest.approx(CAP)
    head = refit(part, penalty=1e-2).head
    assert float(head(other).log_softmax(1).exp()[:, 1].mean()) > 0.3


def test_a_routers_moments() -> None:
    free, capped = (pooled(Part(_Lies(SAMPLES), cap).moments()) for cap in (1.0, CAP))
    share = [float(g.sizes[LIAR] / g.sizes.sum()) for g in (free, capped)]
    assert share == pytest.approx([1.0, CAP], abs=1e-6)
    # Means are of each client's own and stay.
    assert torch.allclose(free.means, capped.means)


def test_what_is_held_out() -> None:
    head = pooled(Part(Here(SAMPLES)).moments()).head()
    sent = Part(_Lies(SAMPLES), CAP).of_fold(1, held_out=True).held_out_sums([head])
    n = torch.stack([one.n for one in sent])
    assert float(n[LIAR] / n.sum()) <= CAP + 1e-12


def test_a_cap_above_all_shares_changes_nothing() -> None:
    one, two = (refit(Part(Here(SAMPLES), cap), penalty=1e-2) for cap in (1.0, 0.5))
    assert one.head.xi.equal(two.head.xi)
