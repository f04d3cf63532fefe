"""RETINA: glaucoma or not, on pictures of the optic disc from three hospitals' collections.

ACRIMA (Diaz-Pinto et al. 2019), RIM-ONE DL (Fumero et al. 2020) and REFUGE (Orlando et al. 2020),
as Huang et al. (FedLGD) put them together and Wang et al. 2026 (FedDRM), arXiv 2509.23049, use
them: three clients, without FedLGD's fourth, Drishti. Only names are read at first; images are
decoded when asked for.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedshift.datasets.base import Samples, damaged
from fedshift.datasets.images import OTHER_ENDINGS, Images, Ints, codes, decode, is_image
from fedshift.datasets.sites import TEST_SHARE, Sites, SiteSplit, pooled, split_sites
from fedshift.datasets.store import Store, open_store
from fedshift.errors import DataError
from fedshift_papers.datasets.sheet import read_sheet

SITES = ("ACRIMA", "RIM-ONE", "REFUGE")
CLASSES = ("normal", "glaucoma")
SIZE = 96

# Images without and with glaucoma in the original sets; of REFUGE, each of three parts counts.
COUNTS = {"ACRIMA": ((309, 396),), "RIM-ONE": ((313, 172),), "REFUGE": ((360, 40),) * 3}

# What the FedDRM paper prints as each site's class ratio, of the tree that FedLGD made.
PRINTED_RATIOS = {"ACRIMA": 1.34, "RIM-ONE": 1.94, "REFUGE": 0.46}

# "kaggle_arima" is how the authors' folder for ACRIMA is spelled; the others are the sets' names.
_FOLDERS = {"kaggle_arima": 0, "acrima": 0, "rim": 1, "rim-one": 1, "refuge": 2}
_PARTS = ("training", "testing")
_GLAUCOMA = ("glaucoma", "glaucomatous")
_NORMAL = ("normal", "nonglaucoma", "noglaucoma", "healthy")

_ACRIMA = re.compile(r"im\d{3}(_g)?_acrima\.(jpe?g|png)")
_PARTITIONS = ("partitioned_randomly", "partitioned_by_hospital")
_UNLABELLED = re.compile(r"([VT])\d{4}\.jpe?g", re.IGNORECASE)
# The spreadsheet with the labels of REFUGE's images V0001.jpg ... and T0001.jpg ..., its column.
_SHEETS = {
    "V": ("Fovea_locations", "Glaucoma Label"),
    "T": ("Glaucoma_label_and_Fovea_location", "Label(Glaucoma=1)"),
}


class Picture(NamedTuple):
    """One image: its name in the store, its class, and the place that names it, for messages."""

    name: str
    label: str
    row: str


Listed = Mapping[str, Picture]


class Ratio(NamedTuple):
    """A site's numbers of images in its publisher's layout, and the ratio that the paper prints."""

    site: str
    normal: int
    glaucoma: int
    printed: float

    @property
    def sick(self) -> float:
        """Images with glaucoma for each without."""
        return self.glaucoma / self.normal


def ratios() -> tuple[Ratio, ...]:
    """The numbers of every site, over all parts of its publisher's layout."""
    sums = {site: tuple(map(sum, zip(*parts, strict=True))) for site, parts in COUNTS.items()}
    return tuple(Ratio(site, n, g, PRINTED_RATIOS[site]) for site, (n, g) in sums.items())


def ratios_text() -> str:
    """The ratios in words, in both directions: the paper does not say which direction it prints."""
    each = (
        f"{r.site} {r.glaucoma} with and {r.normal} without glaucoma, {r.sick:.2f} or inverted "
        f"{1 / r.sick:.2f} (the paper {r.printed:.2f})"
        for r in ratios()
    )
    return "in the publishers' layouts " + "; ".join(each)


