"""How clients' inputs differ: split by writer, with noise, or changed by each client's own look."""

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


Indices = NDArray[np.int64]


def dealing(split: Split, dataset: str, seed: int, rows: Indices) -> Shift:
    """The configured shift over these rows of the training file; by writers, for kind "writers".

    Rows from the length of the training file on are those of the test file. Raises InputError for
    a data set without writers.
    """
    if split.kind != "writers":
        return split.shift()
    ids = writer_ids(dataset)[rows]

    # A shift gets labels, not rows: the writers of these rows are fixed here.
    def by_writer(
        labels: Indices, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        return group_shares(ids, clients, numpy_generator(seed, "writers"))

    return by_writer


def writer_ids(name: str) -> Indices:
    """The writer of each row of the training file, then of the test file, numbered from 0.

    A writer of both files has one number. Raises InputError for a data set without writers.
    """
    read = datasets.entry(name).writers
    if read is None:
        what = "data set with writers"
        raise none_such('shift.kind = "writers"', what, name, lambda other: other.writers)
    parts = read(datasets.find(name))
    named = np.concatenate([np.asarray(part.sites)[part.site.numpy()] for part in parts])
    # By name, since the two files number their writers independently of one another.
    return np.unique(named, return_inverse=True)[1].astype(np.int64)


def noised(split: Split, dealt: Dealt, seed: int) -> Dealt:
    """The task with each client's noise, and the test images' where shift.noisy_test is set."""
    if not split.noise:
        return dealt
    clients = len(dealt.parts)
    # The target has no noise level of its own: each test image gets that of some client.
    shared = Shared(noise_pool(split.noise, clients, seed), seed) if split.noisy_test else None
    changed = looks(split, clients, seed)
    # Of inputs with noise the densities are others.
    return dealt._replace(looks=changed, test_look=shared, log_ratios=None)


def shifts_features(split: Split) -> bool:
    """Whether the configuration makes clients' inputs differ, not only their labels."""
    at_sites = split.kind == "natural" and split.target == "clients"
    return bool(split.noise) or split.transform != "none" or split.kind == "writers" or at_sites
