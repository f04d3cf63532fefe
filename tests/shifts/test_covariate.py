"""Feature shifts: every definition in closed form, colours against colorsys, pools, refusals."""

from __future__ import annotations

import colorsys
import math
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.shifts import (
    Brightness,
    Compose,
    Gamma,
    Hue,
    Invert,
    Posterise,
    Saturation,
    Transform,
)
from fedshift.shifts.colour import hsv_to_rgb, rgb_to_hsv
from support.colours import close, images, pixels

STEPS: list[Transform] = [
    Gamma(0.6),
    Gamma(1.4),
    Brightness(0.5),
    Brightness(1.5),
    Invert(),
    Saturation(0.4),
    Saturation(1.6),
    Hue(0.1),
    Hue(-0.15),
    Posterise(2),
]


def greys() -> Tensor:
    return images(channels=1).expand(-1, 3, -1, -1)


def bytes_256() -> Tensor:
    return torch.arange(256).float().div(255).view(1, 1, 16, 16)


# --------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    "step",
    [Gamma(1), Saturation(1), Hue(0), Hue(1), Hue(-3.0), Brightness(1), Compose(())],
    ids=str,
)
def test_neutral_values_change_no_bit(step: Transform) -> None:
    assert torch.equal(step(images()), images())
    assert torch.equal(step(greys()), greys())


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_others_do_and_leave_their_input_alone(step: Transform) -> None:
    x = images()
    out = step(x)
    assert torch.equal(x, images())
    assert not close(out, x, 1e-3)
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert step(x.double()).dtype == torch.float64
    assert step(x[:0]).shape == x[:0].shape
    assert bool(((out >= 0) & (out <= 1)).all())


def test_gamma() -> None:
    x = images()
    assert close(Gamma(2.0)(x), x * x)
    assert close(Gamma(0.5)(x), x.sqrt())
    assert close(Gamma(0.6)(Gamma(1.4)(x)), x**0.84)
    ends = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2)
    assert torch.equal(Gamma(0.6)(ends), ends)
    assert bool((Gamma(0.6)(x) >= x).all())
    assert bool((Gamma(1.4)(x) <= x).all())


def test_brightness_and_inversion() -> None:
    x = torch.tensor([0.0, 0.2, 0.6, 0.8, 1.0]).view(1, 1, 1, 5)
    assert close(Brightness(1.5)(x).flatten(), torch.tensor([0.0, 0.3, 0.9, 1.0, 1.0]))
    assert close(Brightness(0.5)(x).flatten(), torch.tensor([0.0, 0.1, 0.3, 0.4, 0.5]))
    assert close(Invert()(x).flatten(), torch.tensor([1.0, 0.8, 0.4, 0.2, 0.0]))
    assert close(Invert()(Invert()(images())), images())


def test_saturation() -> None:
    x = images()
    grey = 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]
    expected = (0.5 * x + 0.5 * grey[:, None], (1.5 * x - 0.5 * grey[:, None]).clamp(0, 1))
    assert close(Saturation(0.5)(x), expected[0])
    assert close(Saturation(1.5)(x), expected[1])
    assert not close(expected[1], 1.5 * x - 0.5 * grey[:, None])  # some values are cut off
    assert close(Saturation(0)(x), grey[:, None].expand_as(x))
    red = torch.tensor([1.0, 0, 0]).view(1, 3, 1, 1)
    assert close(Saturation(0.4)(red).flatten(), torch.tensor([0.5794, 0.1794, 0.1794]))


