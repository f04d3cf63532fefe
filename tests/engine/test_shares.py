"""Workers that train shares of a round: the result is that of `within`, wherever they train."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.checks.gate import Gate
from fedshift.engine.dense import train
from fedshift.engine.processes import messages
from fedshift.engine.processes import pool as module
from fedshift.engine.processes.messages import pack, unpack
from fedshift.engine.processes.pool import workers
from fedshift.engine.round import jobs_of, open_round
from fedshift.engine.run import Federation, first_state, run, start
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, TrainingError, UnfitError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from fedshift.tree import Parts
from support.comparing import max_difference
from support.every_method import MAKE, ROUNDS
from support.federations import make_federation, one_job
from support.odd_work import OddWork, Once, asleep, killed
from support.rounds import different, last

pytestmark = [
    pytest.mark.routed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ditto", "fedpac", "feddrm"])
def test_packing_changes_nothing(name: str, setting: Setting) -> None:
    """Bit for bit the loop's result, also where messages and states differ between clients.

    Nothing is summed in workers: sums of sums round differently (test_sums_of_shares.py).
    """
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    alone = last(run(algorithm, federation, ROUNDS, cohort=4))
    with workers(federation.clients, 2) as team:
        whole = partial(team.blocks(loop))
        together = last(run(algorithm, federation, ROUNDS, cohort=4, backend=whole))
    assert not different(alone, together)
    assert together.trained == alone.trained


@pytest.mark.slow
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
    assert max_difference(alone, together) < near
    other = replace(federation, seeds=Seeds.of(1))
    assert max_difference(alone, last(run(algorithm, other, 2)).server["params"]) > 1e-3


@pytest.fixture
def mlp_plain(request: pytest.FixtureRequest) -> Model:
    """Layers that the dense backend takes."""
    from fedshift.model import build
    from fedshift.models.dense import Mlp
    from support.federations import CLASSES, FEATURES

    return build(lambda: Mlp((FEATURES,), (7,), CLASSES), seed=0)


def in_type(federation: Federation, kind: torch.dtype) -> Federation:
    return replace(
        federation,
        clients=tuple(c._replace(x=c.x.to(kind), w=c.w.to(kind)) for c in federation.clients),
        params={k: v.to(kind) for k, v in federation.params.items()},
    )


@dataclass(frozen=True)
class Within:
    """`loop`, with client 3's work done by `Once`."""

    flag: Path
    instead: Any

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        return loop(Once(update, self.flag, self.instead), jobs)


@pytest.mark.slow
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
    assert [one.client for one in first.dropped] == list(lost)
    assert second.dropped == ()


