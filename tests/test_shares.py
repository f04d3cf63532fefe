"""Workers that take shares of a round: what `within` gives, wherever a share was trained."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import apart
from conftest import Setting, make_federation
from every_method import MAKE, ROUNDS
from routing import routed_model
from test_deadline import Once, asleep, killed
from test_workers import different, last

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine import workers as module
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.gate import Gate
from fedshift.engine.levers import channels_last
from fedshift.engine.one_round import jobs_of, open_round
from fedshift.engine.rounds import Federation, run, start
from fedshift.engine.stacked import Stacked
from fedshift.engine.wire import ALIGN, inside, receive, send
from fedshift.engine.workers import Team, workers
from fedshift.errors import TrainingError, UnfitError
from fedshift.model import Model
from fedshift.seeds import Seeds
from fedshift.tree import Parts

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


@pytest.fixture
def mlp() -> Model:
    """The network of every row: most methods leave its client branch alone."""
    return routed_model()


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedpac", "feddrm"])
def test_packing_changes_nothing(name: str, setting: Setting) -> None:
    """Bit for bit the loop's result, also with messages and states of each client's own."""
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    alone = last(run(algorithm, federation, ROUNDS, cohort=4))
    with workers(federation.clients, 2) as team:
        together = last(run(algorithm, federation, ROUNDS, cohort=4, backend=team.blocks(loop)))
    assert not different(alone, together)
    assert together.trained == alone.trained


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_stacked_shares_are_the_loop_but_for_rounding(
    count: int, kind: torch.dtype, mlp_plain: Model
) -> None:
    algorithm = recipes.scaffold(Setting(mlp_plain, (0.2,) * 5, Local(lr=0.1, steps=3, batch=8)))
    federation = in_type(make_federation(mlp_plain), kind)
    alone = last(run(algorithm, federation, 2)).server["params"]
    with workers(federation.clients, count) as team:
        backend = team.blocks(Stacked(dense=True))
        together = last(run(algorithm, federation, 2, backend=backend)).server["params"]
    near = 1e-6 if kind == torch.float32 else 1e-12
    assert apart(alone, together) < near
    other = replace(federation, seeds=Seeds.of(1))
    assert apart(alone, last(run(algorithm, other, 2)).server["params"]) > 1e-3


@pytest.fixture
def mlp_plain(request: pytest.FixtureRequest) -> Model:
    """Layers that the dense backend takes."""
    from conftest import CLASSES, FEATURES

    from fedshift.model import build
    from fedshift.models.dense import Mlp

    return build(lambda: Mlp((FEATURES,), (7,), CLASSES), seed=0)


def in_type(federation: Federation, kind: torch.dtype) -> Federation:
    return replace(
        federation,
        clients=tuple(c._replace(x=c.x.to(kind), w=c.w.to(kind)) for c in federation.clients),
        params={k: v.to(kind) for k, v in federation.params.items()},
    )


@dataclass(frozen=True)
class Within:
    """`loop`, but that client 3's work is done by `Once`."""

    flag: Path
    instead: Any

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return loop(Once(update, self.flag, self.instead), jobs)


@pytest.mark.parametrize(
    ("shares", "lost"), [(1, (3, 4, 5)), (2, (2, 3)), (9, (3,))], ids=["two", "four", "one each"]
)
def test_a_late_share_drops_out_whole(
    shares: int, lost: tuple[int, ...], setting: Setting, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "SHARES", shares)
    federation = replace(make_federation(setting.model), gate=Gate(on_bad="drop"))
    algorithm = recipes.fedavg(setting)
    with workers(federation.clients, 2, deadline=3.0) as team:
        backend = team.blocks(Within(tmp_path / "flag", asleep))
        first, second = run(algorithm, federation, 2, backend=backend)
    assert [i for i, _ in first.dropped] == list(lost)
    assert second.dropped == ()


