"""FedALA: mixing weights that move, and the method without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedala import FedAla
from fedshift.client.local import Local, plan_all
from fedshift.client.mixing import Mix, mixed, top
from fedshift.client.objectives import CrossEntropy
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Params
from support.by_hand import final, max_difference
from support.comparing import same, whole
from support.federations import double, make_clients, make_federation, one_job
from support.mixing import STILL, learn, models, plan_of


def test_the_ends_of_a_mixture_are_exact() -> None:
    old, new = ({"w": torch.randn(50, generator=generator(i))} for i in (0, 1))
    ones, nothing = ({"w": torch.full((50,), float(w))} for w in (1, 0))
    assert torch.equal(mixed(old, new, ones)["w"], new["w"])
    assert torch.equal(mixed(old, new, nothing)["w"], old["w"])
    half = mixed(old, new, {"w": torch.full((50,), 0.5)})["w"]
    assert float((half - (old["w"] + new["w"]) / 2).abs().max()) < 1e-6
    assert not torch.equal(old["w"] + (new["w"] - old["w"]) * ones["w"], new["w"])  # why lerp


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


def test_a_model_that_agrees_in_its_first_tensor_alone_is_mixed(setting: Setting) -> None:
    """The authors' code looks at the first tensor only, and skips such a client."""
    algorithm, federation = recipes.fedala(setting), make_federation(setting.model)
    job = one_job(algorithm, federation)
    first, *others = job.state["personal"]
    mine = job.state["personal"] | {k: job.state["personal"][k] + 0.1 for k in others}
    _, left = algorithm.client_update(job.message, job.state, job.data, job.plans)
    assert "mixing" not in left  # the control: all tensors agree
    state = job.state | {"personal": mine}
    assert torch.equal(mine[first], job.message["params"][first])
    _, changed = algorithm.client_update(job.message, state, job.data, job.plans)
    assert max_difference(changed["mixing"], job.state["mixing"]) > 1e-4


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


def test_w_moves_in_training_and_the_loss_falls(setting: Setting, federated: Any) -> None:
    played = list(run(recipes.fedala(setting, mix_lr=5.0), double(federated()), 4))
    for before, after in pairwise(played[1:]):
        for i in range(6):
            gap = max_difference(before.states[i]["mixing"], after.states[i]["mixing"])
            assert gap > 1e-6
    assert played[-1].loss < played[0].loss / 2


def test_w_stays_between_zero_and_one(setting: Setting, federated: Any) -> None:
    """With a rate that throws entries to both ends; a small one reaches neither 0 nor beyond."""

    def learned(lr: float) -> Tensor:
        last = final(recipes.fedala(setting, mix_lr=lr, layers="all"), federated(), 3)
        return torch.cat([w.flatten() for s in last.states.values() for w in s["mixing"].values()])

    wild, tame = learned(1e4), learned(1e-3)
    assert float(wild.min()) == 0
    assert float(wild.max()) == 1
    assert int((wild == 0).sum()) > 20
    assert 0.5 < float(tame.min()) < 1


def test_the_first_round_is_skipped(setting: Setting, federated: Any) -> None:
    """All clients have the received model: FedAvg bit for bit, and W is not learned yet."""
    algorithm, plain = recipes.fedala(setting, mix_lr=5.0), recipes.fedavg(setting)
    one, two = list(run(algorithm, federated(), 2))
    for state in one.states.values():
        assert not bool(state["history"]["mixed"])
        assert all(bool((w == 1).all()) for w in state["mixing"].values())
    assert all(bool(state["history"]["mixed"]) for state in two.states.values())
    assert same(algorithm, plain, federated(), 1) == 0
    assert same(algorithm, plain, federated(), 2) > 1e-4


def test_one_different_entry_is_enough_not_to_skip(setting: Setting, federated: Any) -> None:
    """Two changes that cancel in their sum are a change all the same."""
    algorithm = recipes.fedala(setting)
    job = one_job(algorithm, federated())
    mine = {k: v.clone() for k, v in job.state["personal"].items()}
    first = next(iter(mine))
    mine[first].view(-1)[0] += 1.0
    mine[first].view(-1)[1] -= 1.0
    changed = algorithm.client_update(job.message, job.state | {"personal": mine}, *job[3:5])[1]
    assert bool(changed["history"]["mixed"])
    assert "history" not in algorithm.client_update(*job[1:5])[1]


def test_w_of_one_is_fedavg(setting: Setting, federated: Any) -> None:
    """Bit for bit, for as long as W does not move."""
    still = FedAla(setting.model, Mix(lr=STILL), local=setting.local)
    assert same(still, recipes.fedavg(setting), federated(), 3) == 0
    moving = FedAla(setting.model, Mix(lr=5.0), local=setting.local)
    assert same(moving, recipes.fedavg(setting), federated(), 3) > 1e-4


