"""FedETF and FedGELA: their losses, when they are FedAvg, and what they do not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.local import gradient_of
from fedshift.client.objectives import CrossEntropy, View
from fedshift.client.shares import ShareScaled
from fedshift.data import ClientData, client_data, label_counts
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.etf import with_etf
from fedshift.recipes import Setting
from fedshift.seeds import generator
from support.by_hand import final
from support.comparing import same, whole
from support.federations import CLASSES, FEATURES, make_clients, make_federation


@pytest.fixture
def etf(setting: Setting) -> Setting:
    """The setting with an ETF as classifier."""
    model = build(lambda: with_etf(Mlp((FEATURES,), (10,), CLASSES)), seed=1)
    return replace(setting, model=model)


def balanced_clients(sizes: tuple[int, ...]) -> tuple[ClientData, ...]:
    """Clients that have equally many examples of every class."""
    source = generator(0, "balanced")
    return tuple(
        client_data(torch.randn(n, FEATURES, generator=source), torch.arange(n) % CLASSES, i)
        for i, n in enumerate(sizes)
    )


def frozen_scale(etf: Setting) -> Setting:
    return replace(etf, local=replace(etf.local, frozen=("head.scale",)))


def test_equal_counts_are_fedavg_but_for_rounding(etf: Setting) -> None:
    federation = make_federation(etf.model, balanced_clients((10, 25, 15)))
    assert same(recipes.fedetf(etf), recipes.fedavg(etf), federation) < 1e-5
    skewed = make_federation(etf.model, make_clients())
    assert same(recipes.fedetf(etf), recipes.fedavg(etf), skewed) > 1e-2


def test_the_temperature_is_trained_under_fedetf_alone(etf: Setting) -> None:
    federation = make_federation(etf.model)
    first = federation.params["head.scale"]
    moved = final(recipes.fedetf(etf), federation).server["params"]
    assert not torch.equal(moved["head.scale"], first)
    assert torch.equal(moved["head.weight"], federation.params["head.weight"])


def test_equal_shares_are_fedavg_of_a_fixed_temperature(etf: Setting) -> None:
    federation = make_federation(etf.model, balanced_clients((10, 25, 15)))
    plain = recipes.fedavg(frozen_scale(etf))
    assert same(recipes.fedgela(etf), plain, federation) == 0
    assert same(recipes.fedgela(etf), recipes.fedavg(etf), federation) > 1e-5
    skewed = make_federation(etf.model, make_clients())
    assert same(recipes.fedgela(etf), plain, skewed) > 1e-3


def test_scaled_logits_are_a_classifier_with_scaled_rows(etf: Setting) -> None:
    """The gradient of the body is cross-entropy's under rows K S_c v_c."""
    model: Model = etf.model
    data = make_clients()[1]
    data = data._replace(x=data.x.double(), w=data.w.double())
    params = {k: v.double() for k, v in model.init()[0].items()}
    term = ShareScaled(CLASSES)
    memory = term.remember(params, {}, data)
    shares = label_counts(data, CLASSES) / len(data.y)
    assert torch.equal(memory["labels"]["counts"], label_counts(data, CLASSES))
    rows = params | {"head.weight": CLASSES * shares[:, None] * params["head.weight"]}
    names = [k for k in params if k.startswith(("body.", "head.project."))]

    def grad(objective: Any, at: dict[str, torch.Tensor], context: Any) -> dict[str, torch.Tensor]:
        moving = {k: at[k] for k in names}
        frozen = {k: v for k, v in at.items() if k not in names}
        return gradient_of(model, objective, frozen, {}, whole(data), context)(moving).grad

    one, two = grad(term, params, memory), grad(CrossEntropy(), rows, {})
    assert max(float((one[k] - two[k]).abs().max()) for k in names) < 1e-14
    plain = grad(CrossEntropy(), params, {})
    assert max(float((one[k] - plain[k]).abs().max()) for k in names) > 1e-3


def test_a_missing_label_has_the_logit_zero(mlp: Model) -> None:
    data = client_data(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]), 0)
    z = torch.tensor([[1.0, -2.0, 50.0]]).expand(4, 3)
    term = ShareScaled(3)
    memory = term.remember({}, {}, data)
    got = term(View(mlp, {}, {"logits": z}, whole(data), memory))
    scaled = torch.tensor([[2.25 * 1.0, 0.75 * -2.0, 0.0]]).expand(4, 3)
    assert float(got) == pytest.approx(float(F.cross_entropy(scaled, data.y)), rel=1e-6)


def test_directions_and_temperature_stay(etf: Setting) -> None:
    federation = make_federation(etf.model)
    after = final(recipes.fedgela(etf), federation).server["params"]
    for name in ("head.weight", "head.scale"):
        assert torch.equal(after[name], federation.params[name])
    assert not torch.equal(after["head.project.weight"], federation.params["head.project.weight"])


def test_shares_stay_with_the_client(etf: Setting) -> None:
    algorithm = recipes.fedgela(etf)
    assert algorithm.reveals()["register"] == "number of training examples, once"
    assert sorted(algorithm.reveals()) == sorted(recipes.fedavg(etf).reveals())
