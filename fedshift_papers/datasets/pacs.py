"""PACS: seven classes in four styles, from the folder tree or a tar of it, with any known split.

Li et al. 2017, "Deeper, broader and artier domain generalization". Only the listing is read at
first; images are decoded when asked for, so that labels can be counted without Pillow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from fedshift.datasets.base import Samples, damaged
from fedshift.datasets.images import (
    ENDINGS,
    SPLITS,
    Images,
    Ints,
    codes,
    decode,
    read_table,
    rows_of,
    whole_numbers,
)
from fedshift.datasets.store import Store, open_store
from fedshift.errors import DataError
from fedshift.seeds import numpy_generator
from fedshift.shifts.base import largest_remainder

# The benchmark's own numbering of the domains (`domain_remapped`).
DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
COUNTS = {
    "photo": (189, 202, 182, 186, 199, 280, 432),
    "art_painting": (379, 255, 285, 184, 201, 295, 449),
    "cartoon": (389, 457, 346, 135, 324, 288, 405),
    "sketch": (772, 740, 753, 608, 816, 80, 160),
}
SIZE = 96

# id_val and id_test images of each training domain: the benchmark's totals are 284 and 306, of
# which 218 are cartoons and 372 sketches; how each divides in two is chosen, in proportion.
ID_SIZES = {"cartoon": (105, 113), "sketch": (179, 193)}
_ROLE = {"photo": "test", "art_painting": "val", "cartoon": "train", "sketch": "train"}
# One toolbox's loader skips this image, because some copies of the set lack it.
_MAY_LACK = "sketch/dog/n02103406_4068-1.png"
# Ending of a domain's list files, and the label of the first class in them.
_LISTS = (("_kfold.txt", 1), (".txt", 0))

Tree = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Pacs:
    """What there is, not decoded: image j has label y[j], domain[j] of DOMAINS, split[j] of SPLITS.

    `origin` names where the split came from: the table, "lists", or "derived".

    Shapes: y, domain, split int64 [n].
    """

    images: Images
    y: Ints
    domain: Ints
    split: Ints
    origin: str

    def rows(self, *splits: str) -> Ints:
        """Positions of all images of these splits, ascending. InputError for an unknown split."""
        return rows_of(self.split, splits)

    def samples(self, which: Ints, size: int = SIZE) -> Samples:
        """The images at `which` [m], decoded: x uint8 [m, 3, size, size]. See `images.decode`."""
        return Samples(decode(self.images, which, size), torch.from_numpy(self.y[which]))


def scan(path: Path | str, metadata: Path | str | None = None) -> Pacs:
    """List PACS in a folder or an uncompressed tar archive; nothing is decoded.

    The images are `domain/class/name.jpg` (or .png) at any depth. The split is that of `metadata`
    (a table `split,domain,y,path` such as the benchmark's metadata.csv or pcs-a.csv); else of a
    metadata.csv among the files; else of the list files `<domain>_{train,test}_kfold.txt` (labels
    from 1) or `<domain>_{train,test}.txt` (labels from 0); else derived:

    photo is test, art_painting val; of cartoon and sketch, 105 + 179 images are id_val, 113 + 193
    id_test, the rest train, class by class in proportion, drawn once for all. The sizes 5,683, 284
    and 306 are the benchmark's, whose code for a sister set draws a tenth of each class with
    replacement from an unseeded generator, which these sizes agree with: which images it drew
    cannot be derived, only read from its table (chosen).

    Where lists give the split, photo is test, art_painting val, and an image of cartoon or sketch
    that is not in its domain's training list is id_val; id_test is empty (chosen).

    Raises DataError for no images, two trees, or a table or list that does not fit, with its row.
    """
    store = open_store(Path(path))
    tree = _tree(store)
    if metadata is not None:
        text = open_store(Path(metadata).parent).read(Path(metadata).name)
        return _from_table(store, tree, text, Path(metadata))
    if any(os.path.basename(name) == "metadata.csv" for name in store.names()):
        table = _only(store, "metadata.csv")
        return _from_table(store, tree, store.read(table), store.place / table)
    listed = _lists(store)
    return _from_lists(store, tree, *listed) if listed else _derived(store, tree)


def read(path: Path, size: int = SIZE) -> tuple[Samples, Samples]:
    """(train, test) of the complete set, at size x size (96 is chosen: small enough for a CPU).

    Raises DataError where the images of a domain and class are not as many as in PACS.
    """
    listing = scan(path)
    check_complete(listing)
    return listing.samples(listing.rows("train"), size), listing.samples(listing.rows("test"), size)


def check_complete(listing: Pacs) -> None:
    """Raises DataError unless every domain holds the published number of every class."""
    for d, domain in enumerate(DOMAINS):
        counts = np.bincount(listing.y[listing.domain == d], minlength=len(CLASSES))
        for name, count, official in zip(CLASSES, counts, COUNTS[domain], strict=True):
            if count != official:
                raise damaged(
                    listing.images.store.place,
                    f"{domain}/{name} has {count} images, PACS has {official}",
                )


def missing(path: Path) -> tuple[str, ...]:
    """The domains whose folder is missing. An archive is not opened, and counts as complete."""
    if os.path.isfile(path):
        return ()
    tops = [path, *(path / sub for sub in ("images", "kfold", "PACS", "pacs96"))]
    return tuple(
        f"{domain}/" for domain in DOMAINS if not any(os.path.isdir(t / domain) for t in tops)
    )


def _tree(store: Store) -> Tree:
    """Every image's name in the store by its `domain/class/file`."""
    # By the last three parts: archives of the set differ in the folders above them.
    tree: dict[str, str] = {}
    for name in store.names():
        parts = name.split("/")[-3:]
        is_image = len(parts) == 3 and parts[0] in DOMAINS and parts[1] in CLASSES
        hidden = parts[-1].startswith(".")
        key = "/".join(parts)
        if not is_image or hidden or not name.lower().endswith(ENDINGS):
            continue
        if key in tree:
            raise damaged(store.place, f"holds {key} twice: {tree[key]} and {name}; keep one tree")
        tree[key] = name
    if not tree:
        raise DataError(
            f"{store.place}: no images DOMAIN/CLASS/name.jpg or .png with a domain of "
            f"{', '.join(DOMAINS)} and a class of {', '.join(CLASSES)}. Replace the path by the "
            "folder or archive that holds them."
        )
    return tree


def _listing(
    store: Store, tree: Tree, keys: Iterable[str], split: Ints, rows: Iterable[str], origin: str
) -> Pacs:
    keys = tuple(keys)
    parts = [key.split("/") for key in keys]
    return Pacs(
        Images(store, tuple(tree[key] for key in keys), tuple(rows)),
        np.array([CLASSES.index(p[1]) for p in parts], dtype=np.int64),
        np.array([DOMAINS.index(p[0]) for p in parts], dtype=np.int64),
        split,
        origin,
    )


def _from_table(store: Store, tree: Tree, raw: bytes, where: Path) -> Pacs:
    table = read_table(raw, where, ("split", "domain", "y", "path"))
    split = codes(table["split"], SPLITS, where, "split")
    domains = codes(table["domain"], DOMAINS, where, "domain")
    labels = whole_numbers(table["y"], where, "y")
    keys = ["/".join(path.split("/")[-3:]) for path in table["path"]]
    for k, (key, domain, label) in enumerate(zip(keys, domains, labels, strict=True), 1):
        _check(where, k, key, tree)
        named = f"{DOMAINS[domain]}/{CLASSES[label] if label < len(CLASSES) else label}"
        if key.rpartition("/")[0] != named:
            raise damaged(where, f"row {k}: {key} is listed as {named}")
    _check_once(where, keys)
    rows = (f"row {k} of {where.name}" for k in range(1, len(keys) + 1))
    return _listing(store, tree, keys, split, rows, where.name)


def _check(where: Path, row: int, key: str, tree: Tree) -> None:
    if key not in tree:
        raise damaged(where, f"row {row}: {key} is not among the images")


def _check_once(where: Path, keys: list[str]) -> None:
    # The quick test first: the loop is only for the message.
    if len(set(keys)) < len(keys):
        earlier: set[str] = set()
        for k, key in enumerate(keys, 1):
            if key in earlier:
                raise damaged(where, f"row {k}: {key} is listed before as well")
            earlier.add(key)


def _lists(store: Store) -> tuple[dict[str, tuple[str, str]], int] | None:
    """Each domain's (training list, whole list) and the first class's label, if all are there."""
    there = {os.path.basename(name) for name in store.names()}
    for ending, first in _LISTS:
        wanted = {d: (f"{d}_train{ending}", f"{d}_test{ending}") for d in DOMAINS}
        if there.issuperset(chain.from_iterable(wanted.values())):
            return {d: (_only(store, a), _only(store, b)) for d, (a, b) in wanted.items()}, first
    return None


def _only(store: Store, file: str) -> str:
    """The name in the store of the file called so, of which there is one at least.

    Raises DataError for two that differ: nothing says which of them is meant.
    """
    first, *others = (name for name in store.names() if os.path.basename(name) == file)
    for other in others:
        if store.read(other) != store.read(first):
            raise damaged(store.place, f"holds {file} twice: {first} and {other}; keep one")
    return first


def _from_lists(store: Store, tree: Tree, lists: dict[str, tuple[str, str]], first: int) -> Pacs:
    split: dict[str, str] = {}
    rows: dict[str, str] = {}
    for domain, (train, whole) in lists.items():
        training = _read_list(store, tree, train, first)
        for key, row in _read_list(store, tree, whole, first).items():
            validates = _ROLE[domain] == "train" and key not in training
            split[key], rows[key] = "id_val" if validates else _ROLE[domain], row
    keys = sorted(split)
    number = np.array([SPLITS.index(split[key]) for key in keys], dtype=np.int64)
    return _listing(store, tree, keys, number, (rows[key] for key in keys), "lists")


def _read_list(store: Store, tree: Tree, name: str, first: int) -> dict[str, str]:
    """Images that a list names, `path label` a line, with where it names them."""
    where = store.place / name
    listed: dict[str, str] = {}
    for k, line in enumerate(store.read(name).decode("utf-8", "replace").splitlines(), 1):
        path, _, label = line.strip().rpartition(" ")
        key = "/".join(path.split("/")[-3:])
        if not line.strip() or (key == _MAY_LACK and key not in tree):
            continue
        _check(where, k, key, tree)
        right = CLASSES.index(key.split("/")[1]) + first
        if label != str(right):
            raise damaged(where, f'row {k}: {key} has the label "{label}", expected {right}')
        listed[key] = f"row {k} of {os.path.basename(name)}"
    return listed


def _derived(store: Store, tree: Tree) -> Pacs:
    keys = sorted(tree)
    split = np.array([SPLITS.index(_ROLE[key.split("/")[0]]) for key in keys], dtype=np.int64)
    for domain, sizes in ID_SIZES.items():
        for name, part in zip(("id_val", "id_test"), _hold_out(keys, domain, sizes), strict=True):
            split[part] = SPLITS.index(name)
    rows = (f"image {k} of the tree in sorted order" for k in range(1, len(keys) + 1))
    return _listing(store, tree, keys, split, rows, "derived")


def _hold_out(keys: list[str], domain: str, sizes: tuple[int, int]) -> tuple[Ints, Ints]:
    """Positions of the id_val and id_test images of one domain, class by class in proportion."""
    label = np.array(
        [CLASSES.index(k.split("/")[1]) if k.startswith(f"{domain}/") else -1 for k in keys]
    )
    counts = np.bincount(label[label >= 0], minlength=len(CLASSES))
    n = int(counts.sum())
    # A part of the set (one class removed) keeps the shares of the whole.
    wanted = [round(size * n / sum(COUNTS[domain])) for size in sizes]
    val, test = (largest_remainder(counts / max(n, 1) * size) for size in wanted)
    drawn = [
        # No run seed: the split is part of the data set, and the same for all runs.
        numpy_generator("pacs", domain, y).permutation(np.flatnonzero(label == y))
        for y in range(len(CLASSES))
    ]
    return (
        np.concatenate([d[: val[y]] for y, d in enumerate(drawn)]),
        np.concatenate([d[val[y] : val[y] + test[y]] for y, d in enumerate(drawn)]),
    )
