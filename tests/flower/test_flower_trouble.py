"""Failures on Flower: clients that drop out of a round, and federations that are refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
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
from flwr.app import RecordDict

from fedshift.flower import LocalGrid, Site, client_app, play
from fedshift.flower.installed import TRIED, put_in_place
from fedshift.flower.records import parts_of, to_records
from fedshift.tree import Parts
from support.flower_runs import Answering, differing_tensors, sites, strategy_of

Forge = Callable[[Parts], Parts]


@pytest.fixture
def federation(mlp: Model) -> Federation:
    return make_federation(mlp)


def unruly(algorithm: Any, federation: Federation, forge: Forge | None) -> LocalGrid:
    """A grid on which client 2 sends changed updates, or none."""

    def change(content: RecordDict) -> None:
        assert forge is not None
        forged = to_records(forge(parts_of(content)))
        run_ = content["run"]
        content.clear()
        content.update({**forged, "run": run_})

    app = client_app(sites(algorithm, federation))
    return Answering(app, len(SIZES), "train", None if forge is None else change)


def with_delta(value: torch.Tensor) -> Forge:
    return lambda update: {**update, "delta": {**update["delta"], "head.bias": value}}


TROUBLE: dict[str, tuple[Forge | None, str]] = {
    "silent": (None, "no answer in time"),
    "not finite": (with_delta(torch.full((5,), torch.nan)), '"delta/head.bias"'),
    "misshapen": (with_delta(torch.zeros(7)), '"delta/head.bias"'),
    "of another type": (with_delta(torch.zeros(5).double()), '"delta/head.bias"'),
    "with more in it": (lambda u: {**u, "extra": {"v": torch.zeros(1)}}, '"extra"'),
    "in another's name": (
        lambda u: {**u, "report": {**u["report"], "id": torch.tensor(1)}},
        "client 1",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", TROUBLE)
def test_a_client_that_sends_nothing_useful_drops_out(
    case: str, setting: Setting, federation: Federation
) -> None:
    """The round is that of the clients present, weighed as if 2 had not been drawn."""
    (forge, words), reported = TROUBLE[case], list[Any]()
    algorithm = recipes.fedpals(setting, ess=0.9)
    strategy = strategy_of(algorithm, federation, dropping=lambda *one: reported.append(one))
    played = last(play(strategy, unruly(algorithm, federation, forge), 1))
    ((t, dropped),) = reported
    assert (t, played.dropped, dropped.client) == (1, (dropped,), 2)
    assert words in dropped.reason
    server = start(algorithm, federation).server
    here = play_round(algorithm, federation, server, {}, torch.tensor([0, 1, 3, 4, 5]), 1)
    assert torch.equal(played.weights, here.weights)
    assert differing_tensors(here._replace(states={}), played) == []
    everyone = last(run(algorithm, federation, 1))._replace(states={})
    assert differing_tensors(everyone, played)  # the control


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
    assert [(one.client, one.kind) for one in played.dropped] == [(0, "lost"), (1, "lost")]
    server = start(algorithm, federation).server
    here = play_round(algorithm, federation, server, {}, torch.arange(2, 6), 1)
    assert differing_tensors(here._replace(states={}), played) == []
    grid.absent = set(grid.contexts)
    with pytest.raises(TrainingError, match="round 2: none of 6 clients"):
        last(play(strategy, grid, 2))


def test_rounds_that_end_a_run(setting: Setting, federation: Federation) -> None:
    """All clients diverge; and a cap of 0.2 that six clients can share, but not four."""
    algorithm = recipes.fedavg(replace(setting, local=Local(lr=1e30, epochs=4, batch=8)))
    grid = LocalGrid(client_app(sites(algorithm, federation)), len(SIZES))
    with pytest.raises(TrainingError, match="round 1: none of 6 clients"):
        last(play(strategy_of(algorithm, federation), grid, 1))
    algorithm = recipes.fedpals(setting, lam=5.0, cap=0.2)
    capped, strategy = unruly(algorithm, federation, None), strategy_of(algorithm, federation)
    strategy.begin(capped)
    capped.absent = {1000}
    with pytest.raises(TrainingError, match=r"round 1: clients \[1, 3, 4, 5\] are left"):
        last(play(strategy, capped, 1))


def begun(algorithm: Any, federation: Federation, site: Any = None, **given: Any) -> None:
    nodes = given.pop("nodes", None)
    app = client_app(site or sites(algorithm, federation))
    grid = LocalGrid(app, len(federation.clients), partitions=nodes)
    strategy_of(algorithm, federation, **given).begin(grid)


# What is given in place of six clients that fit, and what the error names.
FEDERATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "too few nodes": ({"nodes": {0: 0, 1: 1, 2: 2, 3: 3}}, "4 of 6 clients are connected"),
    "two of one partition": (
        {"nodes": {**{i: i for i in range(5)}, 5: 4}},
        "node 1028 and node 1035 both have partition-id 4",
    ),
    "more classes": ({"classes": 3}, "the server expects 3 classes"),
    "a cohort of too many": ({"cohort": 7, "seeds": Seeds()}, "a cohort of 7 clients from 6"),
    "too few to begin": ({"min_clients": 0}, "min_clients=0"),
    "too many to begin": ({"min_clients": 7}, "min_clients=7"),
    "fewer than no retries": ({"retries": -1}, "retries"),
    "no time": ({"timeout": 0.0}, "timeout"),
    "no method": ({"algorithm": make_clients()[0]}, "algorithm"),
    "half a client": ({"clients": 3.0}, "clients"),
    "classes in words": ({"classes": "5"}, "classes"),
    "a flag as a cohort": ({"cohort": True}, "cohort"),
    "no seeds": ({"seeds": 0}, "seeds"),
    "no gate": ({"gate": "drop"}, "gate"),
}


@pytest.mark.parametrize("case", FEDERATIONS)
def test_federations_that_are_refused(case: str, setting: Setting, federation: Federation) -> None:
    wrong, words = FEDERATIONS[case]
    right: dict[str, Any] = {"algorithm": recipes.fedavg(setting), "federation": federation}
    begun(**right)  # the control
    with pytest.raises(InputError, match=re.escape(words)):
        begun(**(right | wrong))


def test_sites_that_are_refused(setting: Setting, federation: Federation) -> None:
    """Another network, a partition that does not exist, data of another; and what is no site."""
    algorithm, wide = recipes.fedavg(setting), build(lambda: Mlp((8,), (10,), 7), seed=1)
    good = sites(algorithm, federation)
    many = sites(algorithm, make_federation(setting.model, make_clients(sizes=(9,) * 8)))
    nodes = {**{i: i for i in range(5)}, 5: 7}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (lambda i: replace(good(i), first=wide.init()) if i == 2 else good(i), {}, "head.weight"),
        (many, {"nodes": nodes}, "partition-id 7; with 6 clients"),
        (lambda i: good((i + 1) % 6), {}, "give client_data(x, y, partition)"),
    ]
    for site, given, words in cases:
        with pytest.raises(InputError, match=re.escape(words)):
            begun(algorithm, federation, site, **given)
    client: Any = federation.clients[0]
    for call, field in (
        (lambda: client_app(good(0)), "site"),
        (lambda: Site(client, algorithm), "algorithm"),  # type: ignore[arg-type]
        (lambda: Site(algorithm, client, 0.5), "seed"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=field):
            call()


def test_first_models_of_other_numbers_are_logged(
    setting: Setting, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = recipes.ditto(setting)
    good, other = sites(algorithm, federation), build(lambda: Mlp((8,), (10,), 5), seed=9)
    begun(
        algorithm, federation,
        lambda i: replace(good(i), first=other.init()) if i == 2 else good(i),
    )  # fmt: skip
    assert "clients [2] start from a first model with other numbers" in caplog.text


def test_flower_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import fedshift.flower.installed as installed

    def missing(name: str) -> str:
        raise installed.PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    with pytest.raises(InputError, match=r"pip install 'fedshift\[flower\]'"):
        from fedshift.flower import LocalGrid as _  # noqa: F401
    monkeypatch.setattr(installed, "version", lambda name: "1.40.2")
    with pytest.raises(InputError, match=r"flwr 1.40.2 is installed"):
        installed.check_flower()
    monkeypatch.setattr(installed, "version", lambda name: "1.41.7")
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs Ray"):
        installed.check_flower(simulation=True)


def test_nothing_is_put_where_flower_has_no_such_name() -> None:
    """Otherwise a Flower with another name for its hook would run without the guard."""
    owner = SimpleNamespace(__name__="flwr.superlink.ext", get_middleware=list)
    put_in_place(owner, "get_middleware", tuple)
    assert owner.get_middleware is tuple
    with pytest.raises(FedshiftError, match="get_mid_ware"):
        put_in_place(owner, "get_mid_ware", tuple)
    assert not hasattr(owner, "get_mid_ware")


def test_the_range_of_flower_versions_is_what_the_tests_run_on() -> None:
    """Lowest allowed, pinned for the tests, accepted at run time, and documented: one number."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (wanted,) = extras["optional-dependencies"]["flower"]
    found = re.fullmatch(r"flwr\[simulation\]>=1\.(\d+),<1\.(\d+)", wanted)
    assert found is not None
    first, end = map(int, found.groups())
    assert tuple(f"1.{minor}" for minor in range(first, end)) == TRIED
    assert f"flwr==1.{first}.0\n" in (root / "constraints.txt").read_text()
    assert f"flwr >= 1.{first}, < 1.{end}" in (root / "docs" / "flower.md").read_text()
    assert version("flwr").startswith(tuple(f"{minor}." for minor in TRIED))
