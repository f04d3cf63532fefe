"""Generated worlds: their true log ratios are those of their densities."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedshift.datasets import OwnClients, Wanted, load
from fedshift_papers.datasets import worlds

MAKERS = (worlds.binary_world, worlds.gaussian_world, worlds.looks_world)


def test_log_ratios_are_the_mean_density_over_the_clients_own() -> None:
    q = np.array([[0.5, 0.1, 0.3], [0.2, 0.2, 0.2]])
    for i in range(3):
        assert worlds.log_ratios(np.log(q), i) == pytest.approx(np.log(q.mean(1) / q[:, i]))


def test_the_bits_have_the_tilted_probabilities() -> None:
    """q_i sums to 1 over all 256 vectors, and each bit is 1 with probability 1 / (1 + e^-t)."""
    x = np.array(list(product((-1.0, 1.0), repeat=8)))
    q = np.exp(worlds.tilted_bits(x))
    assert q.sum(0) == pytest.approx(1.0)
    for i, tilt in enumerate((-0.9, 0.0, 0.9)):
        on = 1 / (1 + np.exp(-tilt))
        assert q[x[:, 3] == 1, i].sum() == pytest.approx(on)
        drawn = worlds.binary_world(Wanted(3, 5))
        assert drawn.data.train.x[drawn.parts[i]].gt(0).double().mean() == pytest.approx(
            on, abs=0.01
        )


def test_the_gaussians_are_scipys() -> None:
    x = np.random.default_rng(0).standard_normal((9, 4))
    expected = np.stack([norm.logpdf(x, m).sum(1) for m in (-0.5, 0.0, 0.5)], 1)
    assert worlds.shifted_gaussians(x) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("make", MAKERS)
def test_true_weights_have_mean_one_on_each_client(make: Callable[[Wanted], OwnClients]) -> None:
    """E_{q_i} p / q_i = 1, and p / q_i >= 1/3; the ratio of another client has another mean."""
    world = make(Wanted(3, 1))
    assert world.log_ratios is not None
    a = np.exp(world.log_ratios)
    assert a.min() >= 1 / 3 - 1e-12
    for rows in world.parts:
        spread = a[rows].std() / np.sqrt(len(rows))
        assert a[rows].mean() == pytest.approx(1.0, abs=4 * spread)
    assert np.exp(-world.log_ratios[world.parts[0]]).mean() > 1.2  # the control: upside down


def test_looks_have_the_shares_of_their_ratios() -> None:
    world = worlds.looks_world(Wanted(3, 0))
    assert world.log_ratios is not None
    shares = np.exp(-world.log_ratios) / 3  # of an image's look at its client
    assert sorted(set(shares.round(6))) == [0.05, 0.9]
    common = [float((shares[rows] > 0.5).mean()) for rows in world.parts]
    assert common == pytest.approx([0.9] * 3, abs=0.02)
    # Client 2's look inverts: what was black is white.
    bright = [float(world.data.train.x[rows].double().mean()) for rows in world.parts]
    assert bright[2] > bright[1] > bright[0]
    assert world.data.train.x.shape == (7000, 1, 14, 14)


@pytest.mark.parametrize("name", ["binary-world", "gaussian-world", "looks-world"])
def test_worlds_load_by_name_and_follow_their_seed(name: str) -> None:
    data = load(name)
    make = MAKERS[["binary-world", "gaussian-world", "looks-world"].index(name)]
    assert torch.equal(data.train.x, make(Wanted(3, 0)).data.train.x)
    assert not torch.equal(data.train.x, make(Wanted(3, 1)).data.train.x)
