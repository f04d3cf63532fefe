"""What a backend is, a user's too: which answers and arguments are refused, in every place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedshift import recipes, run
from fedshift.data import ClientData
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop, work
from fedshift.engine.device import on
from fedshift.engine.one_by_one import channels_last, dense
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Federation
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import DivergedError, FedshiftError, InputError, TrainingError, UnfitError
from fedshift.recipes import Setting
from support.federations import make_federation
from support.odd_work import Meddling, changed, round_of
from support.photographs import images
from support.rounds import different, last

forks = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


@pytest.fixture
def federation(setting: Setting) -> Federation:
    return make_federation(setting.model)


def in_other_order(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
    return iter([work(stage, job) for job in [*jobs][::-1]])


@pytest.mark.parametrize("around", [dense, channels_last, partial(on, "cpu")])
def test_a_backend_of_ones_own_within_another(
    around: Callable[[Backend], Backend], setting: Setting, federation: Federation
) -> None:
    algorithm = recipes.fedavg(setting)
    if around is channels_last:
        federation, setting = images(3, torch.float32)
        algorithm = recipes.fedavg(setting)
    alone = last(run(algorithm, federation, 1, backend=around(loop)))
    assert not different(alone, last(run(algorithm, federation, 1, backend=around(in_other_order))))


@pytest.mark.parametrize("came", [None, ["text"], 3])
def test_what_is_no_reply(came: Any, setting: Setting, federation: Federation) -> None:
    with pytest.raises(InputError, match=r"yields work\(stage, job\) for each job"):
        last(run(recipes.fedavg(setting), federation, 1, backend=lambda stage, jobs: came))


REFUSED: dict[str, Any] = {
    "a name": "stacked",
    "a name that is none": "lop",
    "a class": Stacked,
    "workers without with": workers([], 2),
    "no function": 3,
    "another signature": lambda jobs: iter(()),
}


@pytest.mark.parametrize("backend", REFUSED.values(), ids=REFUSED)
def test_what_is_no_backend(backend: Any, setting: Setting, federation: Federation) -> None:
    with pytest.raises(InputError, match="backend is"):
        run(recipes.fedavg(setting), federation, 1, backend=backend)


@pytest.mark.parametrize(
    ("came", "why"),
    [
        ((0, 1, 2, 3, 4, 5, 2), "client 2 answered twice"),
        ((0, 9), "client 9 was not asked"),
        ((0, 1, 2, 4, 5), "no answer in time"),
    ],
)
def test_replies_that_lack_or_are_too_many(
    came: tuple[int, ...], why: str, setting: Setting, federation: Federation
) -> None:
    def odd(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        replies = list(loop(stage, jobs))
        return (replies[i % 6]._replace(client=i) for i in came)

    with pytest.raises(TrainingError, match=why):
        last(run(recipes.fedavg(setting), federation, 1, backend=odd))


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (lambda message, data: data.y.zero_(), "data.y"),
        (lambda message, data: data.x[0].add_(1), "data.x"),
        (lambda message, data: message["params"]["head.bias"].zero_(), 'message["params"]'),
    ],
)
def test_a_method_that_writes_into_its_arguments_is_refused(
    before: Any, what: str, setting: Setting, federation: Federation
) -> None:
    """Labels that it wrote would be wrong for every later method, too."""
    mine = tuple(ClientData(*(v.clone() for v in c)) for c in federation.clients)
    with pytest.raises(TrainingError) as refused:
        last(run(Meddling(recipes.fedavg(setting), before), replace(federation, clients=mine), 1))
    assert what in str(refused.value)
    assert "v.clone()" in str(refused.value)


@pytest.mark.parametrize(
    "after",
    [
        lambda given: None,
        lambda given: given[0],
        lambda given: ({k: v for k, v in given[0].items() if k != "delta"}, given[1]),
    ],
)
def test_what_a_method_of_ones_own_gives(
    after: Any, setting: Setting, federation: Federation
) -> None:
    with pytest.raises(FedshiftError):
        last(run(Meddling(recipes.fedavg(setting), None, after), federation, 1))
    method = recipes.fedavg(setting)
    listed = last(run(Meddling(method, None, list), federation, 1))  # a pair may be a list
    assert listed.loss == last(run(method, federation, 1)).loss


KINDS: dict[str, type[Exception]] = {
    "nan": DivergedError, "inf": DivergedError, "kept": DivergedError,
    **dict.fromkeys(("form", "type", "names", "another's", "more", "history"), TrainingError),
}  # fmt: skip


@forks
@pytest.mark.few(4)
@pytest.mark.parametrize("place", ["loop", "workers", "shares", "stacked"])
@pytest.mark.parametrize(("kind", "error"), KINDS.items(), ids=KINDS)
def test_a_bad_reply_names_its_client_on_every_backend(
    kind: str, error: type[Exception], place: str, setting: Setting, federation: Federation
) -> None:
    """The fault is in the method's work, except where clients are trained together."""
    method: Any = recipes.fedavg(setting)
    bad = Meddling(method, None, lambda done: changed(kind, *done), client=3)
    with workers(federation.clients, 2) as team:

        def spoilt(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
            for reply in Stacked()(stage, jobs):
                if reply.client == 3:
                    sent, kept = changed(kind, reply.update, reply.changed)
                    yield reply._replace(update=sent, changed=kept)
                else:
                    yield reply

        backend = {"loop": loop, "workers": team, "shares": team.blocks(loop), "stacked": spoilt}
        with pytest.raises(error, match="client 3 "):
            last(run(method if place == "stacked" else bad, federation, 1, backend=backend[place]))


@pytest.mark.parametrize("drops", [False, True])
def test_processes_that_may_take_no_gradients_are_no_clients_fault(
    drops: bool, setting: Setting, federation: Federation
) -> None:
    """The message is torch's on a machine with a GPU; tests/engine/test_gpu.py tests a real one."""

    def fails(message: Any, data: Any) -> None:
        raise RuntimeError("Unable to handle ... in combination with fork-based multiprocessing.")

    stage, jobs = round_of(Meddling(recipes.fedavg(setting), fails), federation, drops=drops)
    with pytest.raises(UnfitError, match="workers cannot train"):
        work(stage, jobs[0])


def test_a_trial_takes_few_steps(setting: Setting, federation: Federation) -> None:
    stage, _ = round_of(recipes.fedavg(setting), federation)
    (whole,), (short,) = stage.plans([3]), replace(stage, most=2).plans([3])
    assert short["train0"].sizes == whole["train0"].sizes[:2]  # type: ignore[index]
    assert short["train0"].rows.equal(whole["train0"].rows[:2])
