"""Clients trained together as a block: they pass the gate and enter sums as one or one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.backends import Backend, Block, ClientUpdate, Job
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.checks.replies import block_of
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Federation, play_round, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.sums.running import RunningSums
from fedshift.engine.sums.summing import TermsOf
from fedshift.errors import DivergedError, TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.combine import SUMMED
from fedshift.tree import Parts
from support.every_method import MAKE, ROUNDS
from support.federations import make_clients, make_federation
from support.odd_work import SIZES, OddReports, Together
from support.rounds import different, far, last

pytestmark = pytest.mark.routed

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=2, batch=8), rounds=ROUNDS)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_method_in_blocks(make: Any, setting: Setting) -> None:
    """Bit for bit the loop's result: sums are taken by ascending client, however blocks are cut."""
    federation, algorithm = make_federation(setting.model), make(setting)
    alone = last(run(algorithm, federation, ROUNDS))
    for each, turned in ((1, False), (3, False), (3, True), (8, True)):
        backend = Together(each=each, turned=turned)
        assert not different(alone, last(run(algorithm, federation, ROUNDS, backend=backend)))


@pytest.mark.few(1)
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_of_clients_that_do_not_follow_one_another(
    turned: bool, setting: Setting, federation: Federation, entered: list[tuple[int, ...]]
) -> None:
    """As for unequal sizes: sums are in another order, and no client is left out."""
    algorithm = recipes.scaffold(setting)
    alone = last(run(algorithm, federation, 2))
    mixed = last(run(algorithm, federation, 2, backend=Together(apart=True, turned=turned)))
    assert sorted(sum(entered, ())) == sorted([*range(8)] * 2)
    assert far(alone, mixed) < 1e-6
    assert mixed.trained == alone.trained


@pytest.mark.slow
def test_blocks_are_summed_together_and_single_clients_are_not(
    setting: Setting, federation: Federation, entered: list[tuple[int, ...]]
) -> None:
    algorithm = recipes.fedavg(setting)
    last(run(algorithm, federation, 1, backend=partial(Together())))
    assert entered == []
    last(run(algorithm, federation, 1, backend=Together()))
    last(run(algorithm, federation, 1, backend=Stacked()))
    assert sorted(sum(entered, ())) == sorted([*range(8)] * 2)


