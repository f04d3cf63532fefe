"""Custom backends: what they may return, and which errors are reported as theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import Model, recipes, run
from fedshift.algorithms.method import Wrapper
from fedshift.data import ClientData
from fedshift.engine.backend_names import ONE_BY_ONE
from fedshift.engine.backends import Backend, Block, ClientUpdate, Job, Reply, loop
from fedshift.engine.checks.replies import block_of
from fedshift.engine.device import on
from fedshift.engine.one_by_one import channels_last, dense
from fedshift.engine.processes.pool import workers
from fedshift.engine.stacking.stacked import Stacked
from fedshift.engine.traffic import Meter
from fedshift.errors import FedshiftError, InputError, TrainingError
from fedshift.experiments.config.schema import Training
from fedshift.experiments.engines import backend_of
from fedshift.recipes import Setting
from fedshift.tree import Parts
from support.federations import make_federation
from support.photographs import images
from support.rounds import different, last


def in_blocks(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Block]:
    return Stacked().stream(update, jobs)


def too_few(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
    return loop(update, list(jobs)[:2])


def test_blocks_count_for_all_of_their_clients(setting: Setting) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    alone = last(run(algorithm, federation, 2, backend=Stacked()))
    assert not different(alone, last(run(algorithm, federation, 2, backend=in_blocks)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="gave 2 replies for 6 jobs"):
        last(run(algorithm, federation, 2, backend=too_few))


def texts(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Any]:
    return ("text" for _ in jobs)


@pytest.mark.parametrize("around", [dense, channels_last, partial(on, "cpu")])
def test_a_custom_backend_is_watched_within_another(
    around: Callable[[Backend], Backend], setting: Setting
) -> None:
    """The error names the user's backend. Control: the loop within gives the loop's numbers."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    if around is channels_last:
        federation, setting = images(3, torch.float32)
        algorithm = recipes.fedavg(setting)
    with pytest.raises(InputError, match='the backend texts gave the text "text", no Reply'):
        last(run(algorithm, federation, 1, backend=around(texts)))
    with pytest.raises(TrainingError, match="no answer in time"):
        last(run(algorithm, federation, 1, backend=around(too_few)))
    alone = last(run(algorithm, federation, 1, backend=around(loop)))
    within = around(lambda update, jobs: loop(update, list(jobs)))
    assert not different(alone, last(run(algorithm, federation, 1, backend=within)))


@dataclass(frozen=True)
class Meddling(Wrapper):
    """A method of one's own that changes what it was given, or what it gives."""

    before: Any = None
    after: Any = None

    def client_update(self, message: Parts, state: Parts, data: ClientData, plans: Any) -> Any:
        if self.before is not None:
            self.before(message, data)
        given = self.inner.client_update(message, state, data, plans)
        return given if self.after is None else self.after(given)


@pytest.mark.parametrize(
    ("before", "what"),
    [
        (lambda message, data: data.y.zero_(), "data.y"),
        (lambda message, data: data.x[0].add_(1), "data.x"),
        (lambda message, data: message["params"]["head.bias"].zero_(), 'message["params"]'),
    ],
)
def test_a_method_that_writes_into_its_arguments_is_refused(
    before: Any, what: str, setting: Setting
) -> None:
    """Labels that it wrote would be wrong for every later method, too."""
    federation = make_federation(setting.model)
    mine = tuple(ClientData(*(v.clone() for v in c)) for c in federation.clients)
    with pytest.raises(TrainingError) as refused:
        last(run(Meddling(recipes.fedavg(setting), before), replace(federation, clients=mine), 1))
    assert f"client_update wrote into {what}" in str(refused.value)
    assert "v.clone()" in str(refused.value)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (lambda given: None, "client_update gave None; it returns two things"),
        (lambda given: given[0], "client_update gave a dict; it returns two things"),
        (
            lambda given: ({k: v for k, v in given[0].items() if k != "delta"}, given[1]),
            'no client sent "delta", which the server sums',
        ),
    ],
)
def test_what_a_method_of_ones_own_gives(after: Any, message: str, setting: Setting) -> None:
    with pytest.raises(FedshiftError) as refused:
        last(run(Meddling(recipes.fedavg(setting), None, after), make_federation(setting.model), 1))
    assert message in str(refused.value)


def test_a_pair_may_be_a_list(setting: Setting) -> None:
    method, federation = recipes.fedavg(setting), make_federation(setting.model)
    listed = last(run(Meddling(method, None, list), federation, 1))
    assert listed.loss == last(run(method, federation, 1)).loss


def shortened(parts: Parts) -> Parts:
    """A form that would broadcast in a sum."""
    return parts | {"delta": {name: v[:1] for name, v in parts["delta"].items()}}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
@pytest.mark.parametrize("blocks", [False, True])
def test_a_changed_answer_of_a_worker_is_looked_at_again(blocks: bool, setting: Setting) -> None:
    """The worker recorded the shapes before. Control: a changed block keeps that record."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)

    def changed(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Any]:
        for one in team.stream(update, jobs) if blocks else ():
            odd = one._replace(updates=shortened(one.updates))
            assert block_of(odd).look == one.look
            yield odd
        for reply in () if blocks else team(update, jobs):
            yield reply._replace(update=shortened(reply.update))

    with workers(federation.clients, 2) as team:
        last(run(algorithm, federation, 1, backend=team))
        with pytest.raises(TrainingError, match='client 0 sent "delta/'):
            last(run(algorithm, federation, 1, backend=changed))


class Odd(nn.Module):
    """Fails where there are more examples than it is tried on."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)["logits"]
        return out if len(x) <= 2 else out + None  # type: ignore[operator]


def test_an_error_of_the_network_is_not_the_backends(setting: Setting) -> None:
    model = Model(Odd(setting.model.net))
    algorithm = recipes.fedavg(Setting(model, setting.target, setting.local))
    with pytest.raises(TypeError, match="unsupported operand"):
        last(
            run(
                algorithm, make_federation(model), 1, backend=lambda u, jobs: iter([*loop(u, jobs)])
            )
        )


def mine(backend: Backend) -> Backend:
    return lambda update, jobs: backend(update, jobs)


@pytest.mark.parametrize("on_images", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_auto_tries_an_added_backend_on_any_inputs(
    on_images: bool, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: channels-last, which is for images, is tried on images alone."""
    monkeypatch.setitem(ONE_BY_ONE, "mine", f"{__name__}:mine")
    federation = make_federation(setting.model)
    if on_images:
        federation, setting = images(3, torch.float32)
    line = list[str]()
    training, engine = Training(rounds=1), backend_of("auto", 1, line.append)
    algorithm = recipes.fedavg(setting)
    last(engine.rounds(algorithm, federation, training, {}, after=None, meter=Meter()))
    assert "mine" in line[0]
    assert ("channels-last" in line[0]) is on_images