def test_greys_have_neither_hue_nor_saturation() -> None:
    for step in (Saturation(0.4), Saturation(1.6), Hue(0.1), Hue(-0.5)):
        assert close(step(greys()), greys())
        one = images(channels=1)
        assert torch.equal(step(one), one)
    # Controls: a hint of colour is enough, and gamma does change greys.
    tinted = greys() * torch.tensor([1.0, 0.9, 0.8]).view(3, 1, 1)
    assert not close(Hue(0.1)(tinted), tinted, 1e-3)
    assert not close(Saturation(0.4)(tinted), tinted, 1e-3)
    assert not close(Gamma(1.4)(greys()), greys(), 1e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterise_keeps_the_top_bits_of_a_byte(bits: int) -> None:
    mask = 0xFF & ~((1 << (8 - bits)) - 1)
    expected = torch.tensor([v & mask for v in range(256)]).float() / 255
    assert torch.equal(Posterise(bits)(bytes_256()).flatten(), expected)
    assert len(expected.unique()) == 2**bits
    between = torch.linspace(0, 1, 10_001).view(1, 1, 1, -1)
    assert torch.isin(Posterise(bits)(between), expected).all()


@pytest.mark.parametrize("bits", [2, 7])
@pytest.mark.parametrize("gamma", [0.6, 1.4])
def test_gamma_and_posterise_are_the_8_bit_path_on_bytes(gamma: float, bits: int) -> None:
    values = [(v / 255) ** gamma for v in range(256)]
    step = 2 ** (8 - bits)
    expected = torch.tensor([int(255.999 * v) // step * step for v in values]).float() / 255
    steps = Compose((Gamma(gamma), Posterise(bits)))
    assert torch.equal(steps(bytes_256().double()).flatten().float(), expected)
    # Control: rounding to the nearest byte is another function.
    nearest = torch.tensor([round(255 * v) // step * step for v in values]) / 255
    assert bits == 2 or not torch.equal(nearest, expected)


# ---------------------------------------------------------------------------------------- colours


def by_colorsys(x: Tensor, turn: float | None = None) -> Tensor:
    """Hue, saturation, value of each pixel; with `turn`, back to colour at the hue moved by it."""
    out = []
    for red, green, blue in x[0, :, 0].T.tolist():
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        moved = ((hue + turn) % 1.0, saturation, value) if turn is not None else None
        out.append(colorsys.hsv_to_rgb(*moved) if moved else (hue, saturation, value))
    return torch.tensor(out, dtype=x.dtype).T.reshape(1, 3, 1, -1)


def test_hue_saturation_and_value_are_those_of_colorsys() -> None:
    x = pixels()
    assert x.shape[-1] == 125 + 900
    ours, theirs = rgb_to_hsv(x), by_colorsys(x)
    # Hue is a place on a circle; next to 0 is next to 1.
    apart = (ours - theirs).abs()
    apart[:, 0] = torch.minimum(apart[:, 0], 1 - apart[:, 0])
    assert float(apart.max()) < 1e-6
    assert bool(((ours >= 0) & (ours <= 1)).all())
    assert close(hsv_to_rgb(ours), x)
    assert close(rgb_to_hsv(x.double()), by_colorsys(x.double()), 1e-14)


@pytest.mark.parametrize("turn", [-0.15, -0.1, -0.01, 0.05, 0.15, 0.5, 0.9])
def test_hue_is_that_of_colorsys(turn: float) -> None:
    x = pixels()
    assert close(Hue(turn)(x), by_colorsys(x, turn), 2e-6)
    assert not close(Hue(turn)(x), by_colorsys(x, -turn if turn != 0.5 else 0.25), 1e-3)


def test_hues_add_up_on_the_circle() -> None:
    x = pixels()
    assert close(Hue(0.3)(Hue(0.7)(x)), x, 2e-6)
    assert close(Hue(0.25)(Hue(0.15)(x)), Hue(0.4)(x), 2e-6)
    assert close(Hue(0.1)(x), Hue(-0.9)(x), 2e-6)
    # A third of a turn moves red to green, green to blue and blue to red, exactly.
    assert close(Hue(1 / 3)(x), x[:, [2, 0, 1]])
    assert not close(Hue(1 / 3)(x), x[:, [1, 2, 0]], 1e-3)
    # Value and saturation stay.
    assert close(rgb_to_hsv(Hue(0.2)(x))[:, 1:], rgb_to_hsv(x)[:, 1:], 2e-6)


# -------------------------------------------------------------------------------------- bad input


def with_value(value: float) -> Tensor:
    x = images()
    x[1, 2, 3, 4] = value
    return x


@pytest.mark.parametrize("step", [*STEPS, Compose(()), Gamma(1), Hue(0)], ids=str)
def test_every_transform_refuses_what_is_no_image(step: Transform) -> None:
    for value, says in (
        (math.nan, "images contain NaN"),
        (1.5, "values from .* to 1.5; allowed: 0 to 1"),
        (-0.25, "values from -0.25 to"),
        (math.inf, "to inf; allowed"),
    ):
        with pytest.raises(InputError, match=says):
            step(with_value(value))
    for bad, says in (
        (images().mul(255).byte(), r"images are torch.uint8; .*x.float\(\) / 255"),
        (images()[0], r"shape \[3, 9, 9\]; .*x\[None\]"),
        (images(channels=2), r"shape \[4, 2, 9, 9\]"),
        (np.zeros((1, 3, 4, 4)), "images are float64"),
    ):
        with pytest.raises(InputError, match=says):
            step(bad)
    step(with_value(1.0))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Gamma(0), "gamma=0; allowed: a finite number above 0."),
        (lambda: Gamma(math.nan), "gamma=nan; allowed"),
        (lambda: Gamma(True), "gamma=True; allowed"),
        (lambda: Hue(math.inf), "hue shift=inf; allowed: a finite number, in turns."),
        (lambda: Hue("0.1"), "hue shift='0.1'; allowed"),  # type: ignore[arg-type]
        (lambda: Saturation(-0.5), "saturation factor=-0.5; allowed: a finite number of at least"),
        (lambda: Brightness(math.inf), "brightness factor=inf; allowed"),
        (lambda: Posterise(0), "bits=0; allowed: a whole number from 1 to 8"),
        (lambda: Posterise(2.0), "bits=2.0; allowed"),  # type: ignore[arg-type]
    ],
)
def test_bad_parameters(call: Callable[[], object], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        call()


def test_transforms_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Gamma(2).gamma = 1  # type: ignore[misc]
