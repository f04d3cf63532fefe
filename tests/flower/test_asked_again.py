"""Clients on Flower that fail are asked again, and no round is trained twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import ArrayRecord, ConfigRecord

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import Federation
from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play
from fedshift.flower.rounds import answered
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.federations import SIZES, make_federation


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=1, batch=8))


@pytest.fixture
def federation(mlp: Model) -> Federation:
    return replace(make_federation(mlp), gate=Gate(on_bad="drop"))


def over(algorithm: Any, federation: Federation, failing: dict[int, int], **more: Any) -> Any:
    """(rounds on Flower, messages sent) where client i fails in its first failing[i] attempts."""
    clients: list[int] = []

    def site(i: int) -> Site:
        clients.append(i)
        if clients.count(i) <= failing.get(i, 0) + 1 and clients.count(i) > 1:  # it registers first
            raise OSError("the disk of this client is asleep")
        return Site(algorithm, federation.clients[i], federation.seeds.batch)

    strategy = AlgorithmStrategy(
        algorithm, clients=len(SIZES), classes=5, seeds=Seeds.of(0), timeout=60.0, **more
    )
    return list(play(strategy, LocalGrid(client_app(site), len(SIZES)), 2)), clients


def test_flower_asks_failed_clients_again(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.scaffold(setting)
    rounds, clients = over(algorithm, federation, {2: 1, 4: 3}, retries=2)
    assert [[one.client for one in r.dropped] for r in rounds] == [[4], []]
    assert rounds[0].dropped[0].reason.endswith("the disk of this client is asleep")
    assert [clients.count(i) for i in range(6)] == [3, 3, 4, 3, 5, 3]
    once, _ = over(algorithm, federation, {2: 1, 4: 3})
    assert [one.client for one in once[0].dropped] == [2, 4]


def test_a_round_is_not_trained_twice(setting: Setting, federation: Federation) -> None:
    """The answer was lost: the client's state has moved, and must not move again."""
    for method, refused in ((recipes.scaffold, True), (recipes.fedavg, False)):
        algorithm = method(setting)
        grid = LocalGrid(
            client_app(lambda i, a=algorithm: Site(a, federation.clients[i])), len(SIZES)
        )
        strategy = AlgorithmStrategy(algorithm, clients=len(SIZES), classes=5, seeds=Seeds.of(0))
        for attempt in range(2):
            sent = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
            replies = answered(grid, sent, 60.0, 0)
            failures = [r.content.config_records.get("failure") for r in replies]
            reasons = [str(one["reason"]) for one in failures if one is not None]
            assert len(reasons) == (len(SIZES) if refused and attempt else 0), reasons
            assert all("round 1 was trained here before" in why for why in reasons)
