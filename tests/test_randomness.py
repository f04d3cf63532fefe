"""Networks that draw random numbers while they compute: equal seeds give equal bits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import Local, Model, run
from fedshift.client.objectives import CrossEntropy
from fedshift.data import Examples
from fedshift.engine.backends import loop
from fedshift.engine.preflight.network import look
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Round
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, TrainingError, UnfitError
from fedshift.evaluation.scores import score
from fedshift.model import build
from fedshift.randomness import states
from fedshift.seeds import generator
from support.drawing import (
    CLASSES,
    Drawing,
    always,
    dropout,
    ended,
    federated,
    leaky,
    numpy_noise,
    same,
    torch_noise,
    unforeseen,
)


def depth(net: nn.Module, h: Tensor) -> Tensor:
    return h if net.training and random.random() < 0.5 else h + torch.tanh(h)


def own_source(net: nn.Module, h: Tensor) -> Tensor:
    if not net.training:
        return h
    return h * torch.rand(h.shape, generator=net.source)  # type: ignore[arg-type]


def deep_source(net: nn.Module, h: Tensor) -> Tensor:
    """A network with its generator in nested containers."""
    if not net.training:
        return h
    return h * torch.rand(h.shape, generator=net.kept["by name"][0][0])  # type: ignore[arg-type,index]


def lazy_source(net: nn.Module, h: Tensor) -> Tensor:
    """A network that makes its generator on first use."""
    if net.training and not hasattr(net, "late"):
        net.late = torch.Generator().manual_seed(5)
    return h * torch.rand(h.shape, generator=net.late) if net.training else h  # type: ignore[arg-type]


def unforeseen_source(net: nn.Module, h: Tensor) -> Tensor:
    return lazy_source(net, h) if len(h) > 2 else h


def unforeseen_numpy(net: nn.Module, h: Tensor) -> Tensor:
    return numpy_noise(net, h) if len(h) > 2 else h


UNFORESEEN = unforeseen, unforeseen_numpy, unforeseen_source
DRAWS = [
    dropout, leaky, torch_noise, numpy_noise, depth, own_source, deep_source, lazy_source,
    always, *UNFORESEEN,
]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("between", DRAWS, ids=lambda f: f.__name__)
def test_draws_are_part_of_the_run(between: Any) -> None:
    """Equal seeds, equal bits; resumed = whole; workers = loop; the process's state stays."""
    draws, before = between in UNFORESEEN, states()
    algorithm, federation = federated(between, draws=draws)
    rounds = list(run(algorithm, federation, 3))
    whole = rounds[-1].server["params"]
    torch.rand(1), np.random.rand(1), random.random()
    moved = before.moved(states())
    assert moved == {"torch", "numpy", "python"}  # by the three draws above, which others miss
    assert same(whole, ended(between, draws=draws))
    *_, resumed = run(*federated(between, draws=draws), 3, after=rounds[0])
    assert same(whole, resumed.server["params"])
    with workers(federation.clients, 2) as team:
        assert same(whole, ended(between, draws=draws, backend=team))
    assert not same(whole, ended(between, 1, draws=draws))


@pytest.mark.parametrize("between", UNFORESEEN, ids=lambda f: f.__name__)
def test_draws_that_the_first_pass_did_not_make_need_the_switch(between: Any) -> None:
    before = states()
    if between is unforeseen_source:  # the generator is found when it is made
        ended(between)
    else:
        with pytest.raises(InputError, match=r"draws=True"):
            ended(between)
    assert not before.moved(states())


