"""FedNTD: its equation, its gradient, and when it is FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.distilling import NotTrueDistillation, distilled
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.data import Batch, ClientData, client_data, register
from fedshift.engine.run import Federation
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.tree import Params
from support.by_hand import final, max_difference
from support.comparing import same, whole
from support.federations import CLASSES, FEATURES, make_clients, make_federation


def both(model: Model) -> list[Params]:
    """The model's parameters with two draws of noise, in float64: in training, and received."""
    source = generator(0, "two models")
    params, _ = model.init()
    return [
        {k: v.double() + 0.5 * torch.randn(v.shape, generator=source) for k, v in params.items()}
        for _ in range(2)
    ]


def a_client() -> ClientData:
    """Labels 1, 2 and 3 of 5, in float64."""
    data = make_clients()[1]
    return data._replace(x=data.x.double(), w=data.w.double())


def view_of(model: Model, now: Params, received: Params, batch: Batch, logits: Tensor) -> View:
    context = {"anchor": received, "anchor_buffers": {}}
    return View(model, now, {"logits": logits}, batch, context)


def with_gradient(term: Term, model: Model) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(value, its gradient by the logits, the logits, those of the model received, the labels)."""
    (now, received), data = both(model), a_client()
    z, given = (model(p, {}, data.x)["logits"].detach() for p in (now, received))
    leaf = z.clone().requires_grad_()
    value = term(view_of(model, now, received, whole(data), leaf))
    (grad,) = torch.autograd.grad(value, leaf)
    return value.detach(), grad, z, given, data.y


def shares_of_others(z: Tensor, y: Tensor, tau: float) -> Tensor:
    """The softmax of the other labels [n, K], with 0 for the label: exp and a quotient."""
    e = torch.exp(z / tau) * (1 - F.one_hot(y, z.shape[1]))
    return e / e.sum(1, keepdim=True)


def test_the_loss_is_the_divergence_of_the_other_labels(mlp: Model) -> None:
    value, _, z, given, y = with_gradient(NotTrueDistillation(1.3, 0.7), mlp)
    q, teacher = (shares_of_others(logits, y, 0.7) for logits in (z, given))
    others = F.one_hot(y, CLASSES) == 0
    expected = 1.3 * (teacher[others] * (teacher[others] / q[others]).log()).sum() / len(y)
    assert float((value - expected).abs()) < 1e-14
    assert expected > 1e-3
    assert abs(float(with_gradient(NotTrueDistillation(1.3, 1.4), mlp)[0] - expected)) > 1e-4


def test_the_gradient_is_the_difference_of_the_shares(mlp: Model) -> None:
    """beta/(B tau) (q - q^g), and exactly 0 for an example's label."""
    _, grad, z, given, y = with_gradient(NotTrueDistillation(1.3, 0.7), mlp)
    difference = shares_of_others(z, y, 0.7) - shares_of_others(given, y, 0.7)
    assert float((grad - 1.3 / 0.7 / len(y) * difference).abs().max()) < 1e-15
    assert not grad[torch.arange(len(y)), y].any()
    assert grad.abs().max() > 1e-3


def test_labels_that_are_left_out_may_be_far_away(mlp: Model) -> None:
    """Neither a huge logit of the label nor an empty choice of labels gives NaN."""
    (now, received), data = both(mlp), a_client()
    z = mlp(now, {}, data.x)["logits"].detach()
    far = (z + 1e6 * F.one_hot(data.y, CLASSES)).requires_grad_()
    view = view_of(mlp, now, received, whole(data), far)
    value = NotTrueDistillation()(view)
    near = NotTrueDistillation()(view_of(mlp, now, received, whole(data), z))
    assert float((value - near).detach().abs()) < 1e-14
    for few in (0, 1):  # no label, and one
        mask = torch.arange(CLASSES) < few
        none = distilled(view, mask, 1.0)
        (grad,) = torch.autograd.grad(none.sum(), far)
        assert not none.any()
        assert not grad.any()
    assert distilled(view, torch.arange(CLASSES) < 2, 1.0).any()


