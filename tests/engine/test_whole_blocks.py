"""Clients that were summed and keep no state pass the gate as one block."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client import plans
from fedshift.client.local import Local, plan_many
from fedshift.engine import run as rounds
from fedshift.engine.backends import Backend, Block, ClientUpdate, Job
from fedshift.engine.checks.gate import Admitted
from fedshift.engine.processes.pool import workers
from fedshift.engine.profile import Stopwatch
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.sums.running import join_blocks
from fedshift.engine.sums.summing import TermsOf, check_and_sum
from fedshift.engine.traffic import Meter
from fedshift.errors import TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from support.odd_work import OddReports, Together
from support.rounds import different, far, last

pytestmark = pytest.mark.routed

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
PROCESSES = [1, pytest.param(2, marks=linux), pytest.param(3, marks=linux)]


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=2, batch=8), rounds=3)


@pytest.fixture
def let(monkeypatch: pytest.MonkeyPatch) -> list[Admitted]:
    """The clients that passed the gate in each round."""
    seen: list[Admitted] = []

    def noted(*given: Any) -> Admitted:
        seen.append(check_and_sum(*given))
        return seen[-1]

    monkeypatch.setattr(rounds, "check_and_sum", noted)
    return seen


@pytest.mark.few(1)
@pytest.mark.parametrize("together", [Stacked(), Together(), Together(turned=True, apart=True)])
@pytest.mark.parametrize("processes", PROCESSES)
def test_all_as_one(
    processes: int, together: Any, setting: Setting, federation: Federation, let: list[Admitted]
) -> None:
    """The loop's round, its order and loss. Of three processes one has two clients, which are not
    summed."""
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 2))
    with workers(federation.clients, processes) as team:
        backend = together if processes == 1 else team.blocks(together)
        other = last(run(algorithm, federation, 2, backend=backend))
    assert far(alone, other) < 1e-6
    assert other.trained == alone.trained == tuple(range(8))
    assert other.loss == pytest.approx(alone.loss, rel=1e-6)
    assert not different(alone._replace(server={}), other._replace(server={}))
    assert set(other.states) == set(alone.states) == set(range(8))
    assert [len(a.good) == 8 for a in let] == [True] * 2 + [False] * 2
    assert [a.clients for a in let] == [tuple(range(8))] * 4


@pytest.mark.parametrize("backend", [Stacked(), Together()])
def test_states_are_stored_and_released(
    backend: Any, setting: Setting, federation: Federation, let: list[Admitted]
) -> None:
    """States are stored as they arrive: all of them at once might not fit in memory."""
    last(run(recipes.scaffold(setting), federation, 1, backend=backend))
    assert let[0].clients == tuple(range(8))
    assert [block.changed for block in let[0].good] == [{}] * len(let[0].good)


@pytest.mark.few(1)
@linux
@pytest.mark.parametrize("change", ["double", "more", "less", "other", "wide"])
def test_reports_of_two_processes_are_alike(
    change: str, setting: Setting, federation: Federation
) -> None:
    """All clients of one process report something else: the error is that of a single process."""
    odd = OddReports(others=range(4, 8), change=change)

    def error_of(backend: Backend) -> str:
        with pytest.raises(TrainingError) as error:
            last(run(recipes.fedavg(setting), federation, 1, backend=backend))
        return str(error.value)

    with workers(federation.clients, 2) as team:
        assert error_of(team.blocks(odd)) == error_of(odd.__call__)


@pytest.mark.slow
@pytest.mark.parametrize("processes", PROCESSES)
def test_bytes_are_counted_as_if_updates_had_come(
    processes: int, setting: Setting, federation: Federation
) -> None:
    algorithm = recipes.fedavg(setting)
    alone, together = Meter(), Meter()
    last(run(algorithm, federation, 1, meter=alone))
    with workers(federation.clients, processes) as team:
        backend = Stacked() if processes == 1 else team.blocks(Stacked())
        last(run(algorithm, federation, 1, backend=backend, meter=together))
    assert together.last == alone.last
    assert alone.last.clients == 8


@dataclass(frozen=True)
class Watched(Together):
    """Records the memory of updates, and how much is left when the next block is asked for."""

    seen: list[Any] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        blocks = iter(Together.stream(self, update, jobs))
        while True:
            self.left.append(sum(v() is not None for v in self.seen))
            if (block := next(blocks, None)) is None:
                return
            # `Together` holds its own.
            delta = {k: v.clone() for k, v in block.updates["delta"].items()}
            self.seen.extend(weakref.ref(v.untyped_storage()) for v in delta.values())
            yield block._replace(updates=block.updates | {"delta": delta})
            del delta


@pytest.mark.parametrize("meter", [False, True])
def test_a_block_is_let_go_before_the_next_is_trained(
    meter: bool, setting: Setting, federation: Federation
) -> None:
    watched = Watched()
    listening = Meter(Stopwatch()) if meter else None
    last(run(recipes.fedavg(setting), federation, 1, backend=watched, meter=listening))
    assert len(watched.seen) == 3 * len(federation.params)
    assert watched.left == [0] * 4


def test_joined_blocks_are_in_order() -> None:
    def block(*clients: int) -> Block:
        report = {"id": torch.tensor(clients), "loss": torch.tensor(clients) * 0.5}
        return Block.of(clients, {"report": report, "buffers": {}}, {"own": {}}, 4)

    merged = join_blocks([block(7, 2), block(5)])
    assert merged.clients == (2, 5, 7)
    assert merged.updates["report"]["id"].tolist() == [2, 5, 7]
    assert merged.updates["report"]["loss"].tolist() == [1.0, 2.5, 3.5]
    assert (merged.updates["buffers"], merged.changed, merged.t) == ({}, {"own": {}}, 4)


@linux
def test_batches_are_drawn_where_they_are_used(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def noted(phases: Any, clients: Any, t: int, seed: int) -> Any:
        drawn.extend(client for client, _ in clients)
        return plan_many(phases, clients, t, seed)

    monkeypatch.setattr(plans, "plan_many", noted)
    with workers(federation.clients, 2) as team:
        last(run(recipes.fedavg(setting), federation, 1, backend=team.blocks(Stacked())))
    assert drawn == [0, 1, 2, 3]