@pytest.mark.few(3)
@pytest.mark.parametrize("between", DRAWS, ids=lambda f: f.__name__)
def test_draws_differ_from_step_to_step(between: Any) -> None:
    """A control: the drawn numbers move the model, differently in each step."""
    if between is always:
        pytest.skip("draws in evaluation, too, so that there is no pass without")
    draws = between in UNFORESEEN
    assert not same(ended(between, draws=draws), ended(lambda net, h: h))
    model = federated(between, draws=draws)[0].model
    params, buffers = model.init()
    x = torch.randn(20, 4, generator=generator("steps"))
    look(model, params, buffers, x)
    outs = [model.train(params, buffers, x, seed)[0]["logits"] for seed in (*range(8), 0)]
    assert torch.equal(outs[0], outs[-1])
    assert any(not torch.equal(outs[0], out) for out in outs[1:-1])


@pytest.mark.few(4)
@pytest.mark.parametrize("between", DRAWS, ids=lambda f: f.__name__)
def test_stacked_clients_are_refused(between: Any) -> None:
    with pytest.raises(UnfitError, match=r"random numbers|andom"):
        ended(between, draws=between in UNFORESEEN, backend=Stacked())


def test_evaluation_that_draws_is_repeatable() -> None:
    algorithm, federation = federated(always)
    params, buffers = federation.params, federation.buffers
    data = federation.clients[0]
    before = states()
    one, two = (score(algorithm.model, params, buffers, Examples(data.x, data.y), 3) for _ in "ab")
    assert one.loss_sum == two.loss_sum
    assert not before.moved(states())


def test_runs_in_threads_are_those_of_one_after_the_other() -> None:
    alone, ends = ended(dropout), dict[int, dict[str, Tensor]]()
    before = states()

    def one(i: int) -> None:
        ends[i] = ended(dropout if i % 2 else lambda net, h: h)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(alone, ends[1])
    assert same(alone, ends[3])
    assert same(ends[0], ends[2])
    assert not before.moved(states())


def test_a_generator_that_no_seed_reaches_is_refused() -> None:
    source = np.random.default_rng(0)
    with pytest.raises(InputError, match="default_rng"):
        ended(lambda net, h: h * float(source.normal()))


class Noisy(CrossEntropy):
    """A loss term that draws noise."""

    def __call__(self, view: Any) -> Tensor:
        return super().__call__(view) * (1 + 0.1 * torch.rand(()))


def test_draws_outside_of_the_forward_pass_are_refused() -> None:
    before = states()
    with pytest.raises(InputError, match=r"torch's global generator"):
        list(run(*federated(dropout, objective=Noisy()), 1))
    assert not before.moved(states())


def test_draws_beside_another_thread_warn() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.warns(RuntimeWarning, match="another thread"):
            played: list[Round] = list(run(*federated(dropout, objective=Noisy()), 1))
    finally:
        done.set()
        thread.join()
    assert played[0].t == 1


