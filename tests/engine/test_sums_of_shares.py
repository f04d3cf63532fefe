"""Sums taken in the processes that trained: the same numbers, and no bad reply in them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.backends import Backend, Block, ClientUpdate, Job, Reply, loop
from fedshift.engine.checks.gate import Asked, Gate
from fedshift.engine.processes.pool import Team, workers
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.sums.running import RunningSums
from fedshift.engine.traffic import Meter
from fedshift.errors import DivergedError, TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.tree import Params, Parts
from support.every_method import MAKE, ROUNDS
from support.federations import make_clients, make_federation
from support.odd_work import SIZES, OddWork, changed
from support.rounds import different, far, last

pytestmark = [
    pytest.mark.routed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked"),
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    """Two workers for the runs of all methods: to start them anew takes longer than a run."""
    with workers(make_clients(), 2) as team:
        yield team


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_method_with_sums_of_sums(make: Any, setting: Setting, pair: Team) -> None:
    """The loop's result up to the order of sums, the same each time."""
    federation = make_federation(setting.model, tuple(pair.clients))
    algorithm, backend = make(setting), pair.blocks(loop)
    alone = last(run(algorithm, federation, ROUNDS))
    one, two = (last(run(algorithm, federation, ROUNDS, backend=backend)) for _ in range(2))
    assert far(alone, one) < 1e-5
    assert not different(one, two)


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_which_process_sums_which_clients(
    count: int, setting: Setting, federation: Federation, entered: list[tuple[int, ...]]
) -> None:
    """Other processes sum what they trained, this one clients one by one, and two not at all."""
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, count) as team:
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert sorted(sum(entered, ())) == list(range({1: 0, 2: 4, 3: 2}[count], 8))
    assert far(alone, together) < 1e-6


def test_the_comparison_can_fail(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = RunningSums.add

    def lose(self: RunningSums, blocks: Sequence[Block]) -> list[Block]:
        less = [{k: {n: v * 0 for n, v in t.items()} for k, t in b.sums.items()} for b in blocks]
        lost = [b._replace(sums=sums) for b, sums in zip(blocks, less, strict=True)]
        return add(self, lost)

    monkeypatch.setattr(RunningSums, "add", lose)
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, 2) as team:
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert far(alone, together) > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "gate"),
    [(recipes.fedavg, Gate(on_bad="drop")), (recipes.fedmedian, Gate())],
    ids=["what is bad drops out", "a median"],
)
def test_where_nothing_is_summed(
    make: Any, gate: Gate, setting: Setting, federation: Federation, entered: list[tuple[int, ...]]
) -> None:
    algorithm, federation = make(setting), replace(federation, gate=gate)
    alone = last(run(algorithm, federation, 2))
    with workers(federation.clients, 2) as team:
        together = last(run(algorithm, federation, 2, backend=team.blocks(loop)))
    assert entered == []
    assert not different(alone, together)


@dataclass(frozen=True)
class Oddly:
    kind: str
    client: int = 6

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return loop(OddWork(update, self.client, partial(changed, self.kind)), jobs)


KINDS = ["nan", "large", "form", "type", "names", "another's", "more", "kept"]


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("clients", [5, 6, 7, 8, 9, 11])
def test_no_client_is_left_out(clients: int, members: int, setting: Setting) -> None:
    """Also where replies of this process lie on both sides of a share; the order is kept."""
    sizes = (12, 9, 7, 14, 10, 8, 11, 13, 9, 6, 5)[:clients]
    federation = make_federation(setting.model, make_clients(sizes=sizes))
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, members) as team:
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert far(alone, together) < 1e-6
    assert together.trained == alone.trained


# A client of the main process, and one of the worker; and the clients summed before it.
WHERE = [(2, [(4, 5, 6, 7)]), (6, [(4, 5)])]


@pytest.mark.few(1)
@pytest.mark.parametrize(("client", "before"), WHERE)
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_what_is_not_finite_is_not_summed(
    kind: str, client: int, before: list[tuple[int, ...]], setting: Setting, federation: Federation,
    entered: list[tuple[int, ...]],
) -> None:  # fmt: skip
    """The sum alone reveals it: no limit of the gate is set."""
    with (
        workers(federation.clients, 2) as team,
        pytest.raises(DivergedError, match=f"client {client} sent"),
    ):
        last(run(recipes.fedavg(setting), federation, 1, backend=team.blocks(Oddly(kind, client))))
    assert entered == before