def test_a_share_whose_process_dies_is_trained_again(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARES", 1)
    algorithm, federation = recipes.scaffold(setting), make_federation(setting.model)
    whole = last(run(algorithm, federation, 2))

    def found(**limits: Any) -> Any:
        with workers(federation.clients, 2, **limits) as team:
            backend = team.blocks(Within(tmp_path / "flag", killed))
            return last(run(algorithm, federation, 2, backend=backend))

    assert not different(found(retries=1), whole)
    (tmp_path / "flag").unlink()
    with pytest.raises(TrainingError, match="trained clients 3, 4, 5 ended without an answer"):
        found()


def test_what_cannot_be_trained_so_is_said(setting: Setting, mlp_plain: Model) -> None:
    federation = make_federation(mlp_plain)
    algorithm = recipes.fedsam(replace(setting, model=mlp_plain))
    with workers(federation.clients, 2) as team, pytest.raises(UnfitError, match="through Sam"):
        last(run(algorithm, federation, 1, backend=team.blocks(Stacked(dense=True))))


def test_every_share_is_trained_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six clients, two processes: by SHARES, how many travel together."""
    packed: list[int] = []
    plain = module._packed
    monkeypatch.setattr(
        module, "_packed", lambda jobs, held: (packed.append(len(jobs)), plain(jobs, held))[1]
    )
    federation = make_federation(setting.model)

    def sizes(spread: Any) -> list[int]:
        packed.clear()
        with workers(federation.clients, 2) as team:
            last(run(recipes.fedavg(setting), federation, 1, backend=spread(team)))
        return packed[:]

    def blocks(team: Team) -> Backend:
        return team.blocks(loop)

    assert sizes(lambda team: team) == [1] * 6
    for shares, expected in ((1, [3, 3]), (2, [2, 2, 2]), (4, [1] * 6)):
        monkeypatch.setattr(module, "SHARES", shares)
        assert sizes(blocks) == expected


def test_trees_travel_as_they_are() -> None:
    """Runs of equal forms, others between them, what is empty and what has no dimension."""
    ours, theirs = Pipe()
    one = {"a": {"w": torch.randn(3, 5), "b": torch.tensor(2.5)}, "empty": {}}
    two = {"a": {"w": torch.randn(3, 5), "b": torch.tensor(-1.0)}, "empty": {}}
    odd = {"c": {"y": torch.arange(7), "m": torch.tensor([True, False]), "none": torch.zeros(0, 4)}}
    trees: list[Parts] = [one, two, odd, {}, one]
    send(ours, "about", trees)
    about, found = receive(theirs)
    assert about == "about"
    assert len(found) == len(trees)
    for tree, back in zip(trees, found, strict=True):
        assert tree.keys() == back.keys()
        for part, leaves in tree.items():
            assert leaves.keys() == back[part].keys()
            for name, v in leaves.items():
                assert v.dtype == back[part][name].dtype
                assert torch.equal(v, back[part][name])
                assert back[part][name].data_ptr() % ALIGN == 0 or not v.numel()
    send(ours, None, [])
    assert receive(theirs) == (None, [])


def test_plans_are_drawn_where_they_are_used(setting: Setting) -> None:
    """What travels is how to draw them; a lever's mark makes them travel whole."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    opened = open_round(algorithm, start(algorithm, federation).server, torch.arange(6), 1)
    jobs = tuple(jobs_of(opened, federation.clients, lambda i: {}, 0))
    for sent in (jobs, tuple(with_channels_last(jobs))):
        about, trees = module._packed(sent, {})
        held = [set(inside("plan", tree)) for tree in trees]
        back = module._unpacked(about, trees, {}, federation.clients)
        for job, again in zip(sent, back, strict=True):
            assert job.plans.keys() == again.plans.keys()
            for k, plan in job.plans.items():
                assert torch.equal(plan.rows, again.plans[k].rows)
                assert plan[1].equal(again.plans[k][1])
                assert plan[2:] == again.plans[k][2:]
        assert held == [set() if sent is jobs else set(jobs[0].plans)] * 6


def with_channels_last(jobs: Iterable[Job]) -> Iterator[Job]:
    given: list[Job] = []

    def spy(update: ClientUpdate, marked: Iterable[Job]) -> Iterator[Reply]:
        given.extend(marked)
        return iter(())

    list(channels_last(spy)(lambda *a: ({}, {}), jobs))
    return iter(given)
