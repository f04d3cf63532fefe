"""Updates summed while they come in: bit for bit what stacking them gives, and no reply is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.base import Capabilities, ask
from fedshift.engine import run as rounds
from fedshift.engine.backends import Block, ClientUpdate, Job, Reply, loop
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.checks.replies import block_of
from fedshift.engine.round import close_round, settle
from fedshift.engine.run import run
from fedshift.engine.sums.running import RunningSums
from fedshift.engine.sums.summing import check_and_sum
from fedshift.errors import TrainingError
from fedshift.recipes import Setting
from fedshift.server.combine import total
from fedshift.tree import Parts, weighted_sum
from support.every_method import MAKE, ROUNDS, WRAP, Make
from support.federations import make_federation
from support.fuzz import different

pytestmark = pytest.mark.routed


def played(make: Make, setting: Setting, backend: Any = loop, rounds: int = 2) -> Parts:
    """All results of a run of a few rounds, including its clients' states."""
    federation = make_federation(setting.model)
    last = list(run(make(setting), federation, rounds, cohort=4, backend=backend))[-1]
    return last.server | {f"{i} {p}": t for i, s in last.states.items() for p, t in s.items()}


def compared(make: Make, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Round by round, which of the server's parts differ from those with all updates stacked."""
    came: list[Reply] = []
    differences: list[list[str]] = []

    def recorded(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        came.clear()
        for reply in loop(update, jobs):
            came.append(reply)
            yield reply

    def settled(opened: Any, server: Parts, *rest: Any) -> Any:
        by_sums = settle(opened, server, *rest)
        stacked, _ = close_round(
            opened, server, [*map(block_of, came)], 0, RunningSums(opened.ids, {})
        )
        differences.append(different(by_sums.server, stacked))
        return by_sums

    monkeypatch.setattr(rounds, "settle", settled)
    monkeypatch.setattr(rounds, "check_and_sum", lambda *args: check_and_sum(*args, some=1))
    played(make, setting, recorded, ROUNDS)
    return differences


# One row for each way in which a server uses updates; the others are FedAvg's.
WAYS = (
    "fedavg", "fedpals sharp", "afl", "afl with idle clients", "fedadam", "scaffold", "scaffold I",
    "scaffold + fedpals", "feddyn", "fednova", "ditto", "fedper", "fedrep", "feddrm", "fedpac",
    "fedala", "fedas", "confree", "local_only", "fedavgft", "feddisk", "labelset_fedavg + mse",
    "labelset_scaffold", "fedmedian", "rfa",
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WAYS)
def test_sums_are_those_of_stacked_updates(
    name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compared(MAKE[name], setting, monkeypatch) == [[]] * ROUNDS


SUMMED = ("Ditto", "LabelSets public", "CentralTuning without steps", "FedDisk", "FedDisk(Ditto)")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SUMMED)
def test_sums_through_wrappers(
    name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper asks for its method's sums, which equal those of stacked updates."""

    def make(setting: Setting) -> Any:
        return WRAP[name](recipes.scaffold(setting), setting)

    algorithm, federation = make(setting), make_federation(setting.model)
    server = algorithm.init(federation.params, federation.buffers, federation.table)
    cohort = {"id": torch.arange(2), "weight": torch.ones(2) / 2}
    sums = ask(algorithm, Capabilities.sums, server, cohort)
    assert sums.keys() == {"delta", "buffers", "control"}
    assert compared(make, setting, monkeypatch) == [[]] * ROUNDS


def test_the_comparison_can_fail(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals in float32 would be seen."""

    def coarse(total: Any, rows: Any, weights: Any) -> None:
        for row, w in zip(rows, weights, strict=True):
            total.copy_((total + row * w).float())

    monkeypatch.setattr("fedshift.engine.sums.running.accumulate", coarse)
    assert all(compared(MAKE["scaffold"], setting, monkeypatch))


def test_most_methods_are_summed(setting: Setting) -> None:
    """A method that does not declare its sums would need the memory of the whole cohort."""
    for name in ("fedavg", "fedpals", "scaffold", "ditto", "feddyn", "afl", "fedrep", "moon"):
        algorithm = next(make for key, make in MAKE.items() if key.startswith(name))(setting)
        federation = make_federation(setting.model)
        server = algorithm.init(federation.params, federation.buffers, federation.table)
        cohort = {"id": torch.arange(2), "weight": torch.ones(2) / 2}
        assert ask(algorithm, Capabilities.sums, server, cohort).keys() >= {"delta"}, name
    assert recipes.fedmedian(setting).sums({}, {"weight": torch.ones(2)}) == {}


class Backwards:
    """Clients answer in descending order, and the lifetime of each reply is recorded."""

    def __init__(self, step: int = -1) -> None:
        self.step, self.alive, self.most = step, weakref.WeakSet[Any](), 0

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in list(jobs)[:: self.step]:
            (reply,) = loop(update, [job])
            self.alive.add(reply.update["delta"]["head.weight"])
            gc.collect()
            self.most = max(self.most, len(self.alive))
            yield reply
            del reply


@pytest.mark.slow
def test_the_order_of_arrival_changes_nothing(setting: Setting) -> None:
    backwards = Backwards()
    assert (
        different(played(MAKE["scaffold"], setting, backwards), played(MAKE["scaffold"], setting))
        == []
    )
    assert backwards.most == 4  # all wait for the first


@pytest.mark.slow
def test_replies_are_let_go(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six replies at most two are in memory, where two pass the gate together."""
    monkeypatch.setattr(rounds, "check_and_sum", lambda *args: check_and_sum(*args, some=2))
    watched = Backwards(step=1)
    list(run(MAKE["scaffold"](setting), make_federation(setting.model), 1, backend=watched))
    assert watched.most == 2
    watched = Backwards(step=1)
    list(run(recipes.fedmedian(setting), make_federation(setting.model), 1, backend=watched))
    assert watched.most == 6  # the control: a median needs all of them


def replies(*clients: int, shape: int = 3) -> list[Reply]:
    return [Reply(i, {"delta": {"w": torch.full((shape,), float(i))}}, {}, 1) for i in clients]


def blocks(*clients: int, shape: int = 3) -> list[Block]:
    return [block_of(reply) for reply in replies(*clients, shape=shape)]


def let(came: list[Reply], clients: tuple[int, ...]) -> tuple[int, ...]:
    question = Asked(1, clients, lambda i: {"params": {"w": torch.zeros(3)}}, frozenset())
    nothing = RunningSums(torch.tensor(question.clients), {})
    return check_and_sum(Gate(), map(block_of, came), question, nothing, some=2).clients


def test_replies_pass_in_ascending_order() -> None:
    assert let(replies(4, 2, 0, 7), (0, 2, 4, 7)) == (0, 2, 4, 7)


@pytest.mark.parametrize(
    ("came", "why"),
    [
        ((0, 1, 0), "client 0 answered twice"),
        ((0, 1, 2, 2), "client 2 answered twice"),
        ((0, 9), "client 9 was not asked"),
        ((0, 1, 2), "no answer in time"),
        ((0, 1, 3), "no answer in time"),
    ],
)
def test_odd_answers_end_the_round(came: tuple[int, ...], why: str) -> None:
    with pytest.raises(TrainingError, match=why):
        let(replies(*came), (0, 1, 2, 3))


def test_another_shape_later_on_is_named() -> None:
    sums = RunningSums(torch.arange(4), {"delta": torch.full((4,), 0.25, dtype=torch.float64)})
    sums.add(blocks(0, 1))
    with pytest.raises(TrainingError, match='client 2 sent an update with another "delta"'):
        sums.add(blocks(2, 3, shape=4))


def test_a_sum_by_other_weights_is_refused() -> None:
    weights = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    sums = RunningSums(torch.tensor([2, 5, 6]), {"delta": weights})
    rest = sums.add(blocks(2, 5)) + sums.add(blocks(6))
    assert all(block.updates == {} for block in rest)
    updates = sums.parts()
    stacked = {"w": torch.stack([r.update["delta"]["w"] for r in replies(2, 5, 6)])}
    assert torch.equal(total(updates, "delta", weights)["w"], weighted_sum(weights, stacked)["w"])
    assert torch.equal(total({"delta": stacked}, "delta", weights)["w"], updates["delta"]["w"])
    with pytest.raises(ValueError, match='"delta" was summed by other weights'):
        total(updates, "delta", weights / 2)
