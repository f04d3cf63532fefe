"""Failures on Flower: clients that drop out of a round, and federations that are refused."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.run import Federation, play_round, run, start
from fedshift.errors import FedshiftError, InputError, TrainingError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.federations import SIZES, make_clients, make_federation
from support.rounds import last

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.flower import LocalGrid, client_app, play
from fedshift.flower.installed import TRIED, put_in_place
from fedshift.flower.records import parts_of, to_records
from fedshift.tree import Parts
from support.flower_runs import differing_tensors, sites, strategy_of

Forge = Callable[[Parts], Parts]


class Unruly(LocalGrid):
    """A grid whose clients send changed replies, or none."""

    def __init__(self, app: ClientApp, clients: int, forge: dict[int, Forge | None]) -> None:
        super().__init__(app, clients)
        self.forge = forge

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        for reply in super().send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            client = int(self.contexts[node].node_config["partition-id"])
            if client not in self.forge or reply.metadata.message_type != "train":
                yield reply
                continue
            forge = self.forge[client]
            if forge is not None:
                forged = to_records(forge(parts_of(reply.content)))
                reply.content = RecordDict({**forged, "run": reply.content["run"]})
                yield reply


def with_delta(name: str, value: torch.Tensor) -> Forge:
    return lambda update: {**update, "delta": {**update["delta"], name: value}}


@pytest.fixture
def federation(mlp: Model) -> Federation:
    return make_federation(mlp)


TROUBLE: dict[str, tuple[Forge | None, str]] = {
    "silent": (None, "no answer in time"),
    "not finite": (
        with_delta("head.bias", torch.full((5,), torch.nan)),
        'client 3 sent non-finite numbers in "delta/head.bias"',
    ),
    "misshapen": (
        with_delta("head.bias", torch.zeros(7)),
        'client 3 sent "delta/head.bias" as torch.float32 (7,), expected torch.float32 (5,)',
    ),
    "of another type": (
        with_delta("head.bias", torch.zeros(5).double()),
        'client 3 sent "delta/head.bias" as torch.float64 (5,)',
    ),
    "with more in it": (
        lambda u: {**u, "extra": {"v": torch.zeros(1)}},
        'client 3 sent an update with a different "extra"',
    ),
    "in another's name": (
        lambda u: {**u, "report": {**u["report"], "id": torch.tensor(1)}},
        "client 3 says that it is client 1",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("forge", [pytest.param(v, id=k) for k, v in TROUBLE.items()])
def test_a_client_that_sends_nothing_useful_drops_out(
    forge: tuple[Forge | None, str],
    setting: Setting,
    federation: Federation,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The round is that of the clients present, weighed as if 3 had not been drawn."""
    algorithm = recipes.fedpals(setting, ess=0.9)
    grid = Unruly(client_app(sites(algorithm, federation)), len(SIZES), {3: forge[0]})
    with caplog.at_level(logging.WARNING, "fedshift.flower"):
        played = last(play(strategy_of(algorithm, federation), grid, 1))
    assert [one.client for one in played.dropped] == [3]
    assert played.dropped[0].reason.startswith(forge[1])
    assert f"round 1: client 3 dropped out: {forge[1]}" in caplog.text
    others = torch.tensor([0, 1, 2, 4, 5])
    server = start(algorithm, federation).server
    here = play_round(algorithm, federation, server, {}, others, 1)
    assert torch.equal(played.weights, here.weights)
    assert differing_tensors(here._replace(states={}), played) == []
    assert differing_tensors(
        last(run(algorithm, federation, 1))._replace(states={}), played
    )  # the control


def test_a_client_that_fails_keeps_what_it_had(setting: Setting, federation: Federation) -> None:
    """It raises in round 2, and takes part in round 3 with its state of round 1."""
    algorithm, good = recipes.scaffold(setting), sites(recipes.scaffold(setting), federation)
    strategy = strategy_of(algorithm, federation)
    now = {"t": 1}

    def site(i: int) -> Any:
        data = good(i).data
        if i == 4 and now["t"] == 2:
            data = data._replace(x=data.x * torch.inf)
        return replace(good(i), data=data)

    grid = LocalGrid(client_app(site, open_states=True), len(SIZES))
    controls, dropped = [], []
    for played in play(strategy, grid, 3, states=lambda t: True):
        now["t"] = played.t + 1
        controls.append(played.states[4]["control"]["head.bias"])
        dropped.append([one.client for one in played.dropped])
    assert dropped == [[], [4], []]
    assert torch.equal(controls[0], controls[1])
    assert not torch.equal(controls[1], controls[2])


