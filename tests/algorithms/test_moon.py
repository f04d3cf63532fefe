"""MOON: its equation, and when it is FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local, gradient_of
from fedshift.client.objectives import (
    Contrastive,
    CrossEntropy,
    View,
)
from fedshift.data import client_data
from fedshift.engine.run import run, start
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.projected import projected_mlp
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Params
from support.by_hand import final, max_difference
from support.comparing import same, whole
from support.federations import CLASSES, FEATURES, TARGET, make_clients, make_federation, one_job


def test_mu_zero_is_fedavg(setting: Setting, federated: Any) -> None:
    plain = recipes.fedavg(setting)
    assert same(recipes.moon(setting, mu=0.0), plain, federated()) == 0
    assert same(recipes.moon(setting, mu=0.5), plain, federated()) > 1e-5


def test_without_hidden_layers_it_is_fedavg(setting: Setting) -> None:
    """The features are the inputs, which training does not move."""
    gaps = []
    for hidden in ((), (10,)):
        model = build(lambda h=hidden: Mlp((FEATURES,), h, CLASSES), seed=1)
        here = replace(setting, model=model)
        gaps.append(same(recipes.moon(here, mu=5.0), recipes.fedavg(here), make_federation(model)))
    assert gaps[0] == 0
    assert gaps[1] > 1e-3


def test_the_first_round_is_fedavg(setting: Setting, federated: Any, normed: Model) -> None:
    """The previous model is then the model received: the gradient is exactly 0."""
    plain, moon = recipes.fedavg(setting), recipes.moon(setting, mu=5.0)
    assert same(moon, plain, federated(), 1) == 0
    assert same(moon, plain, federated(), 2) > 1e-3
    federation, local = make_federation(normed), Local(epochs=1, batch=7)
    one = final(FedAvg(normed, local=local), federation, 1)
    two = final(
        FedAvg(normed, objective=CrossEntropy() + Contrastive(5.0), local=local), federation, 1
    )
    assert max_difference(one.server["params"], two.server["params"]) == 0
    assert max_difference(one.server["buffers"], two.server["buffers"]) == 0


def models(model: Model, count: int) -> list[Params]:
    """The model's parameters with different noise, in float64."""
    source = generator(0, "models")
    params, _ = model.init()
    return [
        {k: v.double() + 0.3 * torch.randn(v.shape, generator=source) for k, v in params.items()}
        for _ in range(count)
    ]


def contrast(
    model: Model, term: Contrastive, now: Params, received: Params, previous: Params
) -> Tensor:
    data = make_clients()[1]
    data = data._replace(x=data.x.double(), w=data.w.double())
    context = {
        "anchor": received, "anchor_buffers": {},
        **term.remember(previous, {}, data),
    }  # fmt: skip
    out = model(now, {}, data.x)
    return term(View(model, now, out, whole(data), context))


def test_the_loss_is_the_equation(mlp: Model) -> None:
    now, received, previous = models(mlp, 3)
    x = make_clients()[1].x.double()
    z, z_g, z_p = (mlp(p, {}, x)["features"] for p in (now, received, previous))
    up, down = (torch.exp(F.cosine_similarity(z, other) / 0.7) for other in (z_g, z_p))
    expected = 1.3 * -torch.log(up / (up + down)).mean()
    got = contrast(mlp, Contrastive(1.3, 0.7), now, received, previous)
    assert float((got - expected).abs()) < 1e-14
    assert float((contrast(mlp, Contrastive(1.3, 0.5), now, received, previous) - got).abs()) > 1e-4


def test_equal_models_give_log_two(mlp: Model) -> None:
    now, received, previous = models(mlp, 3)
    got = contrast(mlp, Contrastive(), now, received, received)
    assert float(got) == pytest.approx(math.log(2), abs=1e-15)
    assert abs(float(contrast(mlp, Contrastive(), now, received, previous)) - math.log(2)) > 1e-3


def test_swapping_the_models_negates_the_difference(mlp: Model) -> None:
    """l - l' = -d/tau for l = log(1 + e^{-d/tau}) and l' = log(1 + e^{d/tau}), per example."""
    now, received, previous = models(mlp, 3)
    x = make_clients()[1].x.double()
    z, z_g, z_p = (mlp(p, {}, x)["features"] for p in (now, received, previous))
    d = F.cosine_similarity(z, z_g) - F.cosine_similarity(z, z_p)
    one = contrast(mlp, Contrastive(tau=0.5), now, received, previous)
    two = contrast(mlp, Contrastive(tau=0.5), now, previous, received)
    assert float((one - two + (d / 0.5).mean()).abs()) < 1e-14
    assert abs(float(one - two)) > 1e-3


def test_gradient_against_finite_differences(mlp: Model) -> None:
    now, received, previous = models(mlp, 3)
    name = "body.1.weight"
    leaf = now[name].clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        contrast(mlp, Contrastive(), now | {name: leaf}, received, previous), leaf
    )
    source, h = generator(0, "directions"), 1e-6
    for _ in range(4):
        way = torch.randn(leaf.shape, generator=source, dtype=torch.float64)
        ends = [
            contrast(mlp, Contrastive(), now | {name: now[name] + s * h * way}, received, previous)
            for s in (1, -1)
        ]
        slope = float((ends[0] - ends[1]) / (2 * h))
        assert slope == pytest.approx(float((grad * way).sum()), rel=1e-6, abs=1e-9)
    assert grad.norm() > 1e-3


