"""Changes to each client's images (looks), as configured, and in words."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedshift.datasets import Dataset, entry
from fedshift.errors import InputError
from fedshift.experiments.config.shift import Split
from fedshift.shifts import covariate
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
from fedshift.shifts.noise import GaussianNoise, noise_pool


def looks(split: Split, clients: int, seed: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """What each client's images go through; () where they stay as they are.

    Raises InputError where the pool of looks has fewer entries than there are clients.
    """
    if split.noise:
        return noise_pool(split.noise, clients, seed)
    kind, intensity = split.transform, split.intensity or "high"
    if kind == "none":
        return ()
    # Made on request: a pool of 54 looks is built only where it is asked for.
    made = {
        "bits": lambda: covariate.bit_pool(intensity),
        "wide": covariate.wide_pool,
        "fashion": covariate.fashion_pool,
    }[kind]()
    return tuple(covariate.transform_of(made, i) for i in range(clients))


def check_images(split: Split, data: Dataset) -> None:
    """Raise InputError where clients' images are to change and the data set has no images."""
    images = data.train.x.dim() == 4
    for key, on in (("transform", split.transform != "none"), ("noise", split.noise > 0)):
        if on and not images:
            raise InputError(
                f"shift.{key} changes images, and {data.name} has none; leave shift.{key} out"
            )


def grey_note(split: Split, images: Tensor, seed: int) -> str | None:
    """A sentence where looks that differ in colours do not differ on these grey images [n, 1, ...].

    None where there are no looks, where all differ, and for images in colour.
    """
    kind, clients = split.transform, split.clients
    if kind == "none" or images.shape[1] != 1:
        return None
    # Every grey level once: two looks that agree on these agree on all grey images.
    ramp = torch.linspace(0.0, 1.0, 256).view(1, 1, 1, 256)
    different = len({tuple(look(ramp).flatten().tolist()) for look in looks(split, clients, seed)})
    if different == clients:
        return None
    better = ' shift.transform = "fashion" has eight for grey images.' if kind == "bits" else ""
    return (
        f'shift.transform = "{kind}" differs in hue and saturation, which grey images do not have: '
        f"of the {clients} looks only {different} differ here.{better}"
    )


def look_names(split: Split, dataset: str, clients: int, seed: int) -> tuple[str, ...] | None:
    """What sets each client's inputs apart, in words: its look, or its site; None for nothing."""
    if split.kind == "natural":
        return entry(dataset).sites or None
    return tuple(map(look_name, looks(split, clients, seed))) or None


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
