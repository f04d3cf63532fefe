"""FedALA: mixing weights that move, how long and from which examples they learn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.client.local import Local
from fedshift.client.mixing import Mix, leading, mixed, top
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.data import Plan
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Params
from support.by_hand import max_difference
from support.comparing import whole
from support.extras import fedala
from support.federations import double, make_clients, make_federation, one_job
from support.mixing import STILL, learn, models, plan_of


def test_each_batch_starts_from_the_mixture_that_the_last_one_left(mlp: Model) -> None:
    """Two batches at once are two calls of one batch each; not so from one mixture for both."""
    names = top(mlp, "all", ("head.",))
    half = {k: torch.full_like(models(mlp)[0][k], 0.5) for k in names}
    plan, mix = plan_of(16), Mix(0.2, "all")
    parts = [
        plan._replace(rows=plan.rows[s : s + 1], weight=plan.weight[s : s + 1],
                      sizes=plan.sizes[s : s + 1])
        for s in range(2)
    ]  # fmt: skip
    first = learn(mlp, mix, half, parts[0])
    both = learn(mlp, mix, half, plan)
    assert max_difference(both, learn(mlp, mix, first, parts[1])) < 1e-12
    other = learn(mlp, mix, half, parts[1])
    added = {k: (first[k] + other[k] - half[k]).clamp(0.0, 1.0) for k in names}
    assert max_difference(both, added) > 1e-4


def test_the_gradient_of_w_is_that_of_finite_differences(mlp: Model) -> None:
    """One step on one batch: (W - W')/lr = d CE(theta^(W)) / dW, entry by entry."""
    old, new = models(mlp)
    names = top(mlp, "all", ("head.",))
    assert set(names) == set(old)
    source = generator(4, "W")
    w = {k: 0.2 + 0.6 * torch.rand(v.shape, generator=source).double() for k, v in old.items()}
    data = make_clients()[3]
    x, y = data.x.double(), data.y

    def loss(mixing: Params) -> Tensor:
        return F.cross_entropy(mlp(mixed(old, new, mixing), {}, x)["logits"], y)

    stepped = learn(mlp, Mix(lr=1e-3, share=1.0), w, plan_of(40, batch=40))
    h = 1e-6
    for name in names:
        derivative = ((w[name] - stepped[name]) / 1e-3).flatten()
        for entry in range(0, derivative.numel(), 7):
            bump = torch.zeros_like(w[name]).flatten()
            bump[entry] = h
            ends = [loss(w | {name: w[name] + s * bump.view_as(w[name])}) for s in (1, -1)]
            slope = float((ends[0] - ends[1]) / (2 * h))
            assert float(derivative[entry]) == pytest.approx(slope, rel=1e-5, abs=1e-8)
        assert float(derivative.abs().max()) > 1e-4
    leaves = {k: v.clone().requires_grad_() for k, v in mixed(old, new, w).items()}
    ahead = F.cross_entropy(mlp(leaves, {}, x)["logits"], y)
    at_theta = torch.autograd.grad(ahead, leaves["head.weight"])[0]  # without (new - old)
    moved = (w["head.weight"] - stepped["head.weight"]) / 1e-3
    assert float((moved - at_theta).abs().max()) > 1e-2


@pytest.mark.parametrize("layers", [1, 2, "all"])
def test_w_really_moves(layers: Any, mlp: Model) -> None:
    """After one epoch between two models, in every tensor: never so in code that copies values."""
    names = top(mlp, layers, ("head.",))
    ones = {k: torch.ones_like(models(mlp)[0][k]) for k in names}
    learned = learn(mlp, Mix(layers=layers), ones, plan_of(40))
    assert all(float((1 - w).max()) > 1e-3 for w in learned.values())
    assert max_difference(learn(mlp, Mix(lr=STILL), ones, plan_of(40)), ones) == 0


def test_w_of_zero_keeps_the_local_top(setting: Setting, mlp: Model) -> None:
    """A learning rate of 0 shows where training starts: local above, global below."""
    federation = double(make_federation(mlp))
    frozen = replace(setting.local, lr=STILL)
    algorithm = fedala(mlp, Mix(lr=STILL), local=frozen)
    job = one_job(algorithm, federation)
    mine, theirs = models(mlp)
    for w, expected in ((0.0, mine), (1.0, theirs)):
        state = job.state | {
            "personal": mine,
            "mixing": {k: torch.full_like(v, w) for k, v in job.state["mixing"].items()},
        }
        new_state = algorithm.client_update(job.message | {"params": theirs}, state, *job[3:5])[1]
        start = new_state["personal"]
        for name, v in start.items():
            whose = expected if name.startswith("head.") else theirs
            assert torch.equal(v, whose[name]), name
    assert max_difference(mine, theirs) > 0.1


def test_buffers_are_the_received_ones(normed: Model) -> None:
    """The passes that learn W do not change running statistics."""
    federation = make_federation(normed)
    local = Local(lr=0.1, epochs=1, batch=7)
    job = one_job(fedala(normed, Mix(), local=local), federation, 3)
    state = job.state | {"personal": {k: v + 0.1 for k, v in job.state["personal"].items()}}
    counts = []
    for mix in (Mix(), None):
        algorithm = fedala(normed, mix, local=local)
        new_state = algorithm.client_update(job.message, state, *job[3:5])[1]
        counts.append(int(new_state["personal_buffers"]["body.1.num_batches_tracked"]))
    assert counts == [6, 6]
    assert whole(federation.clients[3]).size == 40


@dataclass(frozen=True)
class Counted(Term):
    """Cross-entropy that counts its calls."""

    calls: list[int] = field(default_factory=list)

    def __call__(self, view: View) -> Tensor:
        self.calls.append(len(view.batch.y))
        return CrossEntropy()(view)


def epochs_taken(model: Model, mix: Mix, once: bool) -> int:
    """How many passes a client of 40 examples makes over the 32 that it learns W on."""
    counted = Counted()
    algorithm = fedala(model, mix, objective=counted, local=Local(lr=STILL, epochs=1, batch=8))
    job = one_job(algorithm, double(make_federation(model)), 3)
    mine, theirs = models(model)
    done = {"history": {"mixed": torch.tensor(once)}}
    state, message = job.state | {"personal": mine} | done, job.message | {"params": theirs}
    algorithm.client_update(message, state, *job[3:5])
    training = 5
    assert sum(counted.calls[:-training]) % 32 == 0
    return sum(counted.calls[:-training]) // 32


def test_the_first_time_goes_on_until_losses_settle(mlp: Model) -> None:
    """Losses that stand still end it after window + 1 epochs, none before; then one a round."""
    assert epochs_taken(mlp, Mix(lr=STILL), once=False) == 11
    assert epochs_taken(mlp, Mix(lr=STILL, window=3), once=False) == 4
    assert epochs_taken(mlp, Mix(lr=5.0, threshold=1e-12), once=False) == 50
    assert epochs_taken(mlp, Mix(lr=5.0, threshold=1e-12, cap=7), once=False) == 7
    assert epochs_taken(mlp, Mix(lr=5.0, threshold=1e-12), once=True) == 1
    settled = epochs_taken(mlp, Mix(lr=1.0, threshold=0.01), once=False)
    assert 11 <= settled < 50


def test_a_share_of_the_examples(mlp: Model) -> None:
    plan = plan_of(40)
    part = leading(plan, 0.8)
    assert part.sizes == (8, 8, 8, 8)
    assert torch.equal(part.rows, plan.rows[:4])
    odd = leading(plan, 0.55)
    assert odd.sizes == (8, 8, 6)
    assert odd.weight.sum() == 22
    assert leading(plan, 1.0).sizes == plan.sizes
    assert leading(plan_of(1), 0.1).sizes == (1,)
    loose = leading(plan._replace(sizes=None), 0.55)
    assert torch.equal(loose.weight[:3], odd.weight)
    assert not loose.weight[3:].any()
    drawn = Local(epochs=1, batch=8).plan(40, 2, torch.Generator().manual_seed(1))
    assert set(leading(drawn, 0.8).rows.flatten().tolist()) != set(part.rows.flatten().tolist())


def test_padding_does_not_teach_w(mlp: Model) -> None:
    """Padding is not the last batch of an epoch, either."""
    plan = plan_of(40)
    rows = torch.cat([plan.rows, torch.zeros(3, 8).long()])
    weight = torch.cat([plan.weight, torch.zeros(3, 8)])
    ones = {k: torch.ones_like(models(mlp)[0][k]) for k in top(mlp, 1, ("head.",))}
    mix = Mix(threshold=0.02)
    loose = Plan(rows, weight, plan.lr, None)
    assert max_difference(learn(mlp, mix, ones, plan, 50), learn(mlp, mix, ones, loose, 50)) < 1e-14
    wrong = loose._replace(weight=torch.ones_like(weight))
    assert max_difference(learn(mlp, mix, ones, plan, 50), learn(mlp, mix, ones, wrong, 50)) > 1e-4
