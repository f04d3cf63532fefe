"""CIFAR-100 from the official python files, with its 100 fine or its 20 coarse labels.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
https://www.cs.toronto.edu/~kriz/cifar.html (classes, superclasses and "Dataset layout").
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from fedshift.datasets.base import Samples, damaged
from fedshift.datasets.cifar import read_pickled
from fedshift.errors import InputError

TRAIN, TEST = "train", "test"

# The page's table of superclasses, in the spelling of the files; both levels are numbered
# alphabetically.
_TABLE = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
COARSE = tuple(_TABLE)
FINE = tuple(sorted(chain.from_iterable(names.split() for names in _TABLE.values())))
# Entry k is the coarse label of fine label k.
COARSE_OF = tuple(
    next(c for c, names in enumerate(_TABLE.values()) if name in names.split()) for name in FINE
)


def missing(folder: Path) -> tuple[str, ...]:
    """Which of the two files `train` and `test` are missing."""
    return tuple(name for name in (TRAIN, TEST) if not os.path.isfile(folder / name))


def read_fine(folder: Path) -> tuple[Samples, Samples]:
    """Training and test part with the fine labels, 0 to 99, in the official order.

    Shapes: x uint8 [n, 3, 32, 32] (red, green, blue), y int64 [n].

    Raises DataError for a missing or damaged file, a pickle that asks for anything but arrays, and
    coarse labels that do not belong to the fine ones.
    """
    return _read(folder / TRAIN), _read(folder / TEST)


def read_coarse(folder: Path) -> tuple[Samples, Samples]:
    """As `read_fine`, with the coarse labels, 0 to 19."""
    train, test = read_fine(folder)
    return Samples(train.x, coarse(train.y)), Samples(test.x, coarse(test.y))


def coarse(fine: Tensor) -> Tensor:
    """The coarse label, 0 to 19, of each fine label, 0 to 99: int64 [n] to the same.

    FedDRM's CIFAR-20 deals images to clients by their fine labels and trains on the coarse ones
    (the authors' code): deal `load("cifar-100").train.y`, then call this.

    Raises InputError for labels outside 0 to 99.
    """
    if len(fine) and not 0 <= int(fine.min()) <= int(fine.max()) < len(FINE):
        raise InputError(
            f"fine labels from {int(fine.min())} to {int(fine.max())}; allowed: 0 to "
            f"{len(FINE) - 1}, the labels of cifar-100."
        )
    return torch.tensor(COARSE_OF)[fine]


def _read(path: Path) -> Samples:
    classes = {b"fine_labels": len(FINE), b"coarse_labels": len(COARSE)}
    images, labels = read_pickled(path, classes)
    fine, stored = labels[b"fine_labels"], labels[b"coarse_labels"]
    wrong = (coarse(fine) != stored).nonzero()
    # Checked for both levels: labels that do not belong together mean a damaged file.
    if len(wrong):
        j = int(wrong[0])
        raise damaged(
            path,
            f"image {j} has the fine label {int(fine[j])} ({FINE[int(fine[j])]}) and the coarse "
            f"label {int(stored[j])} ({COARSE[int(stored[j])]}), which do not belong together",
        )
    return Samples(images, fine)
