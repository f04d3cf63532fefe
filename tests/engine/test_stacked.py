"""Stacked clients: the loop's result up to rounding, and errors for what cannot be stacked."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import ClientData, Plan
from fedshift.engine.backends import Job, Reply, Stage
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import Federation, Round, play_round, run, start
from fedshift.engine.stacking import stacked
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.engines import backend_of
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Parts
from support.every_method import MAKE, ROUNDS, Make
from support.federations import (
    CLASSES,
    FEATURES,
    TARGET,
    double,
    make_clients,
    make_federation,
)
from support.odd_work import Meddling, round_of
from support.rounds import relative_difference

pytestmark = pytest.mark.routed

# Rows that cannot be stacked, and the words of the reason.
ALONE = {
    "fedala": "torch.equal",
    "fedala of all layers": "torch.equal",
    "labelset_fedavg": "slots.py, .*item",
    "labelset_fedavg + mse": "slots.py, .*item",
    "labelset_fedavg + kl": "slots.py, .*item",
    "labelset_fedprox": "slots.py, .*item",
    "labelset_scaffold": "slots.py, .*item",
    "labelset_scaffold I": "slots.py, .*item",
    "labelset_ditto": "slots.py, .*item",
}


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """One local epoch with batches that do not divide the clients' sizes."""
    return Setting(mlp, TARGET, Local(lr=0.3, batch=12))


def last(rounds: Iterable[Round]) -> Round:
    return list(rounds)[-1]


def both(make: Make, setting: Setting, federation: Federation, **options: Any) -> float:
    """The distance of the stacked clients' results from the loop's."""
    algorithm = make(setting)
    plain = last(run(algorithm, federation, ROUNDS, cohort=4))
    other = last(run(algorithm, federation, ROUNDS, cohort=4, backend=Stacked(**options)))
    assert other.trained == plain.trained
    return relative_difference(plain, other, start(algorithm, federation))


@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param(m, id=k) for k, m in MAKE.items() if k not in ALONE])
def test_the_loops_result_but_for_rounding(make: Make, setting: Setting) -> None:
    federation = make_federation(setting.model)
    assert both(make, setting, federation) < 1e-6
    assert both(make, setting, double(federation)) < 1e-12


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "reason"), ALONE.items(), ids=ALONE)
def test_what_cannot_be_stacked_says_why(name: str, reason: str, setting: Setting) -> None:
    federation = make_federation(setting.model)
    with pytest.raises(InputError, match=f"cannot be stacked .*{reason}.* loop or workers"):
        last(run(MAKE[name](setting), federation, ROUNDS, backend=Stacked()))


def test_one_client_by_one_is_the_same(setting: Setting) -> None:
    """With the least memory, blocks are of one client."""
    assert both(recipes.scaffold, setting, make_federation(setting.model), memory=1) < 1e-6


def test_the_comparison_can_fail(setting: Setting) -> None:
    """Without weights of 0 on padding, results move by far more than rounding."""

    def without(plan: Plan) -> Plan:
        return plan._replace(weight=torch.ones_like(plan.weight))

    class Loose(Stage):
        def plans(self, clients: Sequence[int]) -> list[dict[str, Plan]]:
            return [{k: without(p) for k, p in one.items()} for one in super().plans(clients)]

    def loose(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        return Stacked()(Loose(stage.algorithm, stage.t, stage.clients, stage.seed), jobs)

    federation, algorithm = make_federation(setting.model), recipes.fedavg(setting)
    plain, other = (
        last(run(algorithm, federation, 1)),
        last(run(algorithm, federation, 1, backend=loose)),
    )
    assert relative_difference(plain, other, start(algorithm, federation)) > 1e-3


def test_norms_with_equal_batches(normed: Model) -> None:
    """BatchNorm's statistics and counters are each client's own."""
    local = Local(lr=0.1, steps=3, batch=5)
    federation = make_federation(normed, make_clients(sizes=(15, 15, 15, 15, 15)))
    setting = Setting(normed, TARGET, local)
    assert both(recipes.scaffold, setting, federation) < 1e-5


def refused(model: Model, clients: tuple[ClientData, ...] | None, match: str) -> None:
    setting = Setting(model, TARGET, Local(batch=10))
    algorithm, federation = recipes.fedavg(setting), make_federation(model, clients)
    with pytest.raises(InputError, match=match):
        last(run(algorithm, federation, 1, backend=Stacked()))
    last(run(algorithm, federation, 1))  # the loop can


class Sequences(nn.Module):
    """An LSTM over an input cut into pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(len(x), -1, 4))[0][:, -1])


class Branching(nn.Module):
    """A network with Python code that branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if x.sum() > 0 else self.head(-x)


def drop() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))