@pytest.mark.slow
def test_a_share_whose_process_dies_is_trained_again(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARES", 1)
    algorithm, federation = recipes.scaffold(setting), make_federation(setting.model)
    (tmp_path / "flag").touch()  # the first time is over

    def last_round(**limits: Any) -> Any:
        with workers(federation.clients, 2, **limits) as team:
            backend = team.blocks(Within(tmp_path / "flag", killed))
            return last(run(algorithm, federation, 2, backend=backend))

    whole = last_round()
    (tmp_path / "flag").unlink()
    assert not different(last_round(retries=1), whole)
    assert (tmp_path / "flag").exists()
    (tmp_path / "flag").unlink()
    with pytest.raises(TrainingError, match="trained clients 3, 4, 5 ended without an answer"):
        last_round()


@pytest.mark.slow
def test_what_dense_cannot_train_is_refused_in_shares(setting: Setting, mlp_plain: Model) -> None:
    federation = make_federation(mlp_plain)
    algorithm = recipes.fedsam(replace(setting, model=mlp_plain))
    with workers(federation.clients, 2) as team, pytest.raises(UnfitError, match="through Sam"):
        last(run(algorithm, federation, 1, backend=team.blocks(Stacked(dense=True))))


@dataclass(frozen=True)
class Noted:
    """A backend that writes the clients of each share to a file of its process."""

    folder: Path

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        share = tuple(jobs)
        if share:  # a process with nothing to train is asked for nothing
            with (self.folder / str(os.getpid())).open("a") as file:
                file.write(" ".join(str(job.client) for job in share) + "\n")
        return loop(update, share)

    def shares(self) -> dict[bool, list[list[int]]]:
        """The clients of each share, trained in this process (True) and in workers."""
        here: dict[bool, list[list[int]]] = {True: [], False: []}
        for file in self.folder.iterdir():
            lines = file.read_text().splitlines()
            here[file.name == str(os.getpid())] += [[*map(int, one.split())] for one in lines]
        return here


@pytest.mark.slow
def test_every_share_is_trained_once(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six clients: how many are trained together, in workers and in this process."""
    federation = make_federation(setting.model)

    def sizes(count: int = 2, deadline: float | None = None) -> tuple[list[int], list[int]]:
        noted = Noted(tmp_path / str(len(list(tmp_path.iterdir()))))
        noted.folder.mkdir()
        with workers(federation.clients, count, deadline=deadline) as team:
            last(run(recipes.fedavg(setting), federation, 1, backend=team.blocks(noted)))
        shares = noted.shares()
        assert sorted(i for many in shares.values() for one in many for i in one) == [*range(6)]
        return list(map(len, shares[False])), list(map(len, shares[True]))

    assert sizes() == ([3], [3])
    assert sizes(3) == ([2, 2], [2])
    for shares, expected in ((1, [3, 3]), (2, [2, 2, 2]), (4, [1] * 6)):
        monkeypatch.setattr(module, "SHARES", shares)
        assert sizes(deadline=600.0) == (expected, [])
    monkeypatch.setattr(module, "SHARES", 2)
    assert sizes(1) == ([3, 3], [])


def test_plans_are_drawn_where_they_are_used(setting: Setting) -> None:
    """The job carries the recipe of its plan and the way to train, not the drawn plan."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    opened = open_round(algorithm, start(algorithm, federation).server, torch.arange(6), 1)
    jobs = tuple(jobs_of(opened, federation.clients, lambda i: {}, 7))
    for sent in (jobs, tuple(job._replace(how=train) for job in jobs)):
        some = pack(sent, {})
        back = unpack(some, {}, federation.clients)
        for job, again in zip(sent, back, strict=True):
            assert job.plans.keys() == again.plans.keys()
            for k, plan in job.plans.items():
                assert torch.equal(plan.rows, again.plans[k].rows)
                assert plan[1].equal(again.plans[k][1])
                assert plan[2:] == again.plans[k][2:]
        assert [isinstance(one.plans, dict) for one in some] == [False]
        assert [job.how for job in back] == [job.how for job in sent]
        assert [job.client for job in back] == list(range(6))
        assert len({id(job.message) for job in back}) == 6
        assert len({id(job.state) for job in back}) == 6
        assert all(job.message["params"] is back[0].message["params"] for job in back)
        assert all(a.data is b.data and a.t == b.t for a, b in zip(sent, back, strict=True))


def test_messages_of_ones_own_arrive(setting: Setting) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    opened = open_round(algorithm, start(algorithm, federation).server, torch.arange(6), 1)
    parts = [{"w": torch.tensor(float(k))} for k in (0, 1)]
    jobs = tuple(
        job._replace(message=job.message | {"own": parts[k]})
        for job, k in zip(
            jobs_of(opened, federation.clients, lambda i: {}, 7), (0, 0, 1, 1, 0, 1), strict=True
        )
    )
    back = unpack(pack(jobs, {}), {}, federation.clients)
    assert [float(job.message["own"]["w"]) for job in back] == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.slow
def test_a_team_that_was_left_alone_starts_afresh(setting: Setting, tmp_path: Path) -> None:
    """After an error, and in the middle of a round: no answer is taken for another round's."""
    federation = make_federation(setting.model)
    algorithm = recipes.fedavg(setting)
    other = recipes.fedavg(replace(setting, local=replace(setting.local, lr=0.05)))
    alone = last(run(other, federation, 1))
    with workers(federation.clients, 3) as team:
        with pytest.raises(TrainingError, match="no reason"):
            last(run(algorithm, federation, 1, backend=team.blocks(Within(tmp_path / "a", broken))))
        assert not different(alone, last(run(other, federation, 1, backend=team)))
        opened = open_round(algorithm, start(algorithm, federation).server, torch.arange(6), 1)
        jobs = jobs_of(
            opened, federation.clients, lambda i: first_state(algorithm, federation, i), 0
        )
        some = team(opened.stage.client_update, jobs)
        next(some)
        some.close()  # type: ignore[attr-defined]
        assert not different(alone, last(run(other, federation, 1, backend=team)))


def broken() -> None:
    raise ValueError("no reason")


def test_workers_are_for_the_clients_that_they_were_made_with(setting: Setting) -> None:
    federation = make_federation(setting.model)
    others = tuple(c._replace(x=c.x + 1) for c in federation.clients)
    with workers(others, 2) as team, pytest.raises(InputError, match="client 0 has other examples"):
        last(run(recipes.fedavg(setting), federation, 1, backend=team))


def changed(kind: str, sent: Parts, state: Parts) -> tuple[Parts, Parts]:
    """The update with something in it that is no plain tensor."""
    odd: Any = {
        "sparse": lambda: torch.ones(3).to_sparse(),
        "float": lambda: 2.0,
        "history": lambda: torch.ones(3).requires_grad_() * 2,
    }[kind]
    return sent | {"delta": sent["delta"] | {"odd": odd()}}, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [("sparse", "not dense"), ("float", "no tensor but float"), ("history", "its gradient")],
)
def test_odd_replies_drop_out_as_in_one_process(kind: str, words: str, setting: Setting) -> None:
    federation = replace(make_federation(setting.model), gate=Gate(on_bad="drop"))
    algorithm = recipes.fedavg(setting)

    def last_round(within: Backend) -> Any:
        def odd(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
            return within(OddWork(update, 2, partial(changed, kind)), jobs)

        return last(run(algorithm, federation, 1, backend=odd))

    with workers(federation.clients, 2) as team:
        alone, together = last_round(loop), last_round(team)
        assert not different(alone, together)
        for played in (alone, together):
            assert [one.client for one in played.dropped if words in one.reason] == [2]


def test_large_models_travel_in_small_shares(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "ROOM", 1)
    federation, noted = make_federation(setting.model), Noted(tmp_path)
    with workers(federation.clients, 1) as team:
        last(run(recipes.fedavg(setting), federation, 1, backend=team.blocks(noted)))
    assert noted.shares() == {True: [], False: [[i] for i in range(6)]}


def test_states_count_for_the_size_of_a_share(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is one tree for all clients, and counts for each of them."""
    monkeypatch.setattr(messages, "ROOM", 96)
    one = one_job(recipes.fedavg(setting), make_federation(setting.model))
    sent, state = {"params": {"w": torch.zeros(2)}}, {"own": {"w": torch.zeros(4)}}
    assert [
        len(share) for share in messages.cut_jobs((one._replace(message=sent, state={}),) * 12, 1)
    ] == [12]
    both = (one._replace(message=sent, state=state),) * 12
    assert [len(share) for share in messages.cut_jobs(both, 1)] == [4, 4, 4]
