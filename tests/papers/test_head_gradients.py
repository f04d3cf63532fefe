"""FedDRM's Figure 3: gradients of the two heads on a random embedding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedshift_papers.pictures.head_gradients import BATCH, Embedded, embed, gradient, spread, train

RNG = np.random.default_rng(0)


def clients(count: int = 3, n: int = 40) -> list[Embedded]:
    images = [RNG.normal(0.2 * i, 1.0, (n + 10 * i, 12)) for i in range(count)]
    labels = [RNG.integers(0, 4, len(x)) for x in images]
    return embed(images, labels, 0, width=8)


def test_the_gradient_is_autograds() -> None:
    one = clients()[0]
    head = RNG.normal(size=(9, 4))
    leaf = torch.tensor(head, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.tensor(one.f) @ leaf, torch.tensor(one.y))
    loss.backward()
    assert leaf.grad is not None
    assert np.abs(gradient(head, one.f, one.y) - leaf.grad.numpy()).max() < 1e-12
    assert np.abs(gradient(head, one.f, (one.y + 1) % 4) - leaf.grad.numpy()).max() > 1e-2


def test_spread_by_hand() -> None:
    g, w = np.array([[1.0, 2.0]]), np.array([0.25, 0.75])
    same = spread([g, g], w)
    assert same == pytest.approx((0.0, 0.0, 1.0))
    opposite = spread([3 * g, -g], w)  # their weighted sum is 0
    assert (opposite.share, opposite.cosine) == pytest.approx((1.0, -1.0))
    assert opposite.drift == pytest.approx(0.25 * 9 * 5 + 0.75 * 5)
    assert math.isnan(spread([0 * g, 0 * g], w).share)


def test_the_embedding_is_scaled_and_fixed() -> None:
    some = clients()
    norms = np.concatenate([(c.f[:, :-1] ** 2).sum(1) for c in some])
    assert norms.mean() == pytest.approx(1.0)
    assert all((c.f[:, -1] == 1).all() for c in some)
    images, labels = [RNG.normal(size=(5, 3))], [np.zeros(5, np.int64)]
    first, again, other = (embed(images, labels, seed)[0].f for seed in (0, 0, 1))
    assert (first == again).all()
    assert not (first == other).all()


def test_equal_clients_agree_on_classes_and_not_on_clients() -> None:
    """A client sees one client label only: at equal data these gradients cancel."""
    one = clients()[0]
    twins = [replace(one, client=i) for i in range(3)]
    spreads = train(twins, 4, 1, 0)
    assert spreads["class"][0].share < 1e-12
    assert spreads["client"][0].share == pytest.approx(1.0)


def test_training_goes_downhill() -> None:
    some = clients()
    spreads = train(some, 4, 30, 0)
    assert [len(s) for s in spreads.values()] == [30, 30]
    for one in spreads.values():
        # sum_i w_i ||g_i||^2 minus the drift is ||g||^2, the squared gradient of the whole loss.
        whole = [s.drift / s.share - s.drift for s in one]
        assert whole[-1] < 0.2 * whole[0]
    assert train(some, 4, 2, 0) == train(some, 4, 2, 0)
    # Of fewer examples than BATCH each batch is all, and seeds would differ in their order alone.
    many = clients(n=2 * BATCH)
    one, other = (train(many, 4, 2, seed)["class"][1] for seed in (0, 1))
    assert max(abs(one.share - other.share), abs(one.cosine - other.cosine)) > 1e-3
