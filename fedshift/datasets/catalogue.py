"""The known data sets as data: where they come from, their names on disk, how they are checked.

Checksums of files are md5 because that is what the publishers print (Fashion-MNIST's README, the
CIFAR page, torchvision for MNIST). It guards against accidents; `content` (SHA-256 of what was
decoded, see `base.content_sha256`) is checked at every load and guards against exchange as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from fedshift.arguments import called
from fedshift.datasets import cifar, cifar100, idx, writers
from fedshift.datasets.base import Samples
from fedshift.datasets.entry import Entry, Remote, remotes_at
from fedshift.datasets.natural.loading import TABLES
from fedshift.errors import InputError, unknown
from fedshift.plugins import DATASETS, loaded, registered

SHIPPED = Path(__file__).with_name("shipped")
MINI_TRAIN = 700
GREY = "1 x 28 x 28"


def read_mini(folder: Path) -> tuple[Samples, Samples]:
    """Fashion-MNIST's test images divided: per class, in file order, 700 train and the rest test.

    Shapes: x uint8 [7000, 1, 28, 28] and [3000, 1, 28, 28].
    """
    samples = _shipped_images(folder)
    # Per class, so that both parts are balanced.
    first = _rank_within_class(samples.y) < MINI_TRAIN
    return samples.take(first.nonzero()[:, 0]), samples.take((~first).nonzero()[:, 0])


@cache  # the package's own files: small, unchanged, and read again by every run of a table
def _shipped_images(folder: Path) -> Samples:
    return idx.read_samples(folder, "t10k", len(_FASHION))


def entries() -> tuple[Entry, ...]:
    """All known data sets: those below, then those that packages add under other names.

    Raises InputError for a package whose data sets cannot be loaded.
    """
    by_name = {one.name: one for one in ENTRIES}
    for package, point in registered(DATASETS).items():
        for one in loaded(point, tuple | list, "tuple of fedshift.datasets.Entry"):
            if not isinstance(one, Entry):
                raise InputError(
                    f'the package that registers "{package}" as {DATASETS} gives {called(one)}; '
                    "give a tuple of fedshift.datasets.Entry"
                )
            # A package cannot replace a set of the core: its content would not be checked.
            by_name.setdefault(one.name, one)
    return tuple(by_name.values())


def entry(name: str) -> Entry:
    """The known data set called `name`.

    Raises InputError for an unknown name, with the nearest match, and for the name of a table.
    """
    if not isinstance(name, str):
        raise InputError(f'name is {called(name)}; give the name of a data set, as "mnist"')
    # Packages are loaded only for names that the core does not have.
    by_name = {one.name: one for one in ENTRIES}
    if name not in by_name:
        by_name = {one.name: one for one in entries()}
    if name not in by_name:
        _refuse_tables(name)
        raise unknown("data set", name, by_name)
    return by_name[name]


def _refuse_tables(name: str) -> None:
    for one in TABLES:
        if one.name == name:
            raise InputError(
                f'"{name}" is a table whose clients come with it, and not a set that is split '
                f'here; an experiment file names it (data.name = "{name}"), and in Python '
                f'fedshift.Task.from_name("{name}", ...). Its package: {one.package.how}'
            )


def _rank_within_class(labels: Tensor) -> Tensor:
    """For each example, how many earlier ones share its label."""
    hot = torch.nn.functional.one_hot(labels)
    return (hot.cumsum(0) - hot).gather(1, labels.unsqueeze(1)).squeeze(1)


_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_FASHION_PAGE = "https://github.com/zalandoresearch/fashion-mnist"

_MINI = Entry(
    name="fashion-mnist-mini",
    summary="Fashion-MNIST's 10,000 test images, 700 + 300 per class",
    classes=_FASHION,
    examples=(7_000, 3_000),
    shape=GREY,
    licence="MIT (Zalando SE)",
    page=_FASHION_PAGE,
    built_in="part of the package",
    read=read_mini,
    content="ee26d3fa314ff1572893dac5942267d722b6e262e606b469d797e4458e2a0952",
)

_FASHION_MNIST = Entry(
    name="fashion-mnist",
    summary="pictures of clothes and shoes",
    classes=_FASHION,
    examples=(60_000, 10_000),
    shape=GREY,
    licence="MIT (Zalando SE)",
    page=_FASHION_PAGE,
    package="dataset-fashion-mnist",
    folders=("fashion-mnist", "FashionMNIST/raw", "fashion"),
    read=idx.read_pair,
    content="51d85b7c3ab26427f60659b1c16eba2251d38e92a4e899a4840bfce6454f6a07",
    remotes=remotes_at(
        # The publisher serves no https here; the digests below and `content` are the protection.
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
)

_MNIST = Entry(
    name="mnist",
    summary="handwritten digits",
    classes=tuple("0123456789"),
    examples=(60_000, 10_000),
    shape=GREY,
    licence="CC BY-SA 3.0 (LeCun, Cortes & Burges)",
    page="http://yann.lecun.com/exdb/mnist/",
    folders=("mnist", "MNIST/raw", "mnist-writers"),
    read=idx.read_pair,
    content="5424a76f224019028733c19ada31ae70102212a000af700efd68269744354e34",
    remotes=remotes_at(
        # LeCun's own server refuses downloads; this copy is the one that torchvision uses.
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
)

_QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"

_MNIST_WRITERS = replace(
    _MNIST,
    name="mnist-writers",
    summary="MNIST with the writer of each digit, 539 + 297 of them",
    licence="CC BY-SA 3.0 (LeCun, Cortes & Burges); labels BSD 3-clause (Facebook)",
    page="https://github.com/facebookresearch/qmnist",
    folders=("mnist-writers", "qmnist", "QMNIST/raw", "MNIST/raw", "mnist"),
    missing=writers.missing_mnist,
    read=partial(writers.samples, writers.mnist),
    writers=writers.mnist,
    remotes=(
        *_MNIST.remotes,
        *remotes_at(
            _QMNIST,
            ("qmnist-train-labels-idx2-int.gz", "0058f8dd561b90ffdd0f734c6a30e5e4", 463_024),
            ("qmnist-test-labels-idx2-int.gz", "5b5b05890a5e13444e108efe57b788aa", 526_800),
        ),
    ),
)

_EMNIST_DIGITS = Entry(
    name="emnist-digits",
    summary="handwritten digits with their writers, from EMNIST",
    classes=writers.DIGITS,
    examples=(240_000, 40_000),
    shape=GREY,
    licence="public domain (NIST); the authors ask to cite Cohen et al. (2017)",
    page="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    by_hand=(
        "download matlab.zip from https://www.nist.gov/itl/products-and-services/emnist-dataset "
        "and put its emnist-digits.mat into emnist/; the other archive has no writers"
    ),
    folders=("emnist", "EMNIST", "emnist-digits", "matlab"),
    missing=writers.missing_emnist,
    read=partial(writers.samples, writers.emnist),
    writers=writers.emnist,
)

_FEMNIST_DIGITS = Entry(
    name="femnist-digits",
    summary="handwritten digits by writer, from LEAF's FEMNIST",
    classes=writers.DIGITS,
    examples=None,
    shape=GREY,
    licence="public domain (NIST); LEAF BSD 2-clause",
    page="https://leaf.cmu.edu/",
    by_hand=(
        "run `./preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in data/femnist of "
        "https://github.com/TalwalkarLab/leaf and put its data/train and data/test into femnist/"
    ),
    self_checked=True,
    folders=("femnist", "FEMNIST", "femnist/data"),
    missing=writers.missing_leaf,
    read=partial(writers.samples, writers.leaf),
    writers=writers.leaf,
)

_CIFAR_10 = Entry(
    name="cifar-10",
    summary="colour photographs of animals and vehicles",
    classes=cifar.CLASSES,
    examples=(50_000, 10_000),
    shape="3 x 32 x 32",
    licence="none stated; the authors ask to cite Krizhevsky (2009)",
    page="https://www.cs.toronto.edu/~kriz/cifar.html",
    folders=("cifar-10-batches-py", "cifar10", "cifar-10"),
    missing=cifar.missing,
    read=cifar.read,
    remotes=(
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            170_498_071,
            members=(
                ("data_batch_1", "c99cafc152244af753f735de768cd75f"),
                ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                ("data_batch_4", "634d18415352ddfa80567beed471001a"),
                ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
                ("test_batch", "40351d587109b95175f43aff81a1287e"),
            ),
        ),
    ),
)

_CIFAR_100 = replace(
    _CIFAR_10,
    name="cifar-100",
    summary="colour photographs of 100 kinds of things",
    classes=cifar100.FINE,
    folders=("cifar-100-python", "cifar100", "cifar-100"),
    missing=cifar100.missing,
    read=cifar100.read_fine,
    remotes=(
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            169_001_437,
            members=(
                ("train", "16019d7e3df5f24257cddd939b257f8d"),
                ("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            ),
        ),
    ),
)

_CIFAR_20 = replace(
    _CIFAR_100,
    name="cifar-20",
    summary="CIFAR-100 with its 20 groups of kinds as classes",
    classes=cifar100.COARSE,
    read=cifar100.read_coarse,
    finer="cifar-100",
)

ENTRIES = (
    _MINI,
    _FASHION_MNIST,
    _MNIST,
    _MNIST_WRITERS,
    _EMNIST_DIGITS,
    _FEMNIST_DIGITS,
    _CIFAR_10,
    _CIFAR_100,
    _CIFAR_20,
)
