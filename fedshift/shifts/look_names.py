"""What a transform of images does, in a few words."""

from __future__ import annotations

from fedshift.shifts.covariate import (
    Brightness,
    Compose,
    Gamma,
    Hue,
    Invert,
    Posterise,
    Saturation,
    Transform,
)
from fedshift.shifts.noise import GaussianNoise


def look_name(transform: Transform) -> str:
    """As in "brightness 0.5, invert": the steps in their order; "unchanged" for none.

    Another transform than those of `fedshift.shifts` is named by its type.
    """
    match transform:
        case Compose(steps):
            return ", ".join(map(look_name, steps)) or "unchanged"
        case Brightness(factor):
            return f"brightness {factor:g}"
        case Saturation(factor):
            return f"saturation {factor:g}"
        case Gamma(gamma):
            return f"gamma {gamma:g}"
        case Hue(shift):
            return f"hue {shift:+g}"
        case Posterise(bits):
            return f"{bits} bits"
        case Invert():
            return "invert"
        case GaussianNoise(deviation):
            return f"noise {deviation:.2g}"
    return type(transform).__name__