def test_a_node_that_is_gone_is_not_weighed(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.fedpals(setting, ess=0.9)
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    strategy = strategy_of(algorithm, federation)
    strategy.begin(grid)
    grid.absent = {1000, 1007}
    played = last(play(strategy, grid, 1))
    assert played.dropped == tuple((i, "its node is not connected", "lost") for i in (0, 1))
    server = start(algorithm, federation).server
    here = play_round(algorithm, federation, server, {}, torch.arange(2, 6), 1)
    assert differing_tensors(here._replace(states={}), played) == []
    grid.absent = set(grid.contexts)
    with pytest.raises(TrainingError, match="round 2: none of 6 clients sent an update that can"):
        last(play(strategy, grid, 2))


def test_one_odd_client_does_not_make_the_others_odd(
    setting: Setting, federation: Federation
) -> None:
    """Client 0 replies first; it is the odd one, not the five others."""
    algorithm = recipes.scaffold(setting)
    forge = {0: lambda u: {**u, "control": {**u["control"], "head.bias": torch.zeros(2)}}}
    grid = Unruly(client_app(sites(algorithm, federation)), len(SIZES), forge)
    played = last(play(strategy_of(algorithm, federation), grid, 1))
    assert [one.client for one in played.dropped] == [0]


def test_a_round_without_any_answer_ends_the_run(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.fedavg(replace(setting, local=Local(lr=1e30, epochs=4, batch=8)))
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    message = "round 1: none of 6 clients sent an update that can be used; client 0: client 0 sent"
    with pytest.raises(TrainingError, match=message):
        last(play(strategy_of(algorithm, federation), grid, 1))


def test_no_weights_over_those_that_are_left(setting: Setting, federation: Federation) -> None:
    """Six clients can share a cap of 0.2, four cannot."""
    algorithm = recipes.fedpals(setting, lam=5.0, cap=0.2)
    grid = Unruly(client_app(sites(algorithm, federation)), len(SIZES), {1: None, 2: None})
    with pytest.raises(TrainingError, match=r"round 1: clients \[0, 3, 4, 5\] are left, and there"):
        last(play(strategy_of(algorithm, federation), grid, 1))


def refused(
    algorithm: Any, federation: Federation, site: Any = None, nodes: Any = None, **given: Any
) -> str:
    """The error for a federation that the server cannot work with."""
    app = client_app(site or sites(algorithm, federation))
    grid = LocalGrid(app, len(federation.clients), partitions=nodes)
    with pytest.raises(InputError) as error:
        strategy_of(algorithm, federation, **given).begin(grid)
    return str(error.value)


def test_too_few_nodes(setting: Setting, federation: Federation) -> None:
    message = refused(recipes.fedavg(setting), federation, nodes={0: 0, 1: 1, 2: 2, 3: 3})
    assert message == (
        "4 of 6 clients are connected after 0.1 s; start the others, or expect fewer"
    )


class Registered(LocalGrid):
    """Nodes that operators have named."""

    def get_nodes(self) -> Any:
        return [SimpleNamespace(node_id=n, name=f"site-{n}") for n in self.get_node_ids()]


def test_connected_clients_are_named(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.fedavg(setting)
    grid = Registered(client_app(sites(algorithm, federation)), 6, partitions={0: 0, 2: 2})
    with pytest.raises(InputError, match=r"2 of 6 .* after 0\.1 s \(site-1000, site-1014\); start"):
        strategy_of(algorithm, federation).begin(grid)


def test_two_nodes_of_one_partition(setting: Setting, federation: Federation) -> None:
    nodes = dict.fromkeys(range(6)) | {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 4}
    assert refused(recipes.fedavg(setting), federation, nodes=nodes) == (
        "node 1028 and node 1035 both have partition-id 4; give each node one of its own"
    )


def test_a_partition_that_does_not_exist(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.fedavg(setting)
    many = make_federation(setting.model, make_clients(sizes=(9, 9, 9, 9, 9, 9, 9, 9)))
    nodes = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 7}
    assert refused(algorithm, federation, sites(algorithm, many), nodes) == (
        "node 1035 has partition-id 7; with 6 clients they are 0..5"
    )


def test_another_network(setting: Setting, federation: Federation) -> None:
    wide = build(lambda: Mlp((8,), (10,), 7), seed=1)
    good = sites(recipes.fedavg(setting), federation)

    def site(i: int) -> Any:
        return replace(good(i), first=wide.init()) if i == 2 else good(i)

    assert refused(recipes.fedavg(setting), federation, site) == (
        "client 2 has another model than the server: head.weight (7, 10) torch.float32; "
        "head.bias (7,) torch.float32, where the server has head.weight (5, 10) torch.float32; "
        "head.bias (5,) torch.float32. Give both the same network and number of classes"
    )


def test_more_classes_than_the_server_knows(setting: Setting, federation: Federation) -> None:
    message = refused(recipes.fedavg(setting), federation, classes=3)
    assert "cannot take part: client" in message
    assert message.endswith("has label 4, and the server expects 3 classes, labels 0..2")


def test_data_of_another_partition(setting: Setting, federation: Federation) -> None:
    good = sites(recipes.fedavg(setting), federation)
    message = refused(recipes.fedavg(setting), federation, lambda i: good((i + 1) % 6))
    assert "the node of partition" in message
    assert "give client_data(x, y, partition)" in message


def test_first_models_of_other_numbers_are_logged(
    setting: Setting, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = recipes.ditto(setting)
    good, other = sites(algorithm, federation), build(lambda: Mlp((8,), (10,), 5), seed=9)

    def site(i: int) -> Any:
        return replace(good(i), first=other.init()) if i == 2 else good(i)

    grid = LocalGrid(client_app(site), len(SIZES))
    with caplog.at_level(logging.WARNING, "fedshift.flower"):
        strategy_of(algorithm, federation).begin(grid)
    assert "clients [2] start from a first model with other numbers" in caplog.text


def test_cohorts_larger_than_the_federation(setting: Setting, federation: Federation) -> None:
    with pytest.raises(InputError, match="a cohort of 7 clients from 6"):
        strategy_of(recipes.fedavg(setting), federation, cohort=7, seeds=Seeds())


def test_flower_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedshift.flower.installed as installed

    def missing(name: str) -> str:
        raise installed.PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    with pytest.raises(InputError, match=r"not installed: pip install 'fedshift\[flower\]'"):
        from fedshift.flower import LocalGrid as _  # noqa: F401
    monkeypatch.setattr(installed, "version", lambda name: "1.40.2")
    with pytest.raises(InputError, match=r"flwr 1.40.2 is installed.*works with 1.41"):
        installed.check_flower()
    monkeypatch.setattr(installed, "version", lambda name: "1.41.7")
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs Ray, which is not installed"):
        installed.check_flower(simulation=True)


def test_nothing_is_put_where_flower_has_no_such_name() -> None:
    """Otherwise a Flower with another name for its hook would run without the guard."""
    owner = SimpleNamespace(__name__="flwr.superlink.ext", get_middleware=list)
    put_in_place(owner, "get_middleware", tuple)
    assert owner.get_middleware is tuple
    with pytest.raises(FedshiftError, match="^Flower has no flwr.superlink.ext.get_mid_ware"):
        put_in_place(owner, "get_mid_ware", tuple)
    assert not hasattr(owner, "get_mid_ware")


def test_the_range_of_flower_versions_is_what_the_tests_run_on() -> None:
    """Lowest allowed, pinned for the tests, accepted at run time, and documented: one number."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (wanted,) = extras["optional-dependencies"]["flower"]
    low, high = re.fullmatch(r"flwr\[simulation\]>=(1\.\d+),<(1\.\d+)", wanted).groups()
    first, last = (int(text.split(".")[1]) for text in (low, high))
    assert tuple(f"1.{minor}" for minor in range(first, last)) == TRIED
    assert f"flwr=={low}.0\n" in (root / "constraints.txt").read_text()
    assert f"flwr >= {low}, < {high}" in (root / "docs" / "flower.md").read_text()
    assert version("flwr").startswith(tuple(f"{minor}." for minor in TRIED))