def test_w_of_zero_keeps_the_local_top(setting: Setting, mlp: Model) -> None:
    """A learning rate of 0 shows where training starts: local above, global below."""
    federation = double(make_federation(mlp))
    frozen = replace(setting.local, lr=STILL)
    algorithm = FedAla(mlp, Mix(lr=STILL), local=frozen)
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


class Towered(nn.Module):
    """A classifier that is followed by another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.LayerNorm(3))
        self.head = nn.Linear(3, 2)
        self.router = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(1))


def test_layers_are_counted_from_the_classifier(mlp: Model) -> None:
    """Modules that hold parameters, not tensors, which the authors' layer_idx counts."""
    assert top(mlp, 1, ("head.",)) == ("head.weight", "head.bias")
    assert top(mlp, 2, ("head.",))[:2] == ("body.1.weight", "body.1.bias")
    model = Model(Towered())
    assert top(model, 1, ("head.",)) == ("head.weight", "head.bias")
    assert top(model, 2, ("head.",))[0] == "body.2.weight"
    assert top(model, 1, ("fc.",)) == ("router.weight", "router.bias")
    assert not any(name.startswith("router") for name in top(model, "all", ("head.",)))
    assert "scale" in top(model, "all", ("head.",))


def test_the_repo_recipe_is_fedavg_served_before_averaging(
    setting: Setting, federated: Any
) -> None:
    ten = replace(setting, local=Local(lr=0.1, steps=10, batch=8))
    algorithm = recipes.fedala_drm_repo(ten)
    assert set(algorithm.phases()) == {"train0"}
    five = replace(ten, local=replace(ten.local, steps=5))
    assert same(algorithm, recipes.fedavg(five), federated(), 3) == 0
    assert same(algorithm, recipes.fedavg(ten), federated(), 3) > 1e-3
    last = final(algorithm, federated(), 2)
    job_plans = plan_all(algorithm.phases(), federated().clients[2], 2, 0, 2)
    first = final(algorithm, federated(), 1).server["params"]
    trained = algorithm.local(
        ten.model, CrossEntropy(), first, {}, {}, federated().clients[2], job_plans["train0"]
    ).params
    assert max_difference(algorithm.model_for(last.server, last.states[2])[0], trained) == 0
    assert max_difference(last.server["params"], trained) > 1e-3
    with pytest.raises(InputError, match="fedala_drm_repo counts steps"):
        recipes.fedala_drm_repo(setting)


def test_only_the_change_of_the_model_leaves(setting: Setting, federated: Any) -> None:
    """And it is measured from the model received, not from the mixture."""
    algorithm = FedAla(setting.model, Mix(lr=5.0), local=replace(setting.local, lr=STILL))
    job = one_job(algorithm, double(federated()))
    mine, theirs = models(setting.model)
    update, new_state = algorithm.client_update(
        job.message | {"params": theirs}, job.state | {"personal": mine}, *job[3:5]
    )
    assert set(update) == {"delta", "buffers", "counters", "report"}
    moved = {k: new_state["personal"][k] - theirs[k] for k in theirs}
    assert max_difference(update["delta"], moved) == 0
    assert float(moved["head.weight"].abs().max()) > 1e-3


def test_buffers_are_the_received_ones(normed: Model) -> None:
    """The passes that learn W do not change running statistics."""
    federation = make_federation(normed)
    local = Local(lr=0.1, epochs=1, batch=7)
    job = one_job(FedAla(normed, Mix(), local=local), federation, 3)
    state = job.state | {"personal": {k: v + 0.1 for k, v in job.state["personal"].items()}}
    counts = []
    for mix in (Mix(), None):
        algorithm = FedAla(normed, mix, local=local)
        new_state = algorithm.client_update(job.message, state, *job[3:5])[1]
        counts.append(int(new_state["personal_buffers"]["body.1.num_batches_tracked"]))
    assert counts == [6, 6]
    assert whole(federation.clients[3]).size == 40


def test_wrong_settings_are_refused(setting: Setting, federated: Any) -> None:
    for given, message in (
        ({"mix_lr": 0.0}, "Mix lr must be a positive number, got 0"),
        ({"share": 1.2}, r"FedALA's share of examples must be in \(0, 1\], got 1.2"),
        ({"threshold": -1.0}, "Mix threshold must be a positive number, got -1"),
        ({"layers": 0}, 'FedALA layers must be 1 or more, or "all", got 0'),
    ):
        with pytest.raises(InputError, match=message):
            recipes.fedala(setting, **given)
    with pytest.raises(InputError, match="FedALA's cap must be at least 1, got 0"):
        Mix(cap=0)
    with pytest.raises(InputError, match="layers=9; the model has 2 layers with parameters"):
        final(recipes.fedala(setting, layers=9), federated(), 1)
