"""The MADE of mixtures: a density of real vectors, compared with scipy's Gaussians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.made import LEAST_SCALE, MixtureMade, degrees
from fedshift.seeds import generator
from fedshift.tree import Params


def mixture(inputs: int, hidden: tuple[int, ...] = (20,), **more: Any) -> Model:
    return build(lambda: MixtureMade((inputs,), hidden, seed=3, **more), 1)


def loud(model: Model) -> Params:
    source = generator(0, "loud")
    return {
        k: torch.randn(v.shape, generator=source, dtype=torch.float64)
        for k, v in model.init()[0].items()
    }


def log_density(model: Model, params: Params, *x: float) -> float:
    return float(model(params, {}, torch.tensor([x], dtype=torch.float64))["log_density"])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-3.0, 5.0)])
@pytest.mark.parametrize("components", [1, 4])
def test_the_likelihood_is_the_mixtures_of_scipy(low: float, high: float, components: int) -> None:
    """log q(x) = sum_d log sum_k pi_dk N(u_d; m_dk, s_dk^2) 2 / (high - low)."""
    model = mixture(3, low=low, high=high, components=components)
    params = loud(model)
    x = torch.randn(7, 3, dtype=torch.float64, generator=generator(1, "x"))
    u = (2 * x - low - high) / (high - low)
    outputs = model.net.body  # type: ignore[union-attr]
    raw = torch.func.functional_call(
        outputs, {k.removeprefix("body."): v for k, v in params.items()}, (u,)
    ).view(7, 3, 3, components)  # type: ignore[operator]
    pi = raw[:, :, 0].softmax(-1).numpy()
    scale = LEAST_SCALE + np.log1p(np.exp(raw[:, :, 2].numpy()))
    each = pi * norm.pdf(u.numpy()[..., None], raw[:, :, 1].numpy(), scale) * 2 / (high - low)
    got = model(params, {}, x)
    assert np.abs(got["log_density"].numpy() - np.log(each.sum(-1)).sum(1)).max() < 1e-10
    assert np.abs(got["logits"].numpy() - (pi * raw[:, :, 1].numpy()).sum(-1)).max() < 1e-12
    # The control: without the factor of the range it is another density.
    bare = np.log((each * (high - low) / 2).sum(-1)).sum(1)
    assert (np.abs(got["log_density"].numpy() - bare).max() > 1e-3) == (high - low != 2)


@pytest.mark.slow
def test_it_integrates_to_one() -> None:
    """By the trapezoidal rule, over one input and over two."""
    line, plane = mixture(1, low=-2.0, high=3.0), mixture(2, hidden=(6,), components=2)
    wide, narrow = (
        torch.linspace(-v, v, n, dtype=torch.float64) for v, n in ((60, 60001), (12, 1201))
    )
    q = line(loud(line), {}, wide[:, None])["log_density"].exp()
    assert float(torch.trapezoid(q, wide)) == pytest.approx(1.0, abs=1e-6)
    params = {k: v / 4 for k, v in loud(plane).items()}
    q = plane(params, {}, torch.cartesian_prod(narrow, narrow))["log_density"].exp()
    rows = torch.trapezoid(q.view(1201, 1201), narrow)
    assert float(torch.trapezoid(rows, narrow)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("ordering", ["natural", "random"])
def test_an_inputs_mixture_hears_those_before_it_alone(ordering: str) -> None:
    model = mixture(5, (30, 30), ordering=ordering)
    params = loud(model)
    x = torch.randn(1, 5, dtype=torch.float64, generator=generator(2, "x"))

    def outputs(v: Tensor) -> Tensor:
        return model(params, {}, v)["logits"][0]

    jacobian = torch.autograd.functional.jacobian(outputs, x)[:, 0]
    order = degrees(5, (30, 30), ordering, 3)[0]  # type: ignore[arg-type]
    later = torch.from_numpy(order[None, :] >= order[:, None])
    assert not bool(jacobian[later].any())
    assert bool(jacobian[~later].any())


def test_nothing_is_clipped() -> None:
    model = mixture(1)
    params = loud(model)
    assert log_density(model, params, 40.0) < log_density(model, params, 20.0) < -20.0


def test_what_cannot_be_a_mixture_is_refused() -> None:
    with pytest.raises(InputError, match="components = 0; a mixture has 1 or more"):
        MixtureMade((3,), components=0)
    with pytest.raises(InputError, match="low must be below high"):
        MixtureMade((3,), low=1.0)
