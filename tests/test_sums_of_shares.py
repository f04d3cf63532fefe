"""Sums that workers make of what they trained: the same numbers, and nothing bad gets into them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import Setting, make_clients, make_federation
from every_method import MAKE, ROUNDS
from routing import routed_model
from test_workers import different, everything, last

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.fold import Fold, Share
from fedshift.engine.gate import Asked, Gate
from fedshift.engine.rounds import Federation, Round, run
from fedshift.engine.shares import Books, Terms, summed, summing
from fedshift.engine.stacked import Stacked
from fedshift.engine.traffic import Meter
from fedshift.engine.workers import workers
from fedshift.errors import DivergedError, TrainingError
from fedshift.model import Model
from fedshift.tree import Parts, flatten

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")

# Examples of clients 0 to 7.
SIZES = (12, 9, 7, 14, 10, 8, 11, 13)


@pytest.fixture
def mlp() -> Model:
    return routed_model()


@pytest.fixture
def federation(setting: Setting) -> Federation:
    return make_federation(setting.model, make_clients(sizes=SIZES))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Clients whose updates were summed in workers, as they come."""
    seen: list[int] = []
    enter = Fold.enter

    def noted(self: Fold, share: Share) -> None:
        seen.extend(share.clients)
        enter(self, share)

    monkeypatch.setattr(Fold, "enter", noted)
    return seen


def far(one: Round, other: Round) -> float:
    """The largest difference of two states over the size of the first."""
    a, b = flatten(everything(one)), flatten(everything(other))
    assert a.keys() == b.keys()
    size = max(float(v.double().abs().max()) for v in a.values() if v.numel())
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()) / size


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_every_method_with_sums_of_sums(make: Any, setting: Setting) -> None:
    """The loop's result but for the order of sums, the same each time."""
    federation, algorithm = make_federation(setting.model), make(setting)
    alone = last(run(algorithm, federation, ROUNDS))
    with workers(federation.clients, 2) as team:
        one, two = (
            last(run(algorithm, federation, ROUNDS, backend=team.blocks(loop))) for _ in range(2)
        )
    assert far(alone, one) < 1e-5
    assert not different(one, two)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_who_is_summed_where(
    count: int, setting: Setting, federation: Federation, elsewhere: list[int]
) -> None:
    """The main process takes the first share unless it has one worker alone."""
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, count) as team:
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert sorted(elsewhere) == list(range({1: 0, 2: 4, 3: 2}[count], 8))
    assert far(alone, together) < 1e-6


def test_the_comparison_can_fail(
    setting: Setting, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = Fold.enter

    def lose(self: Fold, share: Share) -> None:
        enter(
            self,
            share._replace(
                totals={k: {n: v * 0 for n, v in t.items()} for k, t in share.totals.items()}
            ),
        )

    monkeypatch.setattr(Fold, "enter", lose)
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, 2) as team:
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert far(alone, together) > 1e-3


@pytest.mark.parametrize(
    ("make", "gate"),
    [(recipes.fedavg, Gate(on_bad="drop")), (recipes.fedmedian, Gate())],
    ids=["what is bad drops out", "a median"],
)
def test_where_nothing_is_summed(
    make: Any, gate: Gate, setting: Setting, federation: Federation, elsewhere: list[int]
) -> None:
    algorithm, federation = make(setting), replace(federation, gate=gate)
    alone = last(run(algorithm, federation, 2))
    with workers(federation.clients, 2) as team:
        together = last(run(algorithm, federation, 2, backend=team.blocks(loop)))
    assert elsewhere == []
    assert not different(alone, together)


@dataclass(frozen=True)
class Odd:
    """A client's work with something else in what client 6 sends or keeps."""

    update: ClientUpdate
    kind: str

    def __call__(self, message: Parts, state: Parts, data: Any, plans: Any) -> tuple[Parts, Parts]:
        sent, kept = self.update(message, state, data, plans)
        if int(data.id) != 6:
            return sent, kept
        delta, report = sent["delta"], sent["report"]
        name = next(iter(delta))
        changed: dict[str, Callable[[], Parts]] = {
            "nan": lambda: {"delta": delta | {name: delta[name] * float("nan")}},
            "inf": lambda: {"delta": delta | {name: delta[name] + float("inf")}},
            "large": lambda: {"delta": delta | {name: delta[name] + 1e6}},
            "form": lambda: {"delta": delta | {name: delta[name].flatten()}},
            "type": lambda: {"delta": delta | {name: delta[name].double()}},
            "names": lambda: {"delta": {"other": delta[name]}},
            "another's": lambda: {"report": report | {"id": report["id"] - 1}},
            "more": lambda: {"extra": {"w": torch.zeros(2)}},
        }
        own = {"kept": {"w": torch.tensor([float("inf")])}} if self.kind == "kept" else {}
        return sent | (changed[self.kind]() if self.kind in changed else {}), {**kept, **own}