def test_a_lost_block_is_noticed(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail."""
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    add = RunningSums.add

    def lose(self: RunningSums, blocks: Sequence[Block]) -> list[Block]:
        (block,) = blocks
        less = {k: v * (block.clients[0] > 0) for k, v in block.updates["delta"].items()}
        return add(self, [block._replace(updates=block.updates | {"delta": less})])

    monkeypatch.setattr(RunningSums, "add", lose)
    assert far(alone, last(run(algorithm, federation, 1, backend=Together()))) > 1e-3


def test_numbers_that_cannot_be_summed_are_checked_one_by_one() -> None:
    report = {"id": torch.arange(3), "q": torch.ones(3, 2).to(torch.float8_e4m3fn)}
    question = Asked(1, (0, 1, 2), lambda i: {})
    admitted = Gate().admit([block_of(Block((0, 1, 2), {"report": report}, {}, 1))], question)
    assert [one.client for one in admitted.bad] == [0, 1, 2]


NUMBERS = ["nan", "inf", "large", "another's"]
FORMS = ["form", "type", "names", "more"]


@pytest.mark.few(1)
@pytest.mark.parametrize("client", [0, 2, 6])
@pytest.mark.parametrize(
    ("kind", "each"), [*((kind, 3) for kind in NUMBERS), *((kind, 1) for kind in NUMBERS + FORMS)]
)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=linux)])
def test_bad_replies_raise_the_same_error_as_one_by_one(
    processes: int, kind: str, each: int, client: int, setting: Setting, federation: Federation,
    entered: list[tuple[int, ...]],
) -> None:  # fmt: skip
    """The messages are equal, and the client's block was not summed."""
    gate = Gate(max_norm=1e3) if kind == "large" else Gate()
    algorithm, federation = recipes.fedavg(setting), replace(federation, gate=gate)

    def error_of(backend: Backend) -> Exception:
        with pytest.raises((TrainingError, DivergedError)) as caught:
            last(run(algorithm, federation, 1, backend=backend))
        return caught.value

    odd = Together(kind, client, each)
    alone = error_of(partial(odd))
    assert f"client {client}" in str(alone)
    entered.clear()
    with workers(federation.clients, processes) as team:
        together = error_of(odd if processes == 1 else team.blocks(odd))
    assert (type(together), str(together)) == (type(alone), str(alone))
    assert not any(client in clients for clients in entered)


@pytest.mark.few(2)
@pytest.mark.parametrize("client", [0, 3])
@pytest.mark.parametrize("change", ["double", "more", "less", "other", "wide"])
def test_reports_of_two_blocks_are_alike(
    change: str, client: int, setting: Setting, federation: Federation
) -> None:
    """Each block has one form, and one block's form differs from the others'."""
    algorithm = recipes.fedavg(setting)

    def error_of(backend: Backend) -> str:
        with pytest.raises(TrainingError) as error:
            last(run(algorithm, federation, 1, backend=backend))
        return str(error.value)

    odd = OddReports(each=1, others=(client,), change=change)
    assert error_of(odd) == error_of(partial(odd))
    assert f"client {client} sent" in error_of(odd)


@dataclass(frozen=True)
class Remembering(Together):
    """The last block sends, or keeps, a tensor with the history of its gradient."""

    part: int = 1

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        for block in Together.stream(self, update, jobs):
            odd = {"w": torch.zeros(len(block.clients), 2, requires_grad=True)}
            changed = [block.updates, block.changed]
            changed[self.part] = changed[self.part] | ({"own": odd} if 7 in block.clients else {})
            yield Block(block.clients, *changed, block.t)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", [0, 1], ids=["sent", "kept"])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=linux)])
def test_the_history_of_a_gradient_does_not_travel(
    processes: int, part: int, setting: Setting, federation: Federation
) -> None:
    """A pipe would drop the history silently."""
    odd, algorithm = Remembering(part=part), recipes.fedavg(setting)
    with (
        workers(federation.clients, processes) as team,
        pytest.raises(TrainingError, match='"own/w" with the history of its gradient'),
    ):
        last(run(algorithm, federation, 1, backend=odd if processes == 1 else team.blocks(odd)))


def test_a_limit_on_norms_is_each_clients(
    setting: Setting, federation: Federation, entered: list[tuple[int, ...]]
) -> None:
    federation = replace(federation, gate=Gate(max_norm=1e6))
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    assert not different(alone, last(run(algorithm, federation, 1, backend=Together())))
    assert entered == [(0, 1, 2), (3, 4, 5), (6, 7)]


@dataclass(frozen=True)
class Failing(Together):
    """Training fails after the block of client 0."""

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        yield from (b for b in Together.stream(self, update, jobs) if b.clients[0] == 0)
        raise TrainingError("client 9 failed")


def test_a_bad_block_ends_the_round_at_once(setting: Setting, federation: Federation) -> None:
    """Clients trained one by one would not have reached the later failure, either."""

    with pytest.raises(DivergedError, match="client 0 sent"):
        last(run(recipes.fedavg(setting), federation, 1, backend=Failing("nan", 0, each=8)))


def block(**others: Any) -> Block:
    """A block of two clients that passes the gate, or one with the given changes."""
    sent: Parts = {
        "delta": {"w": torch.ones(2, 3)},
        "report": {"id": torch.tensor([4, 7]), "loss": torch.ones(2)},
    }
    state: Parts = {"own": {"w": torch.ones(2, 3)}}
    raw = Block((4, 7), sent | others.pop("sent", {}), state | others.pop("kept", {}), 1)
    return block_of(raw._replace(**others))


def asked(**others: Any) -> Asked:
    sent: Parts = {"params": {"w": torch.zeros(3)}, "buffers": {"n": torch.tensor(0)}}
    parts = frozenset({"delta", "report", "counters"})
    return Asked(1, (4, 5, 7), lambda i: sent, parts)._replace(**others)


INF = torch.tensor([[0.0, 0.0, 0.0], [0.0, float("inf"), 0.0]])
COUNTS = {"counters": {"n": torch.tensor([1, 1])}}
NEGATIVE = {"counters": {"n": torch.tensor([1, -1])}}


@pytest.mark.parametrize(
    ("good", "gate"), [(block(), Gate()), (block(sent=COUNTS), Gate()), (block(), Gate(max_norm=9))]
)
def test_blocks_that_pass_the_gate_as_one(good: Block, gate: Gate) -> None:
    admitted = gate.admit([good], asked())
    assert admitted.good == (good,)
    assert admitted.bad == ((5, "no answer in time", "timeout"),)


@pytest.mark.parametrize(
    ("odd", "gate", "question"),
    [
        (block(sent={"delta": {"w": INF}}), Gate(), asked()),
        (block(sent={"delta": {"w": INF * 0}}), Gate(), asked()),
        (block(kept={"own": {"w": INF}}), Gate(), asked()),
        (block(sent={"report": {"id": torch.tensor([4, 7]), "loss": INF[:, 1]}}), Gate(), asked()),
        (block(sent={"report": {"id": torch.tensor([4, 5]), "loss": INF[:, 0]}}), Gate(), asked()),
        (block(sent={"report": {"id": torch.tensor([4.0, 7.0])}}), Gate(), asked()),
        (block(sent={"delta": {"w": torch.ones(2, 4)}}), Gate(), asked()),
        (block(sent={"delta": {"w": torch.ones(2, 3).double()}}), Gate(), asked()),
        (block(sent={"more": {"w": torch.ones(2, 3)}}), Gate(), asked()),
        (block(sent=NEGATIVE), Gate(), asked()),
        (block(), Gate(max_norm=0.5), asked()),
        (block(), Gate(max_bytes=4), asked()),
        (block(t=2), Gate(), asked()),
        (block(clients=(4, 6)), Gate(), asked()),
        (block(), Gate(), asked(clients=(4, 5))),
    ],
)  # fmt: skip
def test_blocks_that_do_not_pass_the_gate_as_one(odd: Block, gate: Gate, question: Asked) -> None:
    admitted = gate.admit([odd], question)
    assert {4, 7} & {one.client for one in admitted.bad}
    assert all(len(one.clients) == 1 for one in admitted.good)


def test_what_clients_keep_does_not_hold_the_block(setting: Setting) -> None:
    """States are copied, where updates are views of the whole block."""
    federation = make_federation(setting.model, make_clients(sizes=SIZES))
    algorithm = recipes.ditto(setting)
    from fedshift.engine.run import start

    server, ids = start(algorithm, federation).server, torch.arange(8)
    played = play_round(algorithm, federation, server, {}, ids, 1, Together(each=8))
    for state in played.states.values():
        for tree in state.values():
            for v in tree.values():
                assert v.untyped_storage().nbytes() == v.nbytes


def test_only_clients_with_weight_enter_a_blocks_sum() -> None:
    """The reply of a client of weight 0 is not read, and a part that no client sends is absent."""
    numbers = torch.tensor([[1.0, 2.0], [float("nan")] * 2, [3.0, 5.0]])
    block = block_of(Block((7, 2, 4), {"delta": {"w": numbers}, "report": {}}, {}, 1))
    weights = torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    sums = RunningSums(torch.tensor([2, 4, 7]), {"delta": weights, "buffers": weights})
    sums.add([block])
    summed = sums.parts()
    assert summed.keys() == {"delta", SUMMED}
    assert summed["delta"]["w"].tolist() == [0.25 * 3.0 + 0.5 * 1.0, 0.25 * 5.0 + 0.5 * 2.0]
    sums = RunningSums(torch.tensor([2, 4, 7]), {"delta": weights.flip(0)})
    sums.add([block])
    assert sums.parts()["delta"]["w"].isnan().all()  # the control
