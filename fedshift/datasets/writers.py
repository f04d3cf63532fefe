"""Handwritten digits whose writers are known: MNIST with QMNIST's labels, EMNIST, LEAF's FEMNIST.

All three come from NIST Special Database 19. Images are uint8 [n, 1, 28, 28], ink bright on black,
upright; each part is a `Sites` whose sites are the writers, named as in the files.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedshift.datasets import idx
from fedshift.datasets.base import Samples, damaged, read_whole
from fedshift.datasets.sites import Sites
from fedshift.datasets.store import Folder
from fedshift.errors import DataError

DIGITS = tuple("0123456789")
PARTS = ("train", "test")
PIXELS = 28 * 28

_QMNIST = {part: f"qmnist-{part}-labels-idx2-int" for part in PARTS}
_MNIST = {"train": "train", "test": "t10k"}
# Columns of QMNIST's label table, and how many it has.
_CLASS, _WRITER, _COLUMNS = 0, 2, 8

_EMNIST = "emnist-digits.mat"
_EMNIST_FIELDS = ("images", "labels", "writers")

_LEAF_CLASSES = 62


class Drawn(NamedTuple):
    """One writer's digits: images [n, 28, 28], labels [n], and the writer's id n times."""

    images: NDArray[Any]
    labels: NDArray[Any]
    writer: NDArray[Any]


def mnist(folder: Path) -> tuple[Sites, Sites]:
    """(train, test) of MNIST with its writers, from the idx files and QMNIST's extended labels.

    Row j of qmnist-{train,test}-labels-idx2-int describes image j of MNIST's part; its first column
    is the class, its third the writer. QMNIST's test labels go on after MNIST's 10,000 images. 539
    writers wrote the 60,000 training images, 297 others the test images.

    Source: Yadav and Bottou 2019, "Cold case: the lost MNIST digits", arXiv 1905.10498.
    Raises DataError for a missing or damaged file, and labels that are not those of the images.
    """
    train, test = (_with_writers(folder, part) for part in PARTS)
    return train, test


def _with_writers(folder: Path, part: str) -> Sites:
    samples = idx.read_samples(folder, _MNIST[part], len(DIGITS))

    def writers_of(path: Path) -> NDArray[Any]:
        return _writers(path, part, samples)

    writer = read_whole(idx.existing(folder, _QMNIST[part]), writers_of)
    return _sites(samples.x, samples.y, writer)


def _writers(path: Path, part: str, samples: Samples) -> NDArray[Any]:
    """QMNIST's writer of each image, int64 [n]."""
    table = idx.read_integers(path, 2)
    if table.shape[1] != _COLUMNS or len(table) < len(samples):
        raise damaged(
            path,
            f"holds {len(table):,} rows of {table.shape[1]} columns; expected {_COLUMNS} columns "
            f"and a row for each of the {len(samples):,} images",
        )
    # QMNIST's test table goes on where MNIST's images end.
    table = table[: len(samples)]
    # Writers of other images would be a wrong split, which no later check could see.
    wrong = (table[:, _CLASS] != samples.y).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise damaged(
            path,
            f"row {row} is of class {int(table[row, _CLASS])}, image {row} of "
            f"{_MNIST[part]} is labelled {int(samples.y[row])}: these are not MNIST's labels",
        )
    writers: NDArray[Any] = table[:, _WRITER].numpy()
    return writers


def missing_mnist(folder: Path) -> tuple[str, ...]:
    """What `folder` lacks of the idx files and QMNIST's labels."""
    labels = tuple(f"{stem}[.gz]" for stem in _QMNIST.values() if not idx.find(folder, stem))
    return (*idx.missing(folder), *labels)


def emnist(folder: Path) -> tuple[Sites, Sites]:
    """(train, test) of EMNIST Digits, from emnist-digits.mat of the publishers' matlab.zip.

    A version 5 file with a struct `dataset` of `train` and `test`, each with images [n, 784] in
    bytes, column by column, labels [n, 1] and writers [n, 1], whole numbers of any type. The idx
    files of gzip.zip have no writers, and their images lie on their side. Letters and other parts
    are not read.

    Source: Cohen, Afshar, Tapson and van Schaik 2017, "EMNIST", arXiv 1702.05373. The layout is the
    one that public loaders read; no real copy was at hand.
    Raises DataError for a missing or damaged file, and fields that are not as above.
    """
    paths = [path for path in _emnist_places(folder) if os.path.isfile(path)]
    if not paths:
        raise damaged(folder / _EMNIST, "no such file")
    return read_whole(paths, _emnist_file)


