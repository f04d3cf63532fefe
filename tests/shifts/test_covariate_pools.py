"""Pools of feature shifts, their order and indices, and the authors' 8-bit path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.errors import InputError
from fedshift.shifts import (
    Brightness,
    Compose,
    Gamma,
    Hue,
    Invert,
    Posterise,
    Saturation,
    bit_pool,
    fashion_pool,
    transform_of,
    wide_pool,
)
from support.colours import close, images, pixels

POOLS = {
    "low": bit_pool("low"),
    "mid": bit_pool("mid"),
    "high": bit_pool(),
    "wide": wide_pool(),
    "fashion": fashion_pool(),
}


# ------------------------------------------------------------------------------ order and pools


def test_the_order_of_steps_matters() -> None:
    steps = (Saturation(1.5), Hue(0.1), Gamma(0.6))
    x = images()
    assert torch.equal(Compose(steps)(x), steps[2](steps[1](steps[0](x))))
    assert not close(Compose(steps)(x), Compose(steps[::-1])(x), 0.01)
    grey = images(channels=1)
    fashion = Compose((Brightness(1.5), Gamma(2.0), Invert()))
    assert close(fashion(grey), 1 - (1.5 * grey).clamp(max=1) ** 2)
    assert not close(fashion(grey), Compose((Brightness(1.5), Invert(), Gamma(2.0)))(grey), 0.01)


@pytest.mark.parametrize(
    ("intensity", "gammas", "hues", "saturations"),
    [
        ("low", (0.9, 1.1), (-0.01, 0.01), (0.9, 1.1)),
        ("mid", (0.75, 1.25), (-0.05, 0.05), (0.7, 1.3)),
        ("high", (0.6, 1.4), (-0.1, 0.1), (0.5, 1.5)),
    ],
)
def test_bits_of_the_index_choose_the_levels(
    intensity: str,
    gammas: tuple[float, ...],
    hues: tuple[float, ...],
    saturations: tuple[float, ...],
) -> None:
    pool = bit_pool(intensity)
    assert len(pool) == 8
    for i in range(8):
        steps = (Saturation(saturations[i >> 2 & 1]), Hue(hues[i >> 1 & 1]), Gamma(gammas[i & 1]))
        assert transform_of(pool, i) == Compose(steps)


def test_the_wide_pool_counts_in_threes() -> None:
    pool = wide_pool()
    assert len(pool) == 54
    for n, entry in enumerate(pool):
        steps = (
            Saturation((0.4, 1.0, 1.6)[n // 9 % 3]),
            Hue((-0.15, 0.0, 0.15)[n // 3 % 3]),
            Gamma((0.6, 1.0, 1.4)[n % 3]),
        )
        assert entry == Compose((*steps, Posterise(2)) if n >= 27 else steps)
    assert {transform_of(pool, i).steps[0] for i in range(8)} == {Saturation(0.4)}
    assert sum(len(transform_of(pool, i).steps) == 4 for i in range(32)) == 5
    assert torch.equal(transform_of(pool, 13)(images()), images())


def test_the_fashion_pool() -> None:
    x = images(channels=1)
    for i, entry in enumerate(fashion_pool()):
        z = (x * (1.5 if i & 1 else 0.5)).clamp(0, 1)
        z = z**2 if i >> 2 & 1 else z
        assert close(entry(x), 1 - z if i >> 1 & 1 else z)
    assert len(fashion_pool()) == 8


@pytest.mark.parametrize("name", POOLS)
def test_entries_of_a_pool_differ_and_stay_in_range(name: str) -> None:
    x = torch.cat((pixels(), pixels().flip(1)))
    seen = [entry(x) for entry in POOLS[name]]
    assert all(bool(((z >= 0) & (z <= 1)).all()) for z in seen)
    for i, z in enumerate(seen):
        assert not any(close(z, other, 1e-3) for other in seen[:i])


def test_the_intensities_are_ordered() -> None:
    """The pools of growing intensity move images by growing amounts, client by client."""
    x = images()
    for i in range(8):
        moved = [float((bit_pool(k)[i](x) - x).abs().mean()) for k in ("low", "mid", "high")]
        assert moved[0] < moved[1] < moved[2]


# ------------------------------------------------------------------------ beside the 8-bit path


def eight_bit(image: np.ndarray, entry: Compose) -> np.ndarray:
    """What the FedDRM authors' pipeline computes on a byte image [h, w, 3], through Pillow."""
    pil = pytest.importorskip("PIL.Image")
    from PIL import ImageEnhance

    saturation, hue, gamma = entry.steps
    picture = ImageEnhance.Color(pil.fromarray(image)).enhance(saturation.factor)
    h, s, v = picture.convert("HSV").split()
    turned = (np.asarray(h).astype(int) + int(hue.shift * 255)) % 256
    h = pil.fromarray(turned.astype(np.uint8))
    picture = pil.merge("HSV", (h, s, v)).convert("RGB")
    table = [int(255.999 * (v / 255) ** gamma.gamma) for v in range(256)]
    return np.asarray(picture.point(table * 3))


def smooth() -> Tensor:
    """Byte images with gradual colours, as photographs have."""
    x = F.interpolate(images(4, side=5), (32, 32), mode="bilinear")
    return x.mul(255).round()


def test_rounding_moves_the_8_bit_path_by_a_few_levels_at_most_in_the_mean() -> None:
    x = smooth()
    for i, entry in enumerate(bit_pool()):
        ours = entry(x / 255) * 255
        for j, image in enumerate(x):
            theirs = torch.from_numpy(
                eight_bit(image.permute(1, 2, 0).to(torch.uint8).numpy(), entry).copy()
            )
            apart = (ours[j] - theirs.permute(2, 0, 1)).abs()
            assert float(apart.mean()) < 3, i
            # Control: the neighbour in the pool is another picture.
            other = bit_pool()[i ^ 4](x[j : j + 1] / 255)[0] * 255
            assert float((other - ours[j]).abs().mean()) > 5


def test_other_pools_and_clients_are_refused() -> None:
    with pytest.raises(InputError, match="intensity"):
        bit_pool("hgih")
    for client in (8, -1):
        with pytest.raises(InputError, match=f"client={client}"):
            transform_of(bit_pool(), client)
