"""FedDecorr: its value by numpy, its gradient, and when it is FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.client.decorrelation import Decorrelation
from fedshift.client.objectives import View
from fedshift.data import Batch
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import generator
from support.comparing import same
from support.federations import CLASSES, FEATURES, make_federation


def batch_of(w: Tensor, size: float) -> Batch:
    n = len(w)
    labels = torch.zeros(n, dtype=torch.int64)
    return Batch(torch.zeros(n, 1), labels, w, torch.arange(n), torch.tensor(size))


def value(term: Decorrelation, model: Model, features: Tensor, w: Tensor | None = None) -> Tensor:
    ones = torch.ones(len(features), dtype=torch.float64)
    weights = ones if w is None else w
    batch = batch_of(weights, float((weights != 0).sum()))
    return term(View(model, {}, {"features": features, "logits": features}, batch, {}))


def drawn(n: int, d: int) -> Tensor:
    """Features that depend on one another, of unequal scales and means."""
    source = generator(0, "features")
    mixing = torch.randn(d, d, generator=source, dtype=torch.float64)
    draws = torch.randn(n, d, generator=source, dtype=torch.float64)
    return draws @ mixing * torch.linspace(0.5, 3.0, d) + torch.arange(d)


@pytest.mark.parametrize(("n", "d"), [(30, 6), (5, 9)])  # either product of the two
def test_the_value_is_that_of_numpys_correlations(mlp: Model, n: int, d: int) -> None:
    z = drawn(n, d)
    r = np.corrcoef(z.numpy(), rowvar=False)
    expected = 0.3 * (r**2).sum() / d**2
    assert float(value(Decorrelation(0.3), mlp, z)) == pytest.approx(expected, rel=1e-7)
    beside = (r**2).sum() - d
    by_code = 0.3 * (n - 1) ** 2 / n * beside / (d * (d - 1))
    assert float(value(Decorrelation(0.3, "code"), mlp, z)) == pytest.approx(by_code, rel=1e-6)


def test_code_is_what_the_authors_compute(mlp: Model) -> None:
    """Their steps: standard deviations of n - 1, a product that nothing divides, a mean by n."""
    z = drawn(20, 5)
    x = (z - z.mean(0)) / z.std(0)
    product = x.T @ x
    beside = product[~torch.eye(5, dtype=torch.bool)]
    assert float(value(Decorrelation(1.0, "code"), mlp, z)) == pytest.approx(
        float((beside**2).mean() / 20), rel=1e-7
    )


def test_bounds(mlp: Model) -> None:
    """beta if all features are the same, beta/d if they are uncorrelated."""
    one = 10 * drawn(12, 1)
    assert float(value(Decorrelation(0.5), mlp, one.expand(12, 4))) == pytest.approx(0.5, rel=1e-6)
    apart = torch.linalg.qr(drawn(12, 4) - drawn(12, 4).mean(0))[0]  # orthogonal, of mean 0
    assert float(value(Decorrelation(0.5), mlp, apart)) == pytest.approx(0.5 / 4, rel=1e-6)
    assert float(value(Decorrelation(0.5, "code"), mlp, apart)) == pytest.approx(0, abs=1e-9)


def test_scales_and_means_of_features_do_not_matter(mlp: Model) -> None:
    z = drawn(15, 5)
    moved = z * torch.tensor([3.0, -1.0, 0.5, 9.0, 2.0]) + 7
    one, two = (float(value(Decorrelation(), mlp, v)) for v in (z, moved))
    assert one == pytest.approx(two, rel=1e-7)
    assert float(value(Decorrelation(), mlp, z @ drawn(5, 5))) != pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("scale", ["paper", "code"])
@pytest.mark.parametrize(("n", "d"), [(12, 4), (4, 7)])
def test_gradient_against_finite_differences(mlp: Model, scale: Any, n: int, d: int) -> None:
    z, term = drawn(n, d).requires_grad_(), Decorrelation(2.0, scale)
    assert torch.autograd.gradcheck(lambda v: value(term, mlp, v), z)
    (grad,) = torch.autograd.grad(value(term, mlp, z), z)
    assert grad.norm() > 1e-3


def test_padding_and_importances(mlp: Model) -> None:
    """In the correlations, rows of weight 0 are absent and one of weight 2 counts twice."""
    z = drawn(8, 3)
    plain = value(Decorrelation(), mlp, z[:6])
    padded = value(Decorrelation(), mlp, z, torch.tensor([1.0] * 6 + [0.0] * 2).double())
    assert float((plain - padded).abs()) < 1e-15
    twice = value(Decorrelation(), mlp, torch.cat([z, z[:1]]))
    heavy = value(Decorrelation(), mlp, z, torch.tensor([2.0] + [1.0] * 7).double())
    assert float((twice - heavy).abs()) < 1e-15
    assert float((twice - value(Decorrelation(), mlp, z)).abs()) > 1e-4


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_one_example_or_a_dead_feature_gives_numbers(mlp: Model, scale: Any) -> None:
    term = Decorrelation(1.0, scale)
    for z in (drawn(1, 4), torch.zeros(6, 4).double(), drawn(6, 4) * torch.tensor([1.0, 0, 1, 1])):
        leaf = z.clone().requires_grad_()
        got = value(term, mlp, leaf)
        (grad,) = torch.autograd.grad(got, leaf)
        assert torch.isfinite(got)
        assert torch.isfinite(grad).all()
    assert float(value(term, mlp, drawn(1, 4))) == 0
    assert float(value(term, mlp, 10 * drawn(6, 1))) == pytest.approx(float(scale == "paper"))


def test_beta_zero_is_fedavg(setting: Setting, federated: Any) -> None:
    plain = recipes.fedavg(setting)
    assert recipes.feddecorr(setting, beta=0.0) == plain
    assert same(recipes.feddecorr(setting, beta=0.0), plain, federated()) == 0
    assert same(recipes.feddecorr(setting), plain, federated()) > 1e-5


def test_without_hidden_layers_it_is_fedavg(setting: Setting) -> None:
    """The features are the inputs, which training does not move."""
    gaps = []
    for hidden in ((), (10,)):
        model = build(lambda h=hidden: Mlp((FEATURES,), h, CLASSES), seed=1)
        here = replace(setting, model=model)
        decorrelated = recipes.feddecorr(here, beta=2.0)
        gaps.append(same(decorrelated, recipes.fedavg(here), make_federation(model)))
    assert gaps[0] == 0
    assert gaps[1] > 1e-3


def test_settings_out_of_range_are_refused(setting: Setting) -> None:
    with pytest.raises(InputError, match=r"FedDecorr's beta must be a number of 0 or more"):
        recipes.feddecorr(setting, beta=-0.1)
    with pytest.raises(InputError, match='"papr".*Did you mean "paper"'):
        recipes.feddecorr(setting, scale="papr")  # type: ignore[arg-type]