def test_no_gradient_reaches_the_other_models(mlp: Model) -> None:
    now, received, previous = models(mlp, 3)
    watched = {k: v.requires_grad_() for k, v in received.items()}
    moving = {k: v.requires_grad_() for k, v in now.items()}
    loss = contrast(mlp, Contrastive(), moving, watched, previous)
    grads = torch.autograd.grad(loss, [*watched.values()], allow_unused=True)
    assert all(g is None for g in grads)


def test_other_models_are_used_in_evaluation_mode_with_their_own_buffers(normed: Model) -> None:
    """z_g and z_p depend on those models' running statistics, and change no statistics."""
    federation = make_federation(normed)
    data = federation.clients[3]
    params, buffers = federation.params, federation.buffers
    term = Contrastive()
    other = {k: v + 2 if v.is_floating_point() else v for k, v in buffers.items()}

    def loss(previous: Params) -> tuple[Tensor, Params]:
        context = {
            "anchor": params,
            "anchor_buffers": buffers,
            **term.remember(params, previous, data),
        }
        before = {k: v.clone() for k, v in previous.items()}
        out, after = normed.train(params, buffers, data.x)
        value = term(View(normed, params, out, whole(data), context))
        assert all(torch.equal(previous[k], v) for k, v in before.items())
        return value, after

    same_, after = loss(buffers)
    assert float(same_) == pytest.approx(math.log(2), abs=1e-6)
    assert abs(float(loss(other)[0]) - math.log(2)) > 1e-3
    _, plain = normed.train(params, buffers, data.x)
    assert max_difference(after, plain) == 0
    z = normed(params, buffers, data.x)["features"]
    assert not torch.equal(z, normed.train(params, buffers, data.x)[0]["features"])


def test_the_previous_model_is_the_clients_own_last_one(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.moon(setting), federated()
    rounds = list(run(algorithm, federation, 3, cohort=2))
    seen = set()
    for before, played in pairwise(rounds):
        for i in played.trained:
            previous = played.states[i]["previous"]
            assert max_difference(previous, federation.params) > 1e-3
            assert max_difference(previous, played.server["params"]) > 1e-4
            seen.add(i)
        for i in set(before.states) - set(played.trained):
            assert max_difference(played.states[i]["previous"], before.states[i]["previous"]) == 0
    never = set(range(6)) - seen - set(rounds[0].trained)
    assert never
    fresh = algorithm.init_client(federation.params, {}, federation.clients[min(never)])
    assert max_difference(fresh["previous"], federation.params) == 0


def test_features_that_are_zero_or_images_are_no_problem(mlp: Model) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            z = self.w * x[:, :, None, None]
            return {"features": z, "logits": z.sum((2, 3))}

    model = Model(Fixed())
    params, _ = model.init()
    data = client_data(torch.ones(3, 2), torch.zeros(3).long(), 0)
    context = {"anchor": params, "anchor_buffers": {}, **Contrastive().remember(params, {}, data)}
    result = gradient_of(model, Contrastive(), {}, {}, whole(data), context)(params)
    assert float(result.loss) == pytest.approx(math.log(2))
    assert torch.isfinite(result.grad["w"]).all()


@pytest.mark.slow
def test_moon_compares_the_projection(setting: Setting) -> None:
    """With a head the term is that of z, without one that of the features: other rounds."""
    makers = {
        "with": lambda: projected_mlp((FEATURES,), (10,), CLASSES, out=6),
        "without": lambda: Mlp((FEATURES,), (10,), CLASSES),
    }
    for name, make in makers.items():
        model = build(make, seed=1)
        s = Setting(model, TARGET, setting.local)
        federation = make_federation(model)
        plain, moon = recipes.fedavg(s), recipes.moon(s, mu=1.0)
        for rounds, equal in ((1, True), (2, False)):
            a, b = (final(m, federation, rounds).server["params"] for m in (plain, moon))
            assert (max_difference(a, b) == 0) == equal, name
        moved = final(moon, federation, 2).server["params"]
        assert all(max_difference({k: v}, {k: federation.params[k]}) > 0 for k, v in moved.items())


class Plain(nn.Module):
    """A network that returns logits only."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def test_uniform_averages_are_of_moon(setting: Setting, federated: Any) -> None:
    """As the MADE/MOON report has them; nothing else differs from `moon`."""
    uniform = recipes.moon_uniform(setting, mu=0.3, tau=0.7)
    plain = recipes.moon(setting, mu=0.3, tau=0.7)
    server = start(uniform, federated()).server
    assert uniform.weigh(server, torch.arange(6)).tolist() == [1 / 6] * 6
    assert replace(uniform, combine=plain.combine) == plain


def test_a_model_without_features_is_refused() -> None:
    model = build(Plain, seed=0)
    algorithm = recipes.moon(Setting(model, TARGET))
    message = r"\"features\", and th.* model returns \['logits'\]; let its forward return"
    with pytest.raises(InputError, match=message):
        algorithm.client_update(*one_job(algorithm, make_federation(model))[1:5])
    with pytest.raises(InputError, match=message):  # before round 1
        run(algorithm, make_federation(model), 1)


def test_moon_settings_out_of_range_are_refused(setting: Setting) -> None:
    with pytest.raises(InputError, match=r"MOON's mu must be a number of 0 or more .*got -1"):
        recipes.moon(setting, mu=-1.0)
    with pytest.raises(InputError, match=r"Contrastive tau must be a positive number, got 0"):
        recipes.moon(setting, tau=0.0)