def _emnist_file(path: Path) -> tuple[Sites, Sites]:
    from scipy.io import loadmat

    raw = Folder(path.parent).read(path.name)
    # scipy's reader raises a different exception for each kind of damage.
    try:
        content = loadmat(io.BytesIO(raw), simplify_cells=True)["dataset"]
        train, test = ({k: np.asarray(content[p][k]) for k in _EMNIST_FIELDS} for p in PARTS)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise damaged(path, f"not EMNIST's dataset of train and test ({reason})") from error
    return _emnist_part(path, "train", train), _emnist_part(path, "test", test)


def _emnist_part(path: Path, part: str, fields: dict[str, NDArray[Any]]) -> Sites:
    images, labels, writers = (fields[name] for name in _EMNIST_FIELDS)
    n, whole = labels.size, _whole(labels) and _whole(writers)
    # For a single image scipy drops an axis.
    shape = (1, *images.shape) if images.ndim == 1 else images.shape
    if images.dtype != np.uint8 or shape != (n, PIXELS) or writers.size != n or not whole:
        hint = "; here every column is an image: transpose them" if shape == (PIXELS, n) else ""
        raise damaged(
            path,
            f"{part} has images {images.dtype} {list(images.shape)}, labels {labels.dtype} "
            f"{list(labels.shape)} and writers {writers.dtype} {list(writers.shape)}; expected "
            f"uint8 [n, 784] and whole numbers [n, 1]{hint}",
        )
    # Column by column: the first of the two pixel axes runs fastest.
    upright = images.reshape(n, 28, 28).transpose(0, 2, 1)
    y = _labels(path, f"{part}.labels", labels.reshape(-1).astype(np.int64), len(DIGITS))
    x = torch.from_numpy(np.ascontiguousarray(upright)).unsqueeze(1)
    return _sites(x, y, writers.reshape(-1).astype(np.int64))


def _whole(values: NDArray[Any]) -> bool:
    """Whether all are whole numbers; Matlab's own numbers are floats."""
    if np.issubdtype(values.dtype, np.floating):
        return bool((np.abs(values) < 2**53).all() and (values == np.rint(values)).all())
    return np.issubdtype(values.dtype, np.integer)


def _emnist_places(folder: Path) -> tuple[Path, ...]:
    return folder / _EMNIST, folder / "matlab" / _EMNIST


def missing_emnist(folder: Path) -> tuple[str, ...]:
    """emnist-digits.mat, where neither `folder` nor its matlab/ has it."""
    return () if any(os.path.isfile(p) for p in _emnist_places(folder)) else (_EMNIST,)


def leaf(folder: Path) -> tuple[Sites, Sites]:
    """(train, test) of FEMNIST's digits, from train/*.json and test/*.json as LEAF writes them.

    Each file is {"users": [ids], "num_samples": [counts], "user_data": {id: {"x": [[784 floats]],
    "y": [labels]}}}, rows first, paper 1.0 and ink dark; here 255 (1 - x), rounded. Labels 0 to 9
    are digits and kept, 10 to 61 are letters and left out. Files are read one at a time; one of
    100 writers takes about 2 GB while it is read.

    Source: Caldas et al. 2018, "LEAF: a benchmark for federated settings", arXiv 1812.01097, and
    its data/femnist. Its preprocessing is known to list the first image of most writers twice; what
    the files hold is given as it is. No real copy was at hand.
    Raises DataError for a missing or damaged file, one with other content, and a writer that is in
    two files of a part or twice in one.
    """
    train, test = (_leaf_part(folder, part) for part in PARTS)
    return train, test


def _leaf_part(folder: Path, part: str) -> Sites:
    files = _leaf_files(folder / part)
    if not files:
        raise damaged(folder / part, "has no .json file")
    entries = []
    file_of: dict[str, Path] = {}
    for path in files:
        for user, entry in _leaf_file(path).items():
            if user in file_of:
                raise damaged(
                    path,
                    f'user "{user}" is in {file_of[user].name} as well; keep the files of one run '
                    "of preprocess.sh",
                )
            file_of[user] = path
            entries.append(entry)
    x, y, writer = (np.concatenate([entry[k] for entry in entries]) for k in range(3))
    if not len(y):
        raise damaged(folder / part, "has no digit (labels 0 to 9)")
    return _sites(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y), writer)