def test_beta_zero_is_fedavg(setting: Setting, federated: Any) -> None:
    plain = recipes.fedavg(setting)
    assert recipes.fedntd(setting, beta=0.0) == plain
    assert same(recipes.fedntd(setting, beta=0.0), plain, federated()) == 0
    assert same(recipes.fedntd(setting), plain, federated()) > 1e-4


def test_with_two_labels_it_is_fedavg() -> None:
    """One other label has the share 1 whatever its logit."""
    gaps = []
    for classes in (2, 3):
        model = build(lambda k=classes: Mlp((FEATURES,), (10,), k), seed=1)
        clients = [client_data(c.x, c.y % classes, i) for i, c in enumerate(make_clients())]
        federation = Federation(clients, *model.init(), register(clients, classes), Seeds.of(0))
        target = tuple([1 / classes] * classes)
        setting = Setting(model, target)
        gaps.append(same(recipes.fedntd(setting), recipes.fedavg(setting), federation))
    assert gaps[0] == 0
    assert gaps[1] > 1e-5


def test_at_the_model_received_it_does_not_pull(mlp: Model) -> None:
    """Both models agree there, so that value and gradient are 0 but for rounding."""
    received, data = both(mlp)[1], a_client()
    z = mlp(received, {}, data.x)["logits"].detach().requires_grad_()
    value = NotTrueDistillation()(view_of(mlp, received, received, whole(data), z))
    (grad,) = torch.autograd.grad(value, z)
    assert float(value.detach().abs()) == 0
    assert float(grad.abs().max()) < 1e-16


def test_a_strong_pull_keeps_the_shares_of_the_other_labels(
    setting: Setting, federated: Any
) -> None:
    """Its purpose: how the server's model distinguishes labels that a client lacks."""
    federation = federated()

    def moved(algorithm: Any) -> float:
        after = final(algorithm, federation, 1).server["params"]
        x, y = federation.clients[1].x, federation.clients[1].y
        before, now = (
            shares_of_others(setting.model(p, {}, x)["logits"], y, 1.0)
            for p in (federation.params, after)
        )
        return float((before - now).abs().mean())

    assert moved(recipes.fedntd(setting, beta=5.0)) < 0.7 * moved(recipes.fedavg(setting))


def test_the_model_received_is_used_in_evaluation_mode(normed: Model) -> None:
    """Its running statistics matter, none change, and no gradient reaches it."""
    federation = make_federation(normed)
    data, params, buffers = federation.clients[3], federation.params, federation.buffers
    watched = {k: v.clone().requires_grad_() for k, v in params.items()}
    values = []
    for shift in (0, 2):
        other = {k: v + shift if v.is_floating_point() else v for k, v in buffers.items()}
        before = {k: v.clone() for k, v in other.items()}
        out, _ = normed.train(params, buffers, data.x)
        context = {"anchor": watched, "anchor_buffers": other}
        value = NotTrueDistillation()(View(normed, params, out, whole(data), context))
        assert not value.requires_grad
        assert max_difference(before, other) == 0
        values.append(float(value))
    assert abs(values[0] - values[1]) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": -0.5}, r"FedNTD's beta must be a number of 0 or more \(0 is FedAvg\), got -0\.5"),
        ({"beta": float("nan")}, "FedNTD's beta must be"),
        ({"tau": 0.0}, "NotTrueDistillation tau must be a positive number, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(
    setting: Setting, options: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        recipes.fedntd(setting, **options)


def test_a_sum_with_it_reads_classes() -> None:
    assert (CrossEntropy() + NotTrueDistillation()).reads_classes()
    assert not (CrossEntropy() + 0.0 * NotTrueDistillation()).reads_classes()
    assert not CrossEntropy().reads_classes()