@dataclass(frozen=True, eq=False)
class Retina:
    """What there is, not decoded: image j has label y[j] of `classes` and site[j] of SITES.

    `original` says of each site whether it was read from the publishers' own layout.

    Shapes: y, site int64 [n], sorted by site and, in it, by name.
    """

    images: Images
    y: Ints
    site: Ints
    classes: tuple[str, ...]
    original: tuple[bool, ...]

    def sites(self, size: int = SIZE) -> Sites:
        """All images, decoded: x uint8 [n, 3, size, size]. See `images.decode` for errors.

        Bytes as they are: no channel is normalised with the statistics of its site. The authors'
        code does so for test images as well, which tells a router the site that it is to find; a
        server does not know it before routing. What follows, x/127.5 - 1, is the same for all.
        """
        x = decode(self.images, np.arange(len(self.y)), size)
        y, site = torch.from_numpy(self.y), torch.from_numpy(self.site)
        return Sites(x, y, site, SITES, self.classes)


def scan(path: Path | str) -> Retina:
    """List the three sites in a folder or an uncompressed tar archive; nothing is decoded.

    A site is read from FedLGD's tree, {kaggle_arima,RIM,REFUGE}/{Training,Testing}/CLASS/name.jpg
    (or .png), where both parts count as one; or from its original layout, at any depth:

    ACRIMA   Im001_ACRIMA.jpg, Im310_g_ACRIMA.jpg: _g marks glaucoma
    RIM-ONE  {partitioned_randomly,partitioned_by_hospital}/{training,test}_set/{glaucoma,normal}/,
             the first of the two partitions that is there: they hold the same images
    REFUGE   Training400/{Glaucoma,Non-Glaucoma}/; V0001.jpg ... with Fovea_locations.xlsx, and
             T0001.jpg ... with Glaucoma_label_and_Fovea_location.xlsx (or .csv of that name)

    The label is 1 for glaucoma. Class folders of the tree may have any two names, the same at every
    site; those that are not known to mean glaucoma and its absence are numbered in sorted order.

    Raises DataError for a site that is absent or there twice, not two classes, classes that differ
    between sites, and a missing or damaged spreadsheet, with its row.
    """
    store = open_store(Path(path))
    # A Mac's archive has a shadow ._name of every file, in a folder __MACOSX.
    names = [name for name in store.names() if is_image(name) and "__MACOSX" not in name]
    trees = [_tree(store, names, i) for i in range(len(SITES))]
    _check_read(store)
    # An image of the tree is not looked for again in an original layout.
    taken = {entry.name for tree in trees for entry in tree.values()}
    rest = [name for name in names if name not in taken]
    layouts: tuple[Callable[[Store, list[str]], Listed], ...] = (_acrima, _rim_one, _refuge)
    originals = [layout(store, rest) for layout in layouts]
    for site, tree, original in zip(SITES, trees, originals, strict=True):
        _check_once(store, site, tree, original)
    listed = [tree or original for tree, original in zip(trees, originals, strict=True)]
    return _retina(store, listed, _classes(store, listed), tuple(map(bool, originals)))


def federated(
    listing: Retina, seed: int = 0, test: float = TEST_SHARE, size: int = SIZE
) -> tuple[Sites, SiteSplit]:
    """The three sites as clients: all images, with each client's training and test rows.

    The tree's parts Training and Testing are put together and divided anew by `split_sites`, as in
    the authors' code.

    Raises InputError for a site with too few images to divide, DataError as `Retina.sites`.
    """
    split = split_sites(listing.site, len(SITES), seed, test)
    return listing.sites(size), split


def at_sites(place: Path, seed: int, test: float) -> tuple[Sites, SiteSplit]:
    """The sites of a folder or archive with their split; the catalogue's form of `federated`."""
    return federated(scan(place), seed, test)


def read(path: Path) -> tuple[Samples, Samples]:
    """(train, test) of the three sites together at 96 x 96, divided with seed 0.

    Raises DataError where a site in its original layout has not the published number of images.
    """
    listing = scan(path)
    check_complete(listing)
    return pooled(*federated(listing))