def _leaf_files(place: Path) -> list[Path]:
    """The .json files of a part, sorted. Raises DataError for packed or partial ones among them."""
    # ".json" anywhere in the name: a packed part that is left out would be a smaller data set.
    files = sorted(path for path in place.glob("[!.]*") if ".json" in path.name.lower())
    others = [path for path in files if not _is_json(path)]
    if others:
        raise damaged(others[0], "not a .json file: unpack it, or remove it if it is not whole")
    return files


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _leaf_file(path: Path) -> dict[str, Drawn]:
    """The digits of each writer."""
    try:
        content = json.loads(
            Folder(path.parent).read(path.name), object_pairs_hook=_without_repeats
        )
        _check_keys(path, "", content, ("users", "num_samples", "user_data"))
        users, sizes, data = (content[k] for k in ("users", "num_samples", "user_data"))
        if len(users) != len(sizes):
            raise damaged(path, f"num_samples has {len(sizes)} entries for {len(users)} users")
        _check_users(path, users, data)
        counts = zip(users, sizes, strict=True)
        return {user: _leaf_user(path, user, data[user], count) for user, count in counts}
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"not in LEAF's layout ({type(error).__name__}: {error})") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise damaged(path, f"not a complete JSON file ({error})") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated names: Python would silently drop the first of two."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in content if names.count(name) > 1)
        raise ValueError(f'"{repeated}" is there twice')
    return content


def _check_keys(path: Path, what: str, content: Mapping[str, Any], keys: Sequence[str]) -> None:
    absent = [key for key in keys if key not in content]
    if absent:
        raise damaged(path, f"{what}has no {', '.join(absent)}; LEAF writes {', '.join(keys)}")


def _check_users(path: Path, users: Sequence[str], data: Mapping[str, Any]) -> None:
    """Raises DataError unless each user is listed once and exactly these users have data."""
    if not users:
        raise damaged(path, "lists no users")
    repeated = [user for user, number in Counter(users).items() if number > 1]
    if repeated:
        raise damaged(path, f'lists user "{repeated[0]}" twice')
    for names, others, problem in (
        (users, data, "is among users, but not in user_data"),
        (data, set(users), "is in user_data, but not among users"),
    ):
        absent = [user for user in names if user not in others]
        if absent:
            raise damaged(path, f'"{absent[0]}" {problem}')


def _leaf_user(path: Path, user: str, data: dict[str, Any], count: int) -> Drawn:
    _check_keys(path, f"user {user} ", data, ("x", "y"))
    n = len(data["y"])
    try:
        paper = np.asarray(data["x"], dtype=np.float64)
    except ValueError as error:
        raise damaged(path, f"user {user}: x is not {n} times 784 numbers") from error
    if n and paper.shape != (n, PIXELS):
        shape = " x ".join(map(str, paper.shape))
        raise damaged(path, f"user {user}: x is not {n} times 784 numbers, but {shape}")
    # LEAF has paper bright; the other sets have ink bright.
    ink = 1.0 - paper.reshape(n, 28, 28)
    if len(ink) != count:
        raise damaged(path, f"user {user} has {len(ink)} images; num_samples says {count}")
    if len(ink) and not (ink.min() >= 0.0 and ink.max() <= 1.0):
        raise damaged(path, f"user {user}: values of x outside 0 to 1")
    y = _labels(path, f"user {user}: y", data["y"], _LEAF_CLASSES).numpy()
    digit = y < len(DIGITS)
    images = np.rint(255.0 * ink[digit]).astype(np.uint8)
    return Drawn(images, y[digit], np.full(int(digit.sum()), user))


def missing_leaf(folder: Path) -> tuple[str, ...]:
    """train/*.json and test/*.json, where there is no such file."""
    return tuple(
        f"{part}/*.json" for part in PARTS if not any(map(_is_json, (folder / part).glob("*")))
    )


def samples(read: Callable[[Path], tuple[Sites, Sites]], folder: Path) -> tuple[Samples, Samples]:
    """(train, test) of a folder without the writers; `read` is `mnist`, `emnist` or `leaf`."""
    train, test = read(folder)
    return Samples(train.x, train.y), Samples(test.x, test.y)


def _sites(x: Tensor, y: Tensor, writer: NDArray[Any]) -> Sites:
    """Writers numbered in the order of their ids, as numbers or as texts."""
    # Sites are numbered by the sorted ids, whatever the order of the files.
    ids, number = np.unique(writer, return_inverse=True)
    site = torch.from_numpy(number.astype(np.int64).reshape(-1))
    return Sites(x, y, site, tuple(map(str, ids.tolist())), DIGITS)


def _labels(path: Path, what: str, values: ArrayLike, classes: int) -> Tensor:
    """int64 labels. Raises DataError unless they are whole numbers from 0 to classes - 1."""
    y = np.asarray(values)
    if y.ndim != 1 or (y.size and not np.issubdtype(y.dtype, np.integer)):
        raise damaged(path, f"{what} holds {y.dtype} {list(y.shape)}; expected whole numbers [n]")
    if y.size and not 0 <= y.min() <= y.max() < classes:
        raise damaged(path, f"{what} from {y.min()} to {y.max()}; allowed: 0 to {classes - 1}")
    return torch.from_numpy(y.astype(np.int64))
