"""FedRS: its equations, and when it is FedAvg; and terms composed with FedPALS."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Gradient, gradient_of
from fedshift.client.objectives import (
    Contrastive,
    CrossEntropy,
    Proximal,
    RestrictedSoftmax,
    Term,
    View,
)
from fedshift.data import ClientData, client_data, label_counts
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.tree import Parts
from support.comparing import whole
from support.federations import CLASSES, FEATURES, make_clients, make_federation, one_job


def head_gradient(term: Term, context: Parts, data: ClientData) -> Gradient:
    model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)
    params = {k: v.double() for k, v in model.init()[0].items()}
    return gradient_of(model, term, {}, {}, whole(data), context)(params)


def test_missing_rows_move_alpha_times_as_much() -> None:
    """d/dw_c = a_c * (the softmax gradient at the scaled logits), for weight and bias."""
    data = make_clients()[1]
    data = data._replace(x=data.x.double(), w=data.w.double())
    missing = label_counts(data, CLASSES) == 0
    assert missing.sum() == 2
    term = RestrictedSoftmax(CLASSES, 0.3)
    memory = term.remember({}, {}, data)
    grad = head_gradient(term, memory, data).grad

    model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)
    params = {k: v.double() for k, v in model.init()[0].items()}
    out = model(params, {}, data.x)
    scaled = out["logits"] * memory["softmax"]["scale"]
    error = (F.softmax(scaled, 1) - F.one_hot(data.y, CLASSES)) / len(data.y)
    at_scaled = error.T @ out["features"]
    scale = torch.ones(CLASSES).double().masked_fill(missing, 0.3)  # 0.3 is no float32
    assert torch.equal(memory["softmax"]["scale"], scale)
    assert float((grad["head.weight"] - scale[:, None] * at_scaled).abs().max()) < 1e-15
    assert float((grad["head.bias"] - scale * error.sum(0)).abs().max()) < 1e-15
    assert float((grad["head.weight"] - at_scaled).abs().max()) > 1e-3


def test_alpha_zero_leaves_missing_rows(setting: Setting, federated: Any) -> None:
    federation = federated()
    algorithm = recipes.fedrs(setting, alpha=0.0)
    missing = label_counts(federation.clients[1], CLASSES) == 0
    delta = algorithm.client_update(*one_job(algorithm, federation)[1:5])[0]["delta"]
    assert not delta["head.weight"][missing].any()
    assert not delta["head.bias"][missing].any()
    assert delta["head.weight"][~missing].abs().min() > 0
    plain = recipes.fedavg(setting)
    free = plain.client_update(*one_job(plain, federation)[1:5])[0]["delta"]
    assert free["head.weight"][missing].abs().max() > 1e-3


def test_a_missing_class_keeps_its_mass() -> None:
    """alpha = 0 makes the logit 0, which is exp(0) of the partition and not a mask."""
    term = RestrictedSoftmax(2, 0.0)
    data = client_data(torch.zeros(1, 1), torch.tensor([0]), 0)
    out = {"logits": torch.tensor([[2.0, 7.0]])}
    view = View(Model(nn.Identity()), {}, out, whole(data), term.remember({}, {}, data))
    assert float(term(view)) == pytest.approx(math.log(math.exp(2) + 1) - 2, abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: FedAvg(m, objective=Proximal(0.1)),
        lambda m: FedAvg(m, objective=2.0 * (Proximal(0.1) + Proximal(0.2))),
        lambda m: FedAvg(m, objective=0.0 * CrossEntropy() + Proximal(0.1)),
        lambda m: Ditto(FedAvg(m), objective=Proximal(0.1)),
        lambda m: Ditto(FedAvg(m, objective=Proximal(0.1))),
    ],
)
def test_an_objective_without_a_loss_is_refused(make: Callable[[Model], Any], mlp: Model) -> None:
    with pytest.raises(InputError, match=r"does not depend on the clients' examples.*CrossEntropy"):
        next(run(make(mlp), make_federation(mlp), 1))


def test_an_objective_with_one_is_let_through(mlp: Model) -> None:
    objective = CrossEntropy() + 0.5 * Proximal(0.1)
    next(run(FedAvg(mlp, objective=objective), make_federation(mlp), 1))
    assert Contrastive().reads_data()
    assert not Proximal(0.1).reads_data()