@pytest.mark.few(1)
@pytest.mark.parametrize(("client", "before"), WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_replies_raise_the_same_error_as_in_one_process(
    kind: str, client: int, before: list[tuple[int, ...]], setting: Setting, federation: Federation,
    entered: list[tuple[int, ...]],
) -> None:  # fmt: skip
    """Type and message are equal, although the sums would have been taken elsewhere."""
    federation = replace(federation, gate=Gate(max_norm=1e3))
    algorithm = recipes.fedavg(setting)

    def error_of(backend: Backend) -> Exception:
        with pytest.raises((TrainingError, RuntimeError)) as caught:
            last(run(algorithm, federation, 1, backend=backend))
        return caught.value

    with workers(federation.clients, 2) as team:
        alone, together = error_of(Oddly(kind, client)), error_of(team.blocks(Oddly(kind, client)))
    assert (type(together), str(together)) == (type(alone), str(alone))
    assert f"client {client}" in str(alone)
    assert isinstance(alone, DivergedError) == (kind in ("nan", "kept"))
    assert entered == before


def refused(sent: Parts, state: Parts) -> tuple[Parts, Parts]:
    raise RuntimeError("boom")


@dataclass(frozen=True)
class OddThenRefused:
    """Client 0 sends NaN, and client 9 fails."""

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        odd = OddWork(update, 0, partial(changed, "nan"))
        return loop(OddWork(odd, 9, refused), jobs)


@pytest.mark.slow
def test_the_first_to_be_refused_ends_the_round(setting: Setting) -> None:
    """Replies pass the gate while other clients of the same process train."""
    federation = make_federation(setting.model, make_clients(sizes=SIZES * 3))
    algorithm = recipes.fedavg(setting)
    with workers(federation.clients, 2) as team:
        for backend in (OddThenRefused(), team.blocks(OddThenRefused())):
            with pytest.raises(DivergedError, match="client 0 sent"):
                last(run(algorithm, federation, 1, backend=backend))


@pytest.mark.slow
def test_which_clients_pass_the_main_processs_gate(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, entered: list[tuple[int, ...]]
) -> None:
    """Those that it trained, eight at a time; clients of another process fill the last eight."""
    federation = make_federation(setting.model, make_clients(sizes=SIZES * 3))
    algorithm, plain = recipes.fedavg(setting), Gate.admit
    alone, looked_at = last(run(algorithm, federation, 1)), list[tuple[int, ...]]()

    def noted(self: Gate, replies: Any, asked: Asked, *rest: Any) -> Any:
        looked_at.append(asked.clients)
        return plain(self, replies, asked, *rest)

    with workers(federation.clients, 2) as team:
        monkeypatch.setattr(Gate, "admit", noted)
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert sum(entered, ()) == tuple(range(12, 24))
    assert looked_at == [tuple(range(8)), tuple(range(8, 16))]
    assert together.trained == alone.trained == tuple(range(24))
    assert far(alone, together) < 1e-6


@dataclass(frozen=True)
class OtherReports:
    """`loop`, with changed reports of the clients from 12 on."""

    change: Callable[[Params], Params]

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(update, jobs):
            odd = {**reply.update, "report": self.change(reply.update["report"])}
            yield reply._replace(update=odd) if reply.client >= 12 else reply


def in_float64(report: Params) -> Params:
    return {**report, "loss": report["loss"].double()}


def with_more(report: Params) -> Params:
    return {**report, "more": report["loss"]}


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 3, 4, 6])
@pytest.mark.parametrize("change", [in_float64, with_more])
def test_reports_of_two_shares_are_alike(change: Any, members: int, setting: Setting) -> None:
    """Each share has one form, but eight clients that pass the gate together have two."""
    federation = make_federation(setting.model, make_clients(sizes=SIZES * 3))
    algorithm = recipes.fedavg(setting)

    def error_of(backend: Backend) -> str:
        with pytest.raises(TrainingError) as error:
            last(run(algorithm, federation, 1, backend=backend))
        return str(error.value)

    alone = error_of(OtherReports(change))
    with workers(federation.clients, members) as team:
        assert error_of(team.blocks(OtherReports(change))) == alone
    assert alone.startswith("client 12 sent")


def test_bytes_are_counted_as_if_updates_had_come(
    setting: Setting, federation: Federation, entered: list[tuple[int, ...]]
) -> None:
    algorithm = recipes.scaffold(setting)
    alone, together = Meter(), Meter()
    last(run(algorithm, federation, 1, meter=alone))
    with workers(federation.clients, 2) as team:
        last(run(algorithm, federation, 1, backend=team.blocks(Stacked()), meter=together))
    assert sorted(sum(entered, ())) == list(range(8))
    assert together.last == alone.last
    assert alone.last.up > 0


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=2, batch=8), rounds=ROUNDS)
