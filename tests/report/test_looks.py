"""Colours and dashes: the same for a method everywhere, and distinguishable by all readers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from fedshift.report.looks import DARK, LIGHT, METHODS, THEME, look_of, looks


def test_a_method_looks_the_same_whatever_else_is_drawn() -> None:
    assert look_of("FedPALS, ess=25%") == look_of("fedpals (second)") == look_of("chosen: fedpals")
    assert look_of("labelset_scaffold") == look_of("SCAFFOLD") != look_of("fedavg")
    assert look_of("ditto_drm_repo") == look_of("Ditto, vote") == look_of("ditto")
    assert look_of("fedprox+fedpals") not in (look_of("fedprox"), look_of("fedpals"))
    # A method of another package.
    assert look_of("mine") == look_of("Mine (trial)")
    assert looks(["scaffold", "fedavg"], [None, None])[1] == looks(["fedavg"], [None])[0]


def test_listed_methods_have_looks_of_their_own() -> None:
    assert len({look_of(name) for name in METHODS}) == len(METHODS)


def test_a_method_that_is_not_listed_has_a_look_by_its_name() -> None:
    """For example a new recipe. The control: the start of its name alone is another method."""
    names = ("fedquux", "another_method", "third")
    assert not set(names) & set(METHODS)
    assert len({look_of(name) for name in names}) == len(names)
    for name in names:
        assert look_of(name) == look_of(f"{name.upper()} (mu=1)") == look_of(f"labelset_{name}")
        assert 1 <= look_of(name).colour < len(LIGHT)
    assert look_of("fedavg_of_mine") == look_of("fedavg")


def test_what_shares_a_colour_has_another_dash() -> None:
    drawn = looks(
        ["fedpals 1", "fedpals 2", "fedpals 1, estimated"], [None] * 3, [False, False, True]
    )
    assert len({k.colour for k in drawn}) == 1
    assert drawn[0].style != drawn[1].style
    assert drawn[0] == drawn[2]  # a thin line beside its method's


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# What is left of linear red, green and blue without one kind of cone (Machado et al. 2009).
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip


def nearest(palette: Sequence[str], vision: str) -> float:
    """The smallest distance in CIELAB of two colours of a palette; 2.3 is just visible."""
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in palette])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.clip(linear @ VISIONS[vision].T, 0, 1) @ np.array(
        [[0.4339, 0.2126, 0.0178], [0.3762, 0.7152, 0.1095], [0.1899, 0.0722, 0.8727]]
    )
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    lab = np.stack([116 * f[:, 1], 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(lab, 2))


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_are_safe_for_the_colour_blind(vision: str) -> None:
    assert min(nearest(LIGHT, vision), nearest(DARK, vision)) >= 15.0
    # Control: red and green of one lightness, blue and green, sky and blue.
    assert nearest(("#b05a5a", "#6b7f3a", "#0072b2", "#00807a", "#0072c2"), vision) < 15.0


def test_colours_stand_out_from_what_is_behind_them() -> None:
    for palette, paper in zip((LIGHT, DARK), THEME["paper"], strict=True):
        assert min(contrast(c, paper) for c in palette) >= 3.0
    for name in ("ink", "soft", "link"):
        for which in (0, 1):
            assert contrast(THEME[name][which], THEME["paper"][which]) >= 4.5
            assert contrast(THEME[name][which], THEME["box"][which]) >= 4.5
    assert contrast("#ffd000", THEME["paper"][0]) < 3.0
