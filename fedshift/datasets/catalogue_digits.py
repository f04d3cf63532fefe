"""The handwritten digits of the catalogue: MNIST, and the sets whose writers are known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedshift.datasets import idx, writers
from fedshift.datasets.entry import Entry, remotes_at

GREY = "1 x 28 x 28"

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

DIGITS: tuple[Entry, ...] = (_MNIST, _MNIST_WRITERS, _EMNIST_DIGITS, _FEMNIST_DIGITS)
