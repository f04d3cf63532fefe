"""Ways to train, the layout of images, batches drawn ahead, and clients that are not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, View, batch_mean
from fedshift.data import Batch, batches, take
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
from fedshift.engine.one_by_one import channels_last, dense
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, UnfitError
from fedshift.experiments.engines import Way, backend_of
from fedshift.kernels.layout import channels_last as laid_out
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import sub
from support.federations import CLASSES, make_clients, make_federation
from support.odd_work import round_of
from support.photographs import images
from support.rounds import last


@pytest.mark.few(2)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_channels_last_is_the_loop_but_for_rounding(
    channels: int, dtype: torch.dtype, most: float
) -> None:
    federation, setting = images(channels, dtype)
    algorithm: Any = recipes.fedavg(setting)
    net: Any = algorithm.model.net
    plain = last(run(algorithm, federation, 2)).server["params"]
    assert all(s[1] > 1 for s in net.seen)
    rounds = run(algorithm, federation, 2, backend=channels_last(loop))
    net.seen.clear()  # it was tried, as it is
    other = last(rounds).server["params"]
    assert all(s[1] == 1 for s in net.seen)
    gaps, moved = sub(other, plain), sub(plain, federation.params)
    assert max(float(gaps[k].norm() / moved[k].norm()) for k in gaps) < most


def test_the_same_images() -> None:
    x = torch.randn(4, 3, 5, 6)
    assert torch.equal(laid_out(x), x)
    assert laid_out(x).stride() == (90, 1, 18, 3)
    assert laid_out(x[:, :1]).stride() == (30, 1, 6, 1)


def test_channels_last_is_for_images(setting: Setting) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    with pytest.raises(UnfitError, match=r"for images .*; these inputs are \(8, 8\)"):
        last(run(algorithm, federation, 1, backend=channels_last(loop)))


@pytest.mark.parametrize("lever", [dense, channels_last])
def test_marks_are_not_for_stacked_clients(
    lever: Callable[[Backend], Backend], setting: Setting
) -> None:
    with pytest.raises(UnfitError, match="one by one; of stacked clients there is"):
        last(
            run(
                recipes.fedavg(setting), make_federation(setting.model), 1, backend=lever(Stacked())
            )
        )


def test_channels_last_reaches_the_workers() -> None:
    federation, setting = images(3, torch.float32)
    algorithm = recipes.fedavg(setting)
    one = last(run(algorithm, federation, 1, backend=channels_last(loop))).server["params"]
    with workers(federation.clients, 2) as team:
        two = last(run(algorithm, federation, 1, backend=channels_last(team))).server["params"]
    assert all(torch.equal(v, two[k]) for k, v in one.items())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch", [4, 10, 50])
def test_batches_are_those_of_each_step(batch: int, weighted: bool) -> None:
    data = make_clients()[1]
    if weighted:
        data = data._replace(w=torch.linspace(0.5, 1.5, len(data.y)))
    plan = Local(batch=batch, epochs=2).plan(len(data.y), 1, generator(3))
    drawn = list(batches(data, plan))
    assert len(drawn) == plan.steps
    for s, one in enumerate(drawn):
        right = take(data, plan, s)
        assert all(torch.equal(a, b) for a, b in zip(one[:5], right[:5], strict=True))
        assert one.seed == right.seed
        assert one.even is not weighted


def test_the_mean_of_even_batches_has_the_same_bits() -> None:
    source = generator(5)
    for n in (1, 7, 20, 32, 100, 257):
        losses = torch.randn(n, generator=source).exp()
        one = losses.clone().requires_grad_()
        two = losses.clone().requires_grad_()
        rows = torch.arange(n)
        batch = Batch(losses, rows, torch.ones(n), rows, torch.tensor(float(n)))
        a, b = batch_mean(one, batch), batch_mean(two, batch._replace(even=True))
        assert torch.equal(a, b)
        assert all(
            torch.equal(x, y)
            for x, y in zip(torch.autograd.grad(a, one), torch.autograd.grad(b, two), strict=True)
        )


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_cross_entropy_of_even_batches_has_the_same_gradient(
    kind: torch.dtype, factor: float, setting: Setting
) -> None:
    """Bit for bit; the loss is summed in another order. Uneven weights are still applied."""
    source, term = generator(6), factor * CrossEntropy()

    def loss_and_gradient(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        at = logits.clone().requires_grad_()
        loss = term(View(setting.model, {}, {"logits": at}, batch, {}))
        return loss.detach(), torch.autograd.grad(loss, at)[0]

    for n in (1, 7, 20, 32, 100, 257):
        logits = 3 * torch.randn(n, 10, generator=source, dtype=kind)
        y, rows = torch.randint(10, (n,), generator=source), torch.arange(n)
        batch = Batch(logits, y, torch.ones(n, dtype=kind), rows, torch.tensor(float(n)))
        (loss, grad), (plain, same) = (
            loss_and_gradient(logits, batch._replace(even=e)) for e in (False, True)
        )
        assert torch.equal(grad, same)
        torch.testing.assert_close(plain, loss, rtol=1e-6, atol=0.0)
        assert not torch.equal(
            loss_and_gradient(logits, batch._replace(w=batch.w * 1.001))[1], grad
        )
        wide = batch._replace(w=batch.w.double(), even=True)
        assert loss_and_gradient(logits.float(), wide)[0].dtype == torch.float64


@pytest.mark.slow
def test_no_backend_trains_a_client_without_weight() -> None:
    """FedPALS for two labels: clients without these labels get weight 0 and no job."""
    model = build(lambda: Mlp((8,), (6,), CLASSES), 1)
    setting = Setting(model, (0.5, 0.5, 0.0, 0.0, 0.0), Local(lr=0.1, batch=8))
    algorithm, federation = recipes.fedpals(setting, lam=0.0), make_federation(model)
    trained: list[int] = []

    def noted(backend: Backend) -> Backend:
        def backed(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
            todo = list(jobs)
            trained.extend(job.client for job in todo)
            yield from backend(stage, todo)

        return backed

    with workers(federation.clients, 2) as team:
        for one in (loop, team, Stacked(), Stacked(dense=True), dense(loop), dense(team)):
            trained.clear()
            played = last(run(algorithm, federation, 1, backend=noted(one)))
            heavy = played.cohort[played.weights > 0].tolist()
            assert sorted(trained) == heavy == list(played.trained)
            assert len(heavy) < 6


@pytest.mark.parametrize(
    ("way", "text"),
    [
        (Way("workers", 2), "2 workers"),
        (Way("dense", 2), "dense in 2 workers"),
        (Way("channels-last"), "channels-last"),
    ],
)
def test_ways_by_name(way: Way, text: str) -> None:
    assert str(way) == text


def test_one_process_takes_no_workers() -> None:
    with pytest.raises(InputError, match="--workers 2 is for the .* dense, .*; loop is"):
        backend_of("loop", 2)


def test_parameters_that_were_sent_stay(setting: Setting) -> None:
    """From the second step on, steps are taken in place."""
    federation = make_federation(setting.model)
    before = {k: v.clone() for k, v in federation.params.items()}
    for backend in (loop, dense(loop), Stacked(dense=True)):
        list(backend(*round_of(recipes.fedavg(setting), federation)))
        assert all(torch.equal(v, federation.params[k]) for k, v in before.items())