@dataclass(frozen=True)
class Oddly:
    kind: str

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return loop(Odd(update, self.kind), jobs)


KINDS = ["nan", "large", "form", "type", "names", "another's", "more", "kept"]


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("clients", [5, 6, 7, 8, 9, 11])
def test_nobody_is_left_out(clients: int, members: int, setting: Setting) -> None:
    """Also where own replies lie on both sides of a share, and in order."""
    sizes = (12, 9, 7, 14, 10, 8, 11, 13, 9, 6, 5)[:clients]
    federation = make_federation(setting.model, make_clients(sizes=sizes))
    algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1))
    with workers(federation.clients, members) as team:
        together = last(run(algorithm, federation, 1, backend=team.blocks(loop)))
    assert far(alone, together) < 1e-6
    assert together.trained == alone.trained


def test_a_part_that_only_some_send_is_refused() -> None:
    """Whoever comes first, and whether it was summed here or elsewhere."""
    weights = {"delta": torch.full((6,), 0.5)}
    bare = Reply(0, {"report": {"id": torch.tensor(0)}}, {}, 1)
    fold = Fold(torch.arange(6), weights)
    fold.take([bare])
    with pytest.raises(TrainingError, match='client 1 sent an update with another "delta"'):
        fold.take([reply(1, 1.0)])
    with pytest.raises(TrainingError, match='clients 2, 3 sent an update with another "delta"'):
        fold.enter(share_of((2, 3), (1.0, 1.0)))
    other = Fold(torch.arange(6), weights)
    other.enter(share_of((2, 3), (1.0, 1.0)))
    with pytest.raises(TrainingError, match='client 0 sent an update with another "delta"'):
        other.take([bare])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_summed(
    number: float, setting: Setting, federation: Federation, elsewhere: list[int]
) -> None:
    """By the sum alone: no limit of the gate is in the way."""
    kind = "nan" if number != number else "inf"
    with (
        workers(federation.clients, 2) as team,
        pytest.raises(DivergedError, match="client 6 sent"),
    ):
        last(run(recipes.fedavg(setting), federation, 1, backend=team.blocks(Oddly(kind))))
    assert elsewhere == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_bad_is_said_as_in_one_process(
    kind: str, setting: Setting, federation: Federation, elsewhere: list[int]
) -> None:
    """The same error by the same words, although the sums would have been made elsewhere."""
    federation = replace(federation, gate=Gate(max_norm=1e3))
    algorithm = recipes.fedavg(setting)

    def said(backend: Backend) -> Exception:
        with pytest.raises((TrainingError, RuntimeError)) as found:
            last(run(algorithm, federation, 1, backend=backend))
        return found.value

    with workers(federation.clients, 2) as team:
        alone, together = said(Oddly(kind)), said(team.blocks(Oddly(kind)))
    assert (type(together), str(together)) == (type(alone), str(alone))
    assert "client 6" in str(alone)
    assert isinstance(alone, DivergedError) == (kind in ("nan", "kept"))
    assert elsewhere == []


def test_bytes_are_counted_as_if_updates_had_come(
    setting: Setting, federation: Federation, elsewhere: list[int]
) -> None:
    algorithm = recipes.scaffold(setting)
    alone, together = Meter(), Meter()
    last(run(algorithm, federation, 1, backend=alone))
    with workers(federation.clients, 2) as team:
        together.backend = team.blocks(Stacked())
        last(run(algorithm, federation, 1, backend=together))
    assert elsewhere == [4, 5, 6, 7]
    assert together.last == alone.last
    assert alone.last.up > 0


def reply(client: int, *numbers: float) -> Reply:
    update = {"delta": {"w": torch.tensor(numbers)}, "report": {"id": torch.tensor(client)}}
    return Reply(client, update, {}, 1)


def share_of(clients: Sequence[int], numbers: Sequence[float], weight: float = 0.5) -> Share:
    fold = Fold(torch.tensor(clients), {"delta": torch.full((len(clients),), weight)})
    fold.take([reply(i, n) for i, n in zip(clients, numbers, strict=True)])
    return fold.share()


def test_sums_are_added_at_the_end_by_client() -> None:
    """Whichever comes first: 1e16 + 1 is 1e16 in float64, so that the order shows."""
    weights = {"delta": torch.full((6,), 0.5)}
    numbers = {0: 2e16, 1: 2.0, 2: -2e16, 3: 2.0, 4: 2.0, 5: 2.0}
    shares = [share_of((2, 3), (numbers[2], numbers[3])), share_of((4, 5), (2.0, 2.0))]
    found = []
    for order in (shares, shares[::-1]):
        fold = Fold(torch.arange(6), weights)
        for share in order:
            fold.enter(share)
        fold.take([reply(0, numbers[0]), reply(1, numbers[1])])
        found.append(float(fold.parts()["delta"]["w"]))
    # ((1e16 + 1) + (-1e16 + 1)) + 2: the first sum loses its 1, the second's -1e16 + 1 does not.
    assert found == [(1e16 + 1.0) + (-1e16 + 1.0) + 2.0] * 2


