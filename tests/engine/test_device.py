"""Training on another device; torch's device "meta" stands in for a GPU.

Its tensors have shapes and no numbers. What mixes devices fails on it as on a GPU, and so does what
asks for a number, for which a GPU would have to wait. What it computes is not tested here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.data import ClientData
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
from fedshift.engine.device import on
from fedshift.engine.one_by_one import channels_last
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError
from fedshift.experiments.engines import InProcess, Way, backend_of, evaluating
from fedshift.kernels.elsewhere import outputs_on
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import CLASSES, FEATURES, TARGET, make_federation
from support.odd_work import round_of
from support.rounds import different, last
from support.routing import routed_model

# These look at values, and wait for them on a GPU.
LOOKS = {name for name in MAKE if name.startswith("labelset") and "pu" not in name}
LOOKS |= {"fedala", "fedala of all layers"}
LOOKS -= {"labelset_fedavg holders", "labelset_fedavg + pairwise"}


def replies_there(within: Backend, algorithm: Method, federation: Federation) -> list[Reply]:
    """The replies of three clients in round 1, trained by `within` on the device."""
    replies: list[Reply] = []

    def noted(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in within(stage, jobs):
            replies.append(reply)
            # Nothing to bring back: what has no numbers cannot be copied.
            yield reply._replace(update={}, changed={})

    backend = on("meta", noted)
    stage, jobs = round_of(algorithm, federation)
    clients = sorted(reply.client for reply in backend(stage, jobs[:3]))
    assert clients == [job.client for job in jobs[:3]]
    return replies


def places(reply: Reply) -> set[str]:
    return {v.device.type for tree in reply.update.values() for v in tree.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MAKE) - LOOKS))
def test_a_client_stays_on_its_device(name: str) -> None:
    setting = Setting(routed_model(), TARGET, Local(lr=0.3, batch=12, steps=2))
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    for within in (loop, Stacked()):
        replies = replies_there(within, algorithm, federation)
        assert {place for reply in replies for place in places(reply)} == {"meta"}


class Noting(torch.nn.Linear):
    """Records the device of its inputs."""

    seen: ClassVar[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.device.type)
        return super().forward(x)


def test_outputs_are_computed_there_and_come_back() -> None:
    model = build(lambda: Noting(FEATURES, CLASSES), seed=1)
    params, buffers = model.init()
    x = torch.ones(2, FEATURES)
    with torch.no_grad():
        plain = model(params, buffers, x)["logits"]
        with outputs_on("cpu"):
            assert model(params, buffers, x)["logits"].equal(plain)
        Noting.seen.clear()
        # What "meta" computes has no numbers to bring back.
        with outputs_on("meta"), pytest.raises(NotImplementedError, match="meta"):
            model(params, buffers, x)
        assert set(Noting.seen) == {"meta"}
        model(params, buffers, x)
    assert Noting.seen[-1] == "cpu"


@pytest.mark.parametrize(("name", "there"), [("loop", False), ("cuda", True), ("cuda-loop", True)])
def test_models_are_evaluated_where_clients_train(name: str, there: bool) -> None:
    model = build(lambda: Noting(FEATURES, CLASSES), seed=1)
    with evaluating(InProcess(Way(name))):
        if there and not torch.cuda.is_available():
            with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
                model(*model.init(), torch.ones(1, FEATURES))
        else:
            model(*model.init(), torch.ones(1, FEATURES))
            assert Noting.seen[-1] == ("cuda" if there else "cpu")


@pytest.mark.parametrize("name", sorted(LOOKS))
def test_code_that_reads_values_fails(name: str) -> None:
    """The negative control: reading a number fails on "meta"."""
    setting = Setting(routed_model(), TARGET, Local(lr=0.3, batch=12))
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    with pytest.raises(RuntimeError, match="meta|Meta"):
        replies_there(loop, algorithm, federation)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "afl"])
def test_dense_stays_on_its_device(name: str) -> None:
    model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)
    setting = Setting(model, TARGET, Local(lr=0.3, batch=12, epochs=2))
    algorithm, federation = MAKE[name](setting), make_federation(model)
    for reply in replies_there(Stacked(dense=True), algorithm, federation):
        assert places(reply) == {"meta"}


def test_two_devices_at_once_are_refused(setting: Setting) -> None:
    """The other negative control: a tensor left on the processor is an error."""
    federation = make_federation(setting.model)

    def behind(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        return loop(Stage(stage.algorithm, stage.t, stage.clients, stage.seed), jobs)

    with pytest.raises(RuntimeError, match="device"):
        replies_there(behind, recipes.fedavg(setting), federation)


@pytest.mark.few(1)
@pytest.mark.parametrize("within", [loop, Stacked()], ids=["loop", "stacked"])
def test_on_the_processor_nothing_changes(within: Backend, setting: Setting) -> None:
    algorithm, federation = recipes.scaffold(setting), make_federation(setting.model)
    plain = last(run(algorithm, federation, 3, cohort=4, backend=within))
    other = last(run(algorithm, federation, 3, cohort=4, backend=on("cpu", within)))
    assert not different(plain, other)


def test_examples_go_there_once_and_the_model_once_a_round(setting: Setting) -> None:
    sent: list[tuple[Job, ClientData]] = []

    def spy(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        sent.extend((job, stage.data(job.client)) for job in jobs)
        return iter(())

    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    backend = on("meta", spy)
    for _ in range(2):
        assert not list(backend(*round_of(algorithm, federation)))
    first, second = sent[:6], sent[6:]
    assert all(a[1].x is b[1].x for a, b in zip(first, second, strict=True))
    weights = [id(job.message["params"]["head.weight"]) for job, _ in sent]
    assert weights[:6] == [weights[0]] * 6
    assert weights[6:] == [weights[6]] * 6
    assert weights[0] != weights[6]


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [lambda: on("cpu", loop), Stacked, lambda: Stacked(dense=True)])
def test_kept_inputs_belong_to_their_client(make: Any) -> None:
    """The same inputs with other labels, or with changed values, belong to other clients."""
    model = build(lambda: Mlp((FEATURES,), (4,), CLASSES), seed=1)
    algorithm = recipes.fedavg(Setting(model, TARGET, Local(lr=0.3, batch=12)))
    federation, backend = make_federation(model), make()
    turned = tuple(c._replace(y=(c.y + 1) % CLASSES) for c in federation.clients)
    for _ in range(2):
        for clients in (federation.clients, turned):
            there = replace(federation, clients=clients)
            alone = last(run(algorithm, there, 1, backend=make()))
            assert not different(alone, last(run(algorithm, there, 1, backend=backend)))
    for client in federation.clients:
        client.x.mul_(2.0)
    alone = last(run(algorithm, federation, 1, backend=make()))
    assert not different(alone, last(run(algorithm, federation, 1, backend=backend)))


@pytest.mark.slow
def test_clients_made_on_demand_are_not_kept(setting: Setting) -> None:
    """Clients made on demand are not kept, or the device would fill up."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    there: list[weakref.ref[torch.Tensor]] = []

    def noted(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """A backend that trains no client and records which inputs are on the device."""
        for job in jobs:
            assert stage.data(job.client).x.is_meta
            there.append(weakref.ref(stage.data(job.client).x))
            yield Reply(job.client, {}, {})

    def lie_there(backend: Backend) -> list[bool]:
        """Whether each client's inputs are kept after a round, and once the clients are gone."""
        there.clear()
        made = [c._replace(x=c.x.clone()) for c in federation.clients]
        stage, jobs = round_of(algorithm, federation)
        list(backend(replace(stage, clients=made), jobs))
        del stage
        gc.collect()
        before = [one() is not None for one in there]
        del made
        gc.collect()
        return before + [one() is not None for one in there]

    backend = on("meta", noted)
    assert lie_there(backend) == [True] * 6 + [False] * 6


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda-loop"):
        with pytest.raises(InputError, match="there is no device cuda for this torch"):
            backend_of(name)


def test_a_device_that_is_full(setting: Setting) -> None:
    def full(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. And so on.")

    with pytest.raises(InputError, match=r"memory of cpu is full: CUDA out of memory\. Give"):
        last(
            run(recipes.fedavg(setting), make_federation(setting.model), 1, backend=on("cpu", full))
        )


def test_channels_last_refuses_other_inputs_on_a_device(setting: Setting) -> None:
    """channels-last refuses inputs that are no images on this device, too."""
    with pytest.raises(InputError, match="channels-last is for images"):
        last(
            run(
                recipes.fedavg(setting), make_federation(setting.model), 1,
                backend=channels_last(on("cpu", loop)),
            )
        )  # fmt: skip
