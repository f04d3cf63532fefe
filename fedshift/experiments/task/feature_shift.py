"""Feature shift: clients' inputs split by writer, with noise, or changed by a look of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift import datasets
from fedshift.datasets import Dataset, entry
from fedshift.errors import InputError
from fedshift.experiments.config.shift import Split
from fedshift.experiments.task.natural import Dealt, none_such
from fedshift.seeds import numpy_generator
from fedshift.shifts import Partition, Shift, covariate, group_shares
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
from fedshift.shifts.noise import GaussianNoise, Shared, noise_pool


def looks(split: Split, clients: int, seed: int) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The change of each client's images; () if they stay as they are.

    Raises InputError if the pool of looks has fewer entries than there are clients.
    """
    if split.noise:
        return noise_pool(split.noise, clients, seed)
    kind, intensity = split.transform, split.intensity or "high"
    if kind == "none":
        return ()
    # Functions, so that a pool is built only if it is asked for.
    made = {
        "bits": lambda: covariate.bit_pool(intensity),
        "wide": covariate.wide_pool,
        "fashion": covariate.fashion_pool,
    }[kind]()
    return tuple(covariate.transform_of(made, i) for i in range(clients))


def check_images(split: Split, data: Dataset) -> None:
    """Raise InputError if clients' images are to change, but the data set has no images."""
    images = data.train.x.dim() == 4
    for key, on in (("transform", split.transform != "none"), ("noise", split.noise > 0)):
        if on and not images:
            raise InputError(
                f"shift.{key} changes images, and {data.name} has none; leave shift.{key} out"
            )


def grey_note(split: Split, images: Tensor, seed: int) -> str | None:
    """A sentence if some looks differ in colour alone, and the images [n, 1, ...] are grey.

    None without looks, if all looks differ on grey images, and for images in colour.
    """
    kind, clients = split.transform, split.clients
    if kind == "none" or images.shape[1] != 1:
        return None
    # Every grey level once: two looks that agree on this ramp agree on all grey images.
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
    """What sets each client's inputs apart, in words: a look or a site; None if nothing does."""
    if split.kind == "natural":
        return entry(dataset).sites or None
    return tuple(map(look_name, looks(split, clients, seed))) or None


def look_name(transform: Transform) -> str:
    """A transform in words, its steps in order: "brightness 0.5, invert"; "unchanged" for none.

    A transform that is not one of `fedshift.shifts` is named by its type.
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


Indices = NDArray[np.int64]


def dealing(split: Split, dataset: str, seed: int, rows: Indices) -> Shift:
    """The configured shift over these rows of the training file; kind "writers" deals by writers.

    Numbers from the length of the training file on are rows of the test file. Raises InputError for
    a data set without writers.
    """
    if split.kind != "writers":
        return split.shift()
    ids = writer_ids(dataset)[rows]

    # A shift is called with labels, and not with rows: the rows' writers have to be bound here.
    def by_writer(
        labels: Indices, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        return group_shares(ids, clients, numpy_generator(seed, "writers"))

    return by_writer


def writer_ids(name: str) -> Indices:
    """The number of each row's writer: rows of the training file first, then of the test file.

    A writer in both files has one number. Raises InputError for a data set without writers.
    """
    read = datasets.entry(name).writers
    if read is None:
        what = "data set with writers"
        raise none_such('shift.kind = "writers"', what, name, lambda other: other.writers)
    parts = read(datasets.find(name))
    named = np.concatenate([np.asarray(part.sites)[part.site.numpy()] for part in parts])
    # Matched by name, since each file numbers its writers on its own.
    return np.unique(named, return_inverse=True)[1].astype(np.int64)


def noised(split: Split, dealt: Dealt, seed: int) -> Dealt:
    """The task with each client's noise, and noise on test images if shift.noisy_test is set."""
    if not split.noise:
        return dealt
    clients = len(dealt.parts)
    # The target has no noise level of its own: each test image gets that of some client.
    shared = Shared(noise_pool(split.noise, clients, seed), seed) if split.noisy_test else None
    changed = looks(split, clients, seed)
    # Noise changes the densities, so the known ratios hold no longer.
    return dealt._replace(looks=changed, test_look=shared, log_ratios=None)


def shifts_features(split: Split) -> bool:
    """Whether the configuration makes clients' inputs differ, not only their labels."""
    at_sites = split.kind == "natural" and split.target == "clients"
    return bool(split.noise) or split.transform != "none" or split.kind == "writers" or at_sites