def test_first_weights_are_the_callers_or_follow_the_seed() -> None:
    class Own(nn.Linear):
        """A network whose first weights come from all three generators."""

        def __init__(self) -> None:
            super().__init__(2, 2)
            with torch.no_grad():
                self.weight.mul_(float(np.random.rand()) + random.random())

    net = Own()
    assert torch.equal(Model(net).init()[0]["weight"], net.weight)
    before = states()
    one, two, other = (build(Own, seed).init()[0]["weight"] for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not before.moved(states())


def test_a_first_training_pass_is_watched() -> None:
    """Clients that train without a trial, as on Flower, compute nothing twice."""
    model = Model(Drawing(dropout))
    params, buffers = model.init()
    x = torch.randn(6, 4, generator=generator("first pass"))
    before = states()
    one, two, other = (model.train(params, buffers, x, seed)[0]["logits"] for seed in (7, 7, 8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert not before.moved(states())


def in_a_hook(net: Any, h: Tensor) -> Tensor:
    """Noise in the backward pass, from a generator of the network."""
    if net.training and h.requires_grad:
        h.register_hook(lambda g: g * torch.rand(g.shape, generator=net.source))
    return h


def made_anew(net: Any, h: Tensor) -> Tensor:
    if net.training and len(h) > 2:
        net.source = torch.Generator()
        net.source.seed()
        return h * torch.rand(h.shape, generator=net.source)
    return h


@pytest.mark.parametrize("between", [in_a_hook, made_anew])
def test_a_networks_generator_that_no_seed_reaches_is_refused(between: Any) -> None:
    before = states()
    with pytest.raises(InputError, match="a torch.Generator of the network"):
        ended(between)
    assert not before.moved(states())


def test_a_generator_that_is_replaced_between_rounds() -> None:
    """The new generator starts at each pass's seed, too."""

    def ending(late: Callable[[], torch.Generator]) -> dict[str, Tensor]:
        def noisy(net: Any, h: Tensor) -> Tensor:
            return h * torch.rand(h.shape, generator=net.source) if net.training else h

        algorithm, federation = federated(noisy)
        net: Any = algorithm.model.net
        servers = []
        for played in run(algorithm, federation, 3):
            net.source = late()
            servers.append(played.server)
        return servers[-1]["params"]

    other = [ending(lambda s=s: torch.Generator().manual_seed(s)) for s in (1, 2)]  # type: ignore[misc]
    assert same(*other)
    assert not same(other[0], ended(lambda net, h: h))


@pytest.mark.slow
def test_one_model_in_several_threads() -> None:
    """Each thread gets the outputs of its parameters, and the network's own ones stay."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = Model(net)
    params, buffers = model.init()
    x = torch.randn(200, 4, generator=generator("threads"))
    given = [{k: v + i for k, v in params.items()} for i in range(3)]
    right = [model(one, buffers, x)["logits"] for one in given]
    assert not torch.equal(right[0], right[1])
    wrong: list[Any] = []

    def one(i: int) -> None:
        for _ in range(60):
            passes = model(given[i], buffers, x), model.train(given[i], buffers, x)[0]
            wrong.extend(i for out in passes if not torch.equal(out["logits"], right[i]))
            fresh = model.init()[0]
            wrong.extend("init" for k in params if not torch.equal(fresh[k], params[k]))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(v is p for v, p in zip(net.parameters(), model.net.parameters(), strict=True))
    assert all(torch.equal(v, params[k]) for k, v in net.named_parameters())


class Shuffled:
    """A backend that draws from Python's generator."""

    def __call__(self, update: Any, jobs: Any) -> Any:
        todo = list(jobs)
        random.shuffle(todo)
        return loop(update, todo)


def test_backends_and_schedules_that_draw_are_refused() -> None:
    before = states()
    with pytest.raises(InputError, match="Python's global generator"):
        ended(lambda net, h: h, backend=Shuffled())
    algorithm, federation = federated(lambda net, h: h)
    algorithm = replace(algorithm, local=Local(lr=lambda t: 0.1 * random.random(), batch=10))
    with pytest.raises(InputError, match="Python's global generator"):
        run(algorithm, federation, 2)
    assert not before.moved(states())


class Forked(nn.Module):
    """A network that draws and then restores the generator."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(4, CLASSES), rate

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            return self.layer(F.dropout(x, self.rate, self.training))


def test_draws_that_are_put_back_are_refused() -> None:
    """No generator's state has changed after the pass, yet the outputs depend on one."""
    model, other = Model(Forked(0.5)), Model(Forked(0.0))
    x = torch.randn(8, 4, generator=generator("put back"))
    look(other, *other.init(), x)  # the control
    with pytest.raises(InputError, match="puts back after drawing"):
        look(model, *model.init(), x)


@pytest.mark.parametrize("idle", [False, True])
def test_an_error_leaves_the_process_s_state(idle: bool) -> None:
    """Also while another thread is alive, as in notebooks."""

    def failing(net: nn.Module, h: Tensor) -> Tensor:
        unforeseen(net, h)
        if net.training and len(h) > 2:
            raise RuntimeError("no further")
        return h

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    if idle:
        thread.start()
    before = states()
    try:
        with pytest.raises(TrainingError, match="no further"):
            list(run(*federated(failing), 1))
    finally:
        done.set()
    assert not before.moved(states())
