"""Noise that grows with the client's number, and writers in disjoint groups."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from fedshift.errors import InputError
from fedshift.seeds import numpy_generator
from fedshift.shifts import (
    Compose,
    Gamma,
    GaussianNoise,
    check_partition,
    group_shares,
    noise_pool,
    transform_of,
    whole_groups,
)


def grey(n: int = 50) -> torch.Tensor:
    """Images of which no two are equal, all near 1/2."""
    return 0.5 + 1e-3 * torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def test_the_deviation_is_sigma_i_over_m() -> None:
    """Small enough for no clipping: the differences are N(0, (sigma i / M)^2)."""
    pool = noise_pool(0.1, 4)
    assert len(pool) == 4
    x = grey()
    for i, look in enumerate(pool, 1):
        e = ((look(x) - x) / (0.1 * i / 4)).flatten().double()
        assert float(e.std()) == pytest.approx(1.0, abs=4 / sqrt(2 * len(e)))
        assert float(e.mean()) == pytest.approx(0.0, abs=4 / sqrt(len(e)))
        assert kstest(e.numpy(), norm.cdf).pvalue > 1e-3
        assert abs(float(e.var()) - 0.1 * i / 4) > 0.5  # the control: no variance


def test_values_are_clipped_to_the_unit_interval() -> None:
    noisy = GaussianNoise(5.0)(grey())
    assert float(noisy.min()) == 0.0
    assert float(noisy.max()) == 1.0
    # Half of N(0.5, 25) is above 1/2; P(clipped) = 2 Phi(-0.1).
    share = float(((noisy == 0) | (noisy == 1)).double().mean())
    assert share == pytest.approx(2 * norm.cdf(-0.1), abs=0.02)


def test_an_images_noise_is_its_own() -> None:
    """The same in any order and company; another for another image, client or seed."""
    x, look = grey(), GaussianNoise(0.1, seed=3, client=2)
    whole = look(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(look(x[order]), whole[order])
    assert torch.equal(look(x[7:9]), whole[7:9])
    noise = (whole - x).flatten(1)
    correlation = np.corrcoef(noise.numpy())
    assert np.abs(correlation - np.eye(len(x))).max() < 0.25
    others = (GaussianNoise(0.1, 3, 1)(x), GaussianNoise(0.1, 4, 2)(x))
    for other in others:
        shared = np.corrcoef(noise.flatten(), (other - x).flatten())[0, 1]
        assert abs(shared) < 0.03


def test_no_noise_is_no_change() -> None:
    x = grey()
    state = torch.random.get_rng_state()
    assert torch.equal(GaussianNoise(0.0)(x), x)
    assert not torch.equal(GaussianNoise(0.01)(x), x)
    assert torch.equal(state, torch.random.get_rng_state())
    assert GaussianNoise(0.1)(x[:0]).shape == (0, 1, 28, 28)


def test_noise_goes_with_other_transforms() -> None:
    x, look = grey(), GaussianNoise(0.1)
    both = Compose((Gamma(2.0), look))
    assert torch.equal(both(x), look(x**2))
    assert transform_of(noise_pool(0.5, 3), 1) == GaussianNoise(0.5 * 2 / 3, 0, 1)


def test_noise_out_of_range_is_refused() -> None:
    for sigma in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"noise of standard deviation {sigma}; allowed"):
            GaussianNoise(sigma)
    with pytest.raises(InputError, match="clients=0; allowed: a whole number of at least 1"):
        noise_pool(0.5, 0)
    with pytest.raises(InputError, match="client=-1"):
        GaussianNoise(0.1, 0, -1)
    with pytest.raises(InputError):
        GaussianNoise(0.1)(255 * grey())


# ---------------------------------------------------------------- writers


def written() -> np.ndarray:
    """Some 2,000 samples of 62 writers, numbered with gaps."""
    rng = np.random.default_rng(0)
    return 3 * rng.integers(0, 62, 2000)


@pytest.mark.parametrize("clients", [1, 7, 30, 62])
def test_writers_are_in_disjoint_groups_of_equal_number(clients: int) -> None:
    who = written()
    parts = group_shares(who, clients, numpy_generator(0, "writers"))
    check_partition(parts, len(who), clients, whole=True)
    groups = [set(who[part].tolist()) for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 62
    low, extra = divmod(62, clients)
    assert [len(g) for g in groups] == [low + 1] * extra + [low] * (clients - extra)


def test_writers_are_dealt_at_random() -> None:
    who = written()
    one, again, other = (group_shares(who, 5, numpy_generator(s, "writers")) for s in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    fixed = whole_groups(who, 5)
    assert not all(np.array_equal(a, b) for a, b in zip(one, fixed, strict=True))


def test_too_few_writers_are_refused() -> None:
    with pytest.raises(InputError, match="clients=63, but there are 62 groups"):
        group_shares(written(), 63, numpy_generator(0))
    with pytest.raises(InputError, match="one whole number >= 0 for each sample"):
        group_shares(np.array([0.5, 1.0]), 1, numpy_generator(0))