def test_another_form_is_refused() -> None:
    fold = Fold(torch.arange(4), {"delta": torch.full((4,), 0.25)})
    fold.take([reply(0, 1.0, 2.0), reply(1, 1.0, 2.0)])
    with pytest.raises(TrainingError, match=r"clients 2, 3 sent updates with another \"delta\""):
        fold.enter(share_of((2, 3), (1.0, 1.0)))


def asked_of(clients: Sequence[int]) -> Asked:
    return Asked(1, tuple(clients), lambda i: {"params": {"w": torch.zeros(1)}})


@pytest.mark.parametrize(
    ("weights", "clients"),
    [([0.5, 0.5, 0.0, 0.0], (0, 1, 2)), ([0.25] * 4, (0, 1)), (None, (0, 1, 2))],
    ids=["a client of weight 0", "two updates are no more than their sum", "nothing is summed"],
)
def test_when_updates_travel(weights: list[float] | None, clients: tuple[int, ...]) -> None:
    by = {} if weights is None else {"delta": torch.tensor(weights)}
    books = Books(Fold(torch.arange(4), by), Gate(), asked_of(range(4)))
    assert books.terms(clients) is None


def test_each_client_has_its_own_weight() -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    books = Books(Fold(torch.tensor([3, 5, 8, 9]), {"delta": weights}), Gate(), asked_of([3]))
    terms = books.terms((5, 8, 9))
    assert terms is not None
    assert terms.weights == {"delta": (0.2, 0.3, 0.4)}


def two_parts(client: int, number: float) -> Reply:
    update = {"delta": {"w": torch.tensor([number])}, "control": {"w": torch.tensor([-number])}}
    return Reply(client, update, {}, 1)


def jobs_of(clients: Sequence[int]) -> list[Job]:
    message = {"params": {"w": torch.zeros(1)}, "control": {"w": torch.zeros(1)}}
    return [Job(i, message, {}, None, {}, 1) for i in clients]  # type: ignore[arg-type]


def test_each_part_has_its_own_weights() -> None:
    """As SCAFFOLD's controls, whose weights are not those of the changes."""
    weights = {
        "delta": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        "control": torch.full((4,), 0.25, dtype=torch.float64),
    }
    books = Books(Fold(torch.arange(4), weights), Gate(), asked_of(range(4)))
    terms = books.terms((1, 2, 3))
    assert terms is not None
    left, share = summed([two_parts(i, 2.0**i) for i in (1, 2, 3)], jobs_of((1, 2, 3)), terms)
    assert share is not None
    assert share.clients == (1, 2, 3)
    found = {part: float(tree["w"]) for part, tree in share.totals.items()}
    assert found == {
        "delta": pytest.approx(0.2 * 2 + 0.3 * 4 + 0.4 * 8, abs=1e-15),
        "control": pytest.approx(-0.25 * (2 + 4 + 8), abs=1e-15),
    }
    assert [r.update for r in left] == [{}, {}, {}]


def test_a_weight_of_0_for_one_part_is_enough() -> None:
    weights = {"delta": torch.full((3,), 0.5), "control": torch.tensor([0.5, 0.0, 0.5])}
    books = Books(Fold(torch.arange(3), weights), Gate(), asked_of(range(3)))
    assert books.terms((0, 1, 2)) is None


def test_parts_that_are_not_the_methods_are_not_let_through() -> None:
    """Where the whole share sends them, only the method's own parts tell."""
    numbers = {"delta": (0.5, 0.25, 0.25)}
    came = [reply(i, 1.0) for i in range(3)]
    came = [r._replace(update={**r.update, "extra": {"w": torch.ones(1)}}) for r in came]
    known = frozenset({"delta", "report"})
    assert summed(came, jobs_of(range(3)), Terms(Gate(), known, numbers))[1] is None
    assert summed(came, jobs_of(range(3)), Terms(Gate(), known | {"extra"}, numbers))[1] is not None


def test_parts_that_nobody_sends_are_not_summed() -> None:
    """Replies stay as they are, and so do their order and their objects."""
    terms = Terms(Gate(), frozenset(), {"control": (0.5, 0.25, 0.25)})
    came = [reply(i, 1.0) for i in (2, 0, 1)]
    left, share = summed(came, jobs_of(range(3)), terms)
    assert left is came
    assert share is None


def test_other_backends_are_as_they_were() -> None:
    books = Books(Fold(torch.arange(2), {}), Gate(), asked_of(range(2)))
    assert summing(loop, books) is loop


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=2, batch=8), rounds=ROUNDS)