def check_complete(listing: Retina) -> None:
    """Raises DataError unless all sites in their original layout have the published counts.

    Of REFUGE one, two or three parts of 400 images may be there. How many images FedLGD's tree
    holds is not published, so nothing is asked of it.
    """
    for i, site in enumerate(SITES):
        counts = np.bincount(listing.y[listing.site == i], minlength=2)
        # REFUGE has three parts of one size, of which one, two or all may be there.
        steps = np.cumsum(COUNTS[site], axis=0)
        if listing.original[i] and not (counts == steps).all(1).any():
            right = " or ".join(f"{n} and {g}" for n, g in steps)
            raise damaged(
                listing.images.store.place,
                f"{site} has {counts[0]} images without and {counts[1]} with glaucoma; the "
                f"original has {right}",
            )


def missing(path: Path) -> tuple[str, ...]:
    """The sites of which `path` shows no sign; an archive is not opened."""
    if os.path.isfile(path):
        return ()
    signs = (
        ("kaggle_arima", "ACRIMA", "Database"),
        ("RIM", "RIM-ONE", "RIM-ONE_DL_images", *_PARTITIONS),
        ("REFUGE", "Training400", "REFUGE-Training400"),
    )
    return tuple(
        f"{site}/"
        for site, folders in zip(SITES, signs, strict=True)
        if not any(
            os.path.isdir(path / sub / f) for sub in (".", "retina_balanced") for f in folders
        )
    )


def _tree(store: Store, names: Iterable[str], site: int) -> Listed:
    """Images of FedLGD's tree by the last four parts of their names."""
    pictures: dict[str, Picture] = {}
    for name in names:
        parts = name.split("/")[-4:]
        if len(parts) < 4 or _FOLDERS.get(parts[0].casefold()) != site:
            continue
        if parts[1].casefold() in _PARTS:
            _add(store, pictures, "/".join(parts), Picture(name, _class(parts[2]), ""))
    return pictures


def _check_read(store: Store) -> None:
    """Raises DataError for images of the tree in a format that is not read: how many images there
    should be is not published, so that they would not be missed."""
    others = [name for name in store.names() if name.lower().endswith(OTHER_ENDINGS)]
    passed = [name for i in range(len(SITES)) for name in _tree(store, others, i).values()]
    if passed:
        raise damaged(
            store.place,
            f"holds {passed[0].name}, which is no JPEG or PNG file ({len(passed)} of them); "
            "convert them to PNG",
        )


def _class(folder: str) -> str:
    """ "glaucoma" or "normal" where the name says so, else the name."""
    # "Non-Glaucoma" and "nonglaucoma" are one name.
    plain = re.sub(r"[^a-z]", "", folder.casefold())
    return "glaucoma" if plain in _GLAUCOMA else "normal" if plain in _NORMAL else folder


def _acrima(store: Store, names: Iterable[str]) -> Listed:
    pictures: dict[str, Picture] = {}
    for name in names:
        match = _ACRIMA.fullmatch(os.path.basename(name).casefold())
        if match:
            label = "glaucoma" if match.group(1) else "normal"
            _add(store, pictures, os.path.basename(name), Picture(name, label, ""))
    return pictures


def _rim_one(store: Store, names: Iterable[str]) -> Listed:
    pictures: dict[str, dict[str, Picture]] = {partition: {} for partition in _PARTITIONS}
    for name in names:
        parts = name.split("/")[-4:]
        if len(parts) == 4 and parts[0] in pictures and parts[1] in ("training_set", "test_set"):
            _add(store, pictures[parts[0]], "/".join(parts), Picture(name, _class(parts[2]), ""))
    return next((listed for listed in pictures.values() if listed), {})


def _refuge(store: Store, names: Iterable[str]) -> Listed:
    pictures: dict[str, Picture] = {}
    unlabelled: dict[str, dict[str, str]] = {part: {} for part in _SHEETS}
    for name in names:
        parts = name.split("/")
        match = _UNLABELLED.fullmatch(parts[-1])
        if len(parts) > 2 and parts[-3] == "Training400":
            _add(store, pictures, parts[-1], Picture(name, _class(parts[-2]), ""))
        elif match:
            if parts[-1] in unlabelled[match.group(1).upper()]:
                raise _twice(store, parts[-1], unlabelled[match.group(1).upper()][parts[-1]], name)
            unlabelled[match.group(1).upper()][parts[-1]] = name
    for part, images in unlabelled.items():
        if images:
            pictures |= _with_sheet(store, images, *_SHEETS[part])
    return pictures


