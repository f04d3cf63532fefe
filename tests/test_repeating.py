"""Unforeseen draws: the computation that drew them is repeated, or refused."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from fedshift.errors import InputError, TrainingError
from fedshift.evaluation.scores import score
from fedshift.randomness import states
from fedshift.repeating import repeatable
from fedshift.seeds import generator
from support.drawing import CLASSES, always, clients, dropout, ended, federated, same, unforeseen


def nothing(net: nn.Module, h: Tensor) -> Tensor:
    return h


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


def made_anew_alike(net: Any, h: Tensor) -> Tensor:
    """A network that draws the same numbers in each pass, whatever the seed."""
    if net.training:
        net.source = torch.Generator().manual_seed(3)
        return h * torch.rand(h.shape, generator=net.source)
    return h


@pytest.mark.parametrize("between", [in_a_hook, made_anew])
def test_a_networks_generator_that_no_seed_reaches_is_refused(between: Any) -> None:
    before = states()
    with pytest.raises(InputError, match=r"a torch.Generator of the network where no seed"):
        ended(between)
    assert not before.moved(states())


def test_a_generator_that_is_made_alike_in_each_pass_is_right() -> None:
    assert same(ended(made_anew_alike), ended(made_anew_alike, 0))
    assert not same(ended(made_anew_alike), ended(nothing))


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
    assert not same(other[0], ended(nothing))


class Meeting(CrossEntropy):
    """A loss that waits for another thread at each thread's first call."""

    def __call__(self, view: Any) -> Tensor:
        if threading.current_thread() in WAITING:
            WAITING.discard(threading.current_thread())
            MEET.wait(10.0)
        return super().__call__(view)


MEET, WAITING = threading.Barrier(3), set[threading.Thread]()


def test_unforeseen_draws_in_threads() -> None:
    """Runs in threads that are in their first round together equal runs one after the other."""
    alone, ends = ended(unforeseen), dict[int, dict[str, Tensor]]()
    other = ended(unforeseen, 1)
    before = states()

    def one(i: int) -> None:
        algorithm, federation = federated(unforeseen, int(i == 2), objective=Meeting())
        WAITING.add(threading.current_thread())
        *_, last = run(algorithm, federation, 3)
        ends[i] = last.server["params"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(ends[0], alone)
    assert same(ends[1], alone)
    assert same(ends[2], other)
    assert not same(alone, other)
    assert not before.moved(states())


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


def when_asked(net: Any, h: Tensor) -> Tensor:
    """Monte-Carlo dropout, which is turned on after training."""
    return always(net, h) if getattr(net, "asked", False) else h


def when_asked_own(net: Any, h: Tensor) -> Tensor:
    return h * torch.rand(h.shape, generator=net.later) if getattr(net, "asked", False) else h


@pytest.mark.parametrize("between", [when_asked, when_asked_own])
def test_evaluation_that_draws_only_later_is_repeatable(between: Any) -> None:
    algorithm, federation = federated(between)
    model: Any = algorithm.model
    data, given = federation.clients[0], (federation.params, federation.buffers)
    examples = Examples(data.x, data.y)
    plain = score(model, *given, examples, CLASSES).loss_sum
    first = model(*given, data.x)["logits"]
    model.net.asked, model.net.later = True, torch.Generator().manual_seed(1)
    before = states()
    outs = [model(*given, data.x)["logits"] for _ in "ab"]
    scores = [score(model, *given, examples, CLASSES).loss_sum for _ in "ab"]
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], first)
    assert scores[0] == scores[1] != plain
    assert not before.moved(states())


class Counting:
    """A backend that counts its rounds."""

    def __init__(self, within: Any = loop, *, draws: bool = False) -> None:
        self.within, self.draws, self.rounds = within, draws, 0

    def __call__(self, update: Any, jobs: Any) -> Any:
        self.rounds += 1
        todo = list(jobs)
        if self.draws:
            random.shuffle(todo)
        return self.within(update, todo)


@pytest.mark.few(2)
@pytest.mark.parametrize(("between", "rounds"), [(nothing, 3), (dropout, 3), (unforeseen, 4)])
def test_a_backend_is_called_once_a_round(between: Any, rounds: int) -> None:
    """And once more in the first round if the network draws numbers that the trial did not show."""
    backend = Counting()
    assert same(ended(between, backend=backend), ended(between))
    assert backend.rounds == rounds


def test_backends_and_schedules_that_draw_are_refused() -> None:
    message = (
        r"Python's global generator in a round, .* backends, schedules .* generator of your own"
    )
    before = states()
    with pytest.raises(InputError, match=message):
        ended(nothing, backend=Counting(draws=True))
    data = clients()
    with workers(data, 2) as team:
        backend = Counting(team, draws=True)
        with pytest.raises(InputError, match=message):
            ended(nothing, backend=backend)
    assert backend.rounds == 1  # no network drew here, so that nothing is to be computed again
    algorithm, federation = federated(nothing)
    algorithm = replace(algorithm, local=Local(lr=lambda t: 0.1 * random.random(), batch=10))
    with pytest.raises(InputError, match=message):
        run(algorithm, federation, 2)
    assert not before.moved(states())


def test_two_models_of_one_network_both_see_that_it_changed() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    one, two = Model(net), Model(net)
    params, buffers = one.init()
    x = torch.randn(5, 4, generator=generator("two models"))
    expected = net(x)
    net[0] = nn.Linear(4, 4)
    assert not torch.equal(net(x), expected)  # the control
    for name in ("train", "__call__"):
        passes = [getattr(model, name) for model in (one, two)]
        outs = repeatable(lambda passes=passes: [f(params, buffers, x) for f in passes])
        for out in outs:
            logits = (out[0] if name == "train" else out)["logits"]
            torch.testing.assert_close(logits, expected)


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
    with pytest.raises(InputError, match="that it puts back after drawing"):
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
