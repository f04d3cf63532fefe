"""A correction in a network's last layer, or beside a network whose layer cannot take it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift.evaluation.corrected import Head, Shifted, head_of, shifted, written
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.server.prior import Correction

K, D = 4, 6


def correction(scale: float, bias: list[float]) -> Correction:
    return Correction(scale, np.array(bias), np.ones(len(bias), dtype=bool))


def exact(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers k/8, |k| <= 16: products and sums of a few of them are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator) / 8


def test_with_scale_1_logits_are_shifted_bit_for_bit() -> None:
    """The sum is exact here; elsewhere a bias is added before it is rounded, not after."""
    model = Model(nn.Linear(D, K))
    params, buffers = {"weight": exact((K, D), 0), "bias": exact((K,), 1)}, dict[str, Tensor]()
    x, moved = exact((50, D), 2), correction(1.0, [0.5, -2.25, 3.0, -0.125])
    head = head_of(model, params, buffers, (D,))
    assert head == Head("weight", "bias")
    z = model(params, buffers, x)["logits"]
    after = model(written(params, head, moved), buffers, x)["logits"]
    assert torch.equal(after, z + torch.tensor(moved.bias, dtype=torch.float32))
    assert torch.equal(after, shifted(z, moved))
    assert not torch.equal(after, z)
    assert written(params, head, moved)["weight"] is params["weight"]


@pytest.mark.parametrize("scale", [1.0, 0.37], ids=["shifted", "scaled and shifted"])
def test_a_trained_layer_gives_the_corrected_answers(scale: float) -> None:
    model = build(lambda: Mlp((1, 28, 28), (16,), 10), seed=0)
    params, buffers = model.init()
    x = torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    moved = correction(scale, list(np.linspace(-1.0, 1.0, 10)))
    head = head_of(model, params, buffers, (1, 28, 28))
    assert head == Head("head.weight", "head.bias")
    z = shifted(model(params, buffers, x)["logits"], moved)
    new = written(params, head, moved)
    after = model(new, buffers, x)["logits"]
    assert torch.allclose(after, z, rtol=0, atol=1e-5)
    assert torch.equal(after.argmax(1), z.argmax(1))
    # One row at a time, and the module of it, say the same.
    alone = torch.cat([model(new, buffers, row[None])["logits"] for row in x[:20]])
    assert torch.equal(alone.argmax(1), z[:20].argmax(1))
    assert torch.equal(model.loaded(new, buffers)(x)["logits"], after)


class Cooled(nn.Module):
    """Something follows the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) / 3.0


class Tied(nn.Module):
    """The last layer's weight is the first one's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(K, K), nn.Linear(K, K)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[:, :K]).relu())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(D, K, bias=False),
        lambda: nn.Sequential(nn.Linear(D, K), nn.ReLU(), nn.Linear(K, K, bias=False)),
        Cooled,
        Tied,
    ],
    ids=["no bias", "a bias before the last layer", "a temperature after it", "tied weights"],
)
def test_a_layer_that_cannot_take_it(make: type[nn.Module]) -> None:
    model = build(make, seed=0)
    params, buffers = model.init()
    x, moved = torch.randn(20, D), correction(0.5, [0.0, 1.0, -1.0, 2.0])
    assert head_of(model, params, buffers, (D,)) is None
    net = Shifted(model.loaded(params, buffers), moved)
    z = model(params, buffers, x)["logits"]
    assert torch.equal(net(x), shifted(z, moved))
    assert not torch.equal(net(x), z)


def test_a_network_that_gives_more_than_logits_keeps_it() -> None:
    model = build(lambda: Mlp((1, 28, 28), (16,), 10), seed=0)
    net = model.loaded(*model.init())
    x = torch.rand(3, 1, 28, 28)
    out = Shifted(net, correction(1.0, [1.0] * 10))(x)
    assert torch.equal(out["features"], net(x)["features"])
    assert torch.equal(out["logits"], net(x)["logits"] + 1.0)