def noisy(x: Tensor, seed: int) -> Tensor:
    return x + torch.randn(x.shape, generator=generator(seed, "noise"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: build(drop, 1), "dropout, augmentation .* loop or workers"),
        (lambda: Model(nn.Linear(FEATURES, CLASSES), augment=noisy), "dropout, augmentation"),
        (lambda: build(Branching, 1), "test_stacked.py, line .*if x.sum.*control flow"),
    ],
    ids=["dropout", "augmentation", "branching"],
)
def test_networks_that_cannot_be_stacked(make: Any, match: str) -> None:
    refused(make(), None, match)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_lstms_are_slow_but_right() -> None:
    """torch warns that it goes from client to client; where it cannot, it raises its own error."""
    model = build(Sequences, 1)
    federation = double(make_federation(model, make_clients(sizes=(9, 14, 20, 12))))
    assert both(recipes.fedavg, Setting(model, TARGET, Local(batch=10)), federation) < 1e-12


def test_padding_does_not_reach_batch_norm(normed: Model) -> None:
    clients = make_clients(sizes=(12, 20, 30))
    refused(normed, clients, "BatchNorm would see the padding")


def test_a_client_that_fails_is_named(setting: Setting) -> None:
    clients = list(make_clients())
    clients[4] = clients[4]._replace(y=clients[4].y + 1000)
    federation = replace(make_federation(setting.model), clients=tuple(clients))
    algorithm = recipes.fedavg(setting)
    current, ids = start(algorithm, federation), torch.arange(6)
    with pytest.raises(TrainingError, match="^client 4 failed: .*out of bounds"):
        play_round(algorithm, federation, current.server, {}, ids, 1, Stacked())
    lenient = replace(federation, gate=Gate(on_bad="drop"))
    played = play_round(algorithm, lenient, current.server, {}, ids, 1, Stacked())
    assert played.trained == (0, 1, 2, 3, 5)
    assert [one.client for one in played.dropped] == [4]


def test_blocks_fit_in_memory(setting: Setting) -> None:
    stage, jobs = round_of(recipes.fedavg(setting), make_federation(setting.model))

    def order(memory: int) -> list[int]:
        return [reply.client for reply in Stacked(memory)(stage, jobs)]

    def blocks(memory: int) -> list[int]:
        """How many clients each block has: a message is stacked once for each block."""
        sizes: list[int] = []

        def noted(*given: Any) -> Any:
            sizes.append(len(given[1]))
            return real(*given)

        with pytest.MonkeyPatch.context() as patch:
            real = stacked._together
            patch.setattr(stacked, "_together", noted)
            order(memory)
        return sizes

    # The least memory that is enough for all: six times the share of the largest client.
    whole = bisect_left(range(1 << 20), 1, lo=1, key=lambda memory: len(blocks(memory)) == 1)
    assert [blocks(whole), blocks(whole - 1)] == [[6], [3, 3]]
    assert [blocks(whole // 2), blocks(whole // 2 - 1)] == [[3, 3], [2, 2, 2]]
    assert blocks(1) == [1] * 6
    sizes = [len(stage.clients[i].y) for i in order(whole // 2)]
    assert sizes == sorted(sizes) != [len(c.y) for c in stage.clients]


def test_failures_are_answers_one_by_one_alone(setting: Setting) -> None:
    """A client whose reply is no tensor drops out with the reason, as one that fails does."""

    def odd(message: Parts, data: ClientData) -> None:
        try:
            client = int(data.id)
        except RuntimeError:
            raise ValueError("not together") from None
        if client == 1:
            raise ValueError("no reason")

    federation = replace(make_federation(setting.model), gate=Gate(on_bad="drop"))
    method = Meddling(recipes.fedavg(setting), odd)
    played = last(run(method, federation, 1, backend=Stacked()))
    assert [(one.client, one.reason) for one in played.dropped] == [
        (1, "client 1 failed: no reason")
    ]


def test_a_memory_limit_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="0 bytes for stacked clients"):
        Stacked(memory=0)


def test_mlps_without_hidden_layers() -> None:
    model = build(lambda: Mlp((FEATURES,), (), CLASSES), seed=1)
    assert both(recipes.fedavg, Setting(model, TARGET), make_federation(model)) < 1e-6


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("vmap", None, 'unknown backend "vmap"; allowed: auto, channels-last, cuda, '),
        ("stacked", 2, "--workers 2 is for the backends .*; stacked is one"),
        ("auto", 0, "--workers 0: give 1 or more"),
    ],
)
def test_backends_that_do_not_exist(name: str, count: int | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        backend_of(name, count)


def test_a_block_is_let_go_before_the_next_is_trained(setting: Setting) -> None:
    came: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    method = Meddling(
        recipes.fedavg(setting), lambda *given: alive.append(sum(v() is not None for v in came))
    )
    stage, jobs = round_of(method, make_federation(setting.model))
    for reply in Stacked(memory=1)(stage, jobs):
        came += [weakref.ref(v) for v in reply.update["delta"].values()]
        del reply
    assert max(alive) == 0