def _with_sheet(store: Store, images: Mapping[str, str], stem: str, column: str) -> Listed:
    """The images (file name -> name in the store) with the labels of the sheet called `stem`."""
    sheets = [n for n in store.names() if _is_sheet(n, stem)]
    if not sheets:
        first = min(images)
        raise damaged(
            store.place,
            f"holds {len(images)} images such as {first}, but not their labels, {stem}.xlsx",
        )
    where = store.place / sheets[0]
    table = read_sheet(store.read(sheets[0]), where, ("ImgName", column))
    labels = codes(table[column], ("0", "1"), where, column)
    pictures: dict[str, Picture] = {}
    for k, (image, label) in enumerate(zip(table["ImgName"], labels, strict=True), 1):
        if image not in images:
            raise damaged(where, f"row {k}: {image} is not among the images")
        if image in pictures:
            raise damaged(where, f"row {k}: {image} is listed before as well")
        pictures[image] = Picture(images[image], CLASSES[label], f"row {k} of {where.name}")
    unnamed = sorted(set(images) - set(pictures))
    if unnamed:
        raise damaged(where, f"has no row for {unnamed[0]} ({len(unnamed)} images without a label)")
    return pictures


def _is_sheet(name: str, stem: str) -> bool:
    base, ending = os.path.splitext(os.path.basename(name).casefold())
    return base == stem.casefold() and ending in (".xlsx", ".csv")


def _add(store: Store, pictures: dict[str, Picture], key: str, entry: Picture) -> None:
    if key in pictures:
        raise _twice(store, key, pictures[key].name, entry.name)
    pictures[key] = entry


def _twice(store: Store, key: str, first: str, second: str) -> DataError:
    return damaged(store.place, f"holds {key} twice: {first} and {second}; keep one of them")


def _check_once(store: Store, site: str, tree: Listed, original: Listed) -> None:
    if tree and original:
        first, second = (min(listed.values()).name for listed in (tree, original))
        raise _twice(store, site, first, second)
    if not tree and not original:
        raise DataError(
            f"{store.place}: no images of {site}: neither in FedLGD's tree, FOLDER/Training/CLASS/"
            f"name.jpg with a FOLDER of {', '.join(_FOLDERS)}, nor in {site}'s original layout. "
            "Replace the path by the folder or archive that holds all three sites."
        )


def _classes(store: Store, listed: Iterable[Listed]) -> tuple[str, ...]:
    """The two classes, which must be the same at every site."""
    by_site: dict[str, tuple[str, ...]] = {}
    for site, entries in zip(SITES, listed, strict=True):
        names = Counter(entry.label for entry in entries.values())
        if len(names) != 2:
            raise damaged(
                store.place, f"{site} has the classes {', '.join(sorted(names))}; two are expected"
            )
        by_site[site] = CLASSES if set(names) == set(CLASSES) else tuple(sorted(names))
    first = by_site[SITES[0]]
    for site, names_here in by_site.items():
        if names_here != first:
            raise damaged(
                store.place,
                f"{SITES[0]} has the classes {' and '.join(first)}, but {site} has "
                f"{' and '.join(names_here)}",
            )
    return first


def _retina(
    store: Store, listed: list[Listed], classes: tuple[str, ...], original: tuple[bool, ...]
) -> Retina:
    rows = [(i, key) for i, entries in enumerate(listed) for key in sorted(entries)]
    entries = [listed[i][key] for i, key in rows]
    where = tuple(e.row or f"{SITES[i]}'s {key}" for e, (i, key) in zip(entries, rows, strict=True))
    return Retina(
        Images(store, tuple(entry.name for entry in entries), where),
        np.array([classes.index(entry.label) for entry in entries], dtype=np.int64),
        np.array([i for i, _ in rows], dtype=np.int64),
        classes,
        original,
    )
