"""A federation that begins without some of its clients, which join late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.round import Round
from fedshift.engine.run import Federation
from fedshift.errors import InputError
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import SIZES, TARGET, make_federation

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.flower import AlgorithmStrategy, LocalGrid, client_app, play
from fedshift.flower.late import with_rows
from support.flower_runs import differing_tensors, sites, strategy_of
from support.routing import routed_model

ROUNDS, LATE, MOST = 4, 3, len(SIZES) - 1
NODE = 1000 + 7 * LATE
# Their rounds depend on the counts of all.
REFUSED = {
    "afl", "afl with idle clients", "scaffold + fedpals",
    "labelset_scaffold", "labelset_scaffold I",
}  # fmt: skip


@pytest.fixture
def federation() -> Federation:
    return make_federation(routed_model())


@pytest.fixture
def setting() -> Setting:
    """Of a network for every method, with a router."""
    return Setting(routed_model(), TARGET, Local(lr=0.1, epochs=1, batch=16), clients=len(SIZES))


def joining(
    strategy: AlgorithmStrategy, grid: LocalGrid, rounds: int = ROUNDS, come: int = 2
) -> Iterator[Round]:
    """A run whose client LATE is connected only after round `come`."""
    grid.absent = {NODE}
    for played in play(strategy, grid, rounds):
        yield played
        if played.t == come:
            grid.absent = set()


def grid_of(algorithm: Any, federation: Federation, changed: Any = None) -> LocalGrid:
    return LocalGrid(client_app(changed or sites(algorithm, federation)), len(SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_a_late_client_counts_as_one_that_dropped_out_before(
    name: str, setting: Setting, federation: Federation
) -> None:
    """Bit for bit: the server's state with its table, the weights, and the clients that trained."""
    algorithm = MAKE[name](setting)
    with_all = strategy_of(algorithm, federation)
    grid = grid_of(algorithm, federation)
    with_all.begin(grid)
    first = list(joining(with_all, grid))
    late = strategy_of(algorithm, federation, min_clients=MOST)
    if name in REFUSED:
        with pytest.raises(InputError, match=r"clients \[3\] have not joined"):
            list(joining(late, grid_of(algorithm, federation)))
        return
    second = list(joining(late, grid_of(algorithm, federation)))
    assert [[d.client for d in r.dropped] for r in second] == [[LATE], [LATE], [], []]
    assert differing_tensors(first[-1], second[-1]) == []
    if name == "fedavg":  # the control: others may leave the server's model alone
        assert differing_tensors(first[-2], second[-1])
    assert [r.weights.tolist() for r in first] == [r.weights.tolist() for r in second]
    assert second[0].dropped[0].reason == "it has not joined yet"


def test_what_late_clients_register_is_passed_on(setting: Setting, federation: Federation) -> None:
    """As for the others before round 1: a liar that comes late is audited, too."""
    algorithm, tables = recipes.fedpals(setting, ess=0.9), list[Any]()
    strategy = strategy_of(algorithm, federation, min_clients=MOST, registers=tables.append)
    list(joining(strategy, grid_of(algorithm, federation)))
    before, after = (table["n"].tolist() for table in tables)
    assert after == federation.table["n"].tolist()
    assert before == [0.0 if i == LATE else n for i, n in enumerate(after)]


@pytest.mark.slow
@pytest.mark.parametrize("come", [0, 3])
def test_a_run_goes_on_with_others_than_it_began_with(
    come: int, setting: Setting, federation: Federation
) -> None:
    """The next server starts without the late client again, or with it: the same numbers."""
    algorithm = recipes.fedpals(setting, ess=0.9)
    strategy = strategy_of(algorithm, federation, min_clients=MOST)
    whole = list(joining(strategy, grid_of(algorithm, federation)))
    after = whole[come - 1 if come else 1]
    again = strategy_of(algorithm, federation, min_clients=MOST, after=after)
    grid = grid_of(algorithm, federation)
    # In the checkpoint it has joined, and now it is not there for one round.
    grid.absent = {1000 + 7 * 5} if come else set()
    played = list(play(again, grid, ROUNDS))
    if come:
        assert [d.client for d in played[-1].dropped] == [5]
        table = played[-1].server["table"]
        assert all(torch.equal(v, table[k]) for k, v in after.server["table"].items())
    else:
        assert differing_tensors(whole[-1], played[-1]) == []


@pytest.mark.slow
def test_other_counts_than_before_are_refused_when_it_comes_back(
    setting: Setting, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on without it, and asks it once."""
    algorithm = recipes.fedpals(setting, ess=0.9)
    whole = list(play(strategy_of(algorithm, federation), grid_of(algorithm, federation), 1))
    good = sites(algorithm, federation)

    def site(i: int) -> Any:
        one = good(i)
        if i != LATE:
            return one
        cut = one.data._replace(x=one.data.x[1:], y=one.data.y[1:], w=one.data.w[1:])
        return replace(one, data=cut)

    strategy = strategy_of(algorithm, federation, min_clients=MOST, after=whole[-1])
    grid = grid_of(algorithm, federation, site)
    played = list(joining(strategy, grid, 5))
    assert [[d.client for d in r.dropped] for r in played] == [[LATE]] * 4
    assert caplog.text.count(f"client {LATE} registered another") == 1


def test_a_late_client_that_cannot_take_part_ends_no_run(
    setting: Setting, federation: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = recipes.fedavg(setting)
    app = client_app(sites(algorithm, federation))
    grid = LocalGrid(app, len(SIZES), partitions={i: (0 if i == LATE else i) for i in range(6)})
    strategy = strategy_of(algorithm, federation, min_clients=MOST)
    played = list(joining(strategy, grid))
    assert [[d.client for d in r.dropped] for r in played] == [[LATE]] * ROUNDS
    assert caplog.text.count("both have partition-id 0") == 1


def test_missing_clients_are_named(setting: Setting, federation: Federation) -> None:
    """By the names of a federation's folders; of other names, those that are connected."""
    algorithm = recipes.fedavg(setting)
    grid: Any = grid_of(algorithm, federation)
    grid.absent = {NODE, 1000}
    for name, ending in (("client-{}", "client-0, client-3"), ("hospital-{}", "hospital-1, ")):
        grid.get_nodes = lambda name=name: [
            SimpleNamespace(node_id=n, name=name.format((n - 1000) // 7))
            for n in grid.get_node_ids()
        ]
        with pytest.raises(InputError, match=f"^4 of 6 clients are connected .*{ending}"):
            strategy_of(algorithm, federation, min_clients=MOST).begin(grid)


def test_rows_alone_are_changed() -> None:
    one = {"a": {"n": torch.tensor([1.0, 0.0]), "sum": torch.tensor(1.0)}}
    two = {"a": {"n": torch.tensor([1.0, 2.0]), "sum": torch.tensor(3.0)}}
    now = {"a": {"n": torch.tensor([1.0, 0.0]), "sum": torch.tensor(1.0)}, "b": {}}
    with pytest.raises(InputError, match='"a/sum"'):
        with_rows(now, one, two, [1])
    with pytest.raises(InputError, match='"a/n"'):
        with_rows(now, one, {"a": {"n": torch.tensor([5.0, 2.0])}}, [1])
    assert with_rows(now, one, {"a": {"n": two["a"]["n"]}}, [1])["a"]["n"].tolist() == [1.0, 2.0]
    assert now["a"]["n"].tolist() == [1.0, 0.0]
