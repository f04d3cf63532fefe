"""Updates summed while they come in: bit for bit what stacking them gives, and no reply is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.engine import run as rounds
from fedshift.engine.backends import Job, Reply, Stage, work
from fedshift.engine.run import run
from fedshift.engine.sums import Sums
from fedshift.recipes import Setting
from fedshift.server.combine import total
from fedshift.tree import Parts, weighted_sum
from support.every_method import MAKE, ROUNDS, WRAP, Make
from support.federations import make_federation
from support.fuzz import different

pytestmark = pytest.mark.routed


def played(make: Make, setting: Setting, **options: Any) -> Parts:
    """All results of a run of a few rounds, including its clients' states."""
    federation = make_federation(setting.model)
    last = list(run(make(setting), federation, ROUNDS, cohort=4, **options))[-1]
    return last.server | {f"{i} {p}": t for i, s in last.states.items() for p, t in s.items()}


# One row for each way in which a server uses updates; the others are FedAvg's.
WAYS = (
    "fedavg", "fedpals sharp", "afl", "afl with idle clients", "fedadam", "scaffold", "scaffold I",
    "scaffold + fedpals", "feddyn", "fednova", "ditto", "fedper", "fedrep", "feddrm", "fedpac",
    "fedala", "fedas", "confree", "local_only", "fedavgft", "feddisk", "labelset_fedavg + mse",
    "labelset_scaffold", "fedmedian", "rfa",
)  # fmt: skip
SUMMED = ("Ditto", "LabelSets public", "CentralTuning without steps", "FedDisk", "FedDisk(Ditto)")


def compared(make: Make, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that differ if the server is given all updates, stacked."""
    by_sums = played(make, setting)
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "sums_of", lambda opened, server: Sums(opened.cohort()["id"], {}))
        return different(by_sums, played(make, setting))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [*WAYS, *SUMMED])
def test_sums_are_those_of_stacked_updates(
    name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through wrappers, which ask for their method's sums."""

    def wrapped(setting: Setting) -> Any:
        return WRAP[name](recipes.scaffold(setting), setting)

    make = wrapped if name in SUMMED else MAKE[name]
    if name in SUMMED:
        algorithm, federation = make(setting), make_federation(setting.model)
        server = algorithm.init(federation.params, federation.buffers, federation.table)
        cohort = {"id": torch.arange(2), "weight": torch.ones(2) / 2}
        assert algorithm.sums(server, cohort).keys() == {
            "delta", "buffers", "control",
        }  # fmt: skip
    assert compared(make, setting, monkeypatch) == []


def test_the_comparison_can_fail(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals in float32 would be seen."""

    def coarse(total: Any, rows: Any, weights: Any) -> None:
        for row, w in zip(rows, weights, strict=True):
            total.copy_((total + row * w).float())

    monkeypatch.setattr("fedshift.engine.sums.accumulate", coarse)
    assert compared(MAKE["scaffold"], setting, monkeypatch)


def test_most_methods_are_summed(setting: Setting) -> None:
    """A method that does not declare its sums would need the memory of the whole cohort."""
    for name in ("fedavg", "fedpals", "scaffold", "ditto", "feddyn", "afl", "fedrep", "moon"):
        algorithm = next(make for key, make in MAKE.items() if key.startswith(name))(setting)
        federation = make_federation(setting.model)
        server = algorithm.init(federation.params, federation.buffers, federation.table)
        cohort = {"id": torch.arange(2), "weight": torch.ones(2) / 2}
        assert algorithm.sums(server, cohort).keys() >= {"delta"}, name
    assert recipes.fedmedian(setting).sums({}, {"weight": torch.ones(2)}) == {}


class Ordered:
    """Clients answer in ascending or descending order; how many updates are alive is noted."""

    def __init__(self, step: int) -> None:
        self.step, self.alive, self.most = step, weakref.WeakSet[Any](), 0

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in list(jobs)[:: self.step]:
            reply = work(stage, job)
            self.alive.add(reply.update["delta"]["head.weight"])
            gc.collect()
            self.most = max(self.most, len(self.alive))
            yield reply
            del reply


@pytest.mark.slow
def test_replies_are_let_go_in_any_order(setting: Setting) -> None:
    backwards, forwards, all_of_them = Ordered(-1), Ordered(1), Ordered(1)
    plain = played(MAKE["scaffold"], setting)
    assert different(played(MAKE["scaffold"], setting, backend=backwards), plain) == []
    assert different(played(MAKE["scaffold"], setting, backend=forwards), plain) == []
    played(recipes.fedmedian, setting, backend=all_of_them)  # the control: a median needs all
    assert (backwards.most, forwards.most, all_of_them.most) == (4, 1, 4)


def test_a_sum_by_other_weights_is_refused() -> None:
    weights = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    sums = Sums(torch.tensor([2, 5, 6]), {"delta": weights})
    updates = {i: {"w": torch.full((3,), float(i))} for i in (2, 5, 6)}
    updates[5]["w"][0] = torch.nan  # left out, not multiplied
    for i, delta in updates.items():
        assert sums.add(Reply(i, {"delta": delta})) == {}
    summed = sums.parts()
    stacked = {"w": torch.stack([one["w"] for one in updates.values()])}
    assert torch.equal(total(summed, "delta", weights)["w"], weighted_sum(weights, stacked)["w"])
    assert torch.equal(total({"delta": stacked}, "delta", weights)["w"], summed["delta"]["w"])
    with pytest.raises(ValueError, match='"delta" was summed by other weights'):
        total(summed, "delta", weights / 2)
