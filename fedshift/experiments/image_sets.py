"""The FedPALS paper's tasks on PACS and iWildCam: who holds which image, and what the target is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.datasets import Dataset, Samples, catalogue, content_sha256, find, iwildcam, pacs
from fedshift.datasets.images import check_not_enlarged
from fedshift.seeds import numpy_generator
from fedshift.shifts import Imbalanced, whole_groups

Rows = NDArray[np.int64]

# The label that the target of the PACS task lacks: giraffe.
PACS_ABSENT = 2


class Roles(NamedTuple):
    """Rows of a listing: of each client, for validation, for the test; and the target T [K].

    Label counts are `fedshift.shifts.label_counts(listing.y, roles.clients, K)`; no image is
    decoded for them.
    """

    clients: tuple[Rows, ...]
    validation: Rows
    test: Rows
    target: NDArray[np.float64]


def pacs_roles(found: pacs.Pacs, seed: int) -> Roles:
    """Three clients of cartoons and sketches, photographs as the target: FedPALS's PACS task.

    The clients are those of `shifts.Imbalanced` on the training images, 190, 1,865 and 1,909 of
    them in the complete set; `seed` draws the reduction of the first. Validation: id_val without
    giraffes; test: all photographs without giraffes, 1,488; T: their label marginal.
    """
    train = found.rows("train")
    rng = numpy_generator(seed, "split")
    parts = Imbalanced()(found.y[train], len(pacs.CLASSES), 3, rng)
    validation, test = (_without(found, name) for name in ("id_val", "test"))
    clients = tuple(train[part] for part in parts)
    return Roles(clients, validation, test, _marginal(found.y[test], len(pacs.CLASSES)))


def iwildcam_roles(found: iwildcam.Wildcam, clients: int) -> Roles:
    """Whole cameras dealt to the clients (`shifts.whole_groups`), the test cameras as the target.

    The paper has 100 clients. Validation: the benchmark's out-of-distribution validation split
    (chosen: the rule of WILDS); T: the label marginal of the test split.
    """
    train, test = found.rows("train"), found.rows("test")
    parts = whole_groups(found.camera[train], clients)
    target = _marginal(found.y[test], len(found.classes))
    return Roles(tuple(train[part] for part in parts), found.rows("val"), test, target)


def pacs_task(
    seed: int, size: int | None = None
) -> tuple[Dataset, list[Rows], NDArray[np.float64], Rows, Rows]:
    """PACS from the search folders, decoded, with its rows dealt as `pacs_roles` says.

    size: pixels a side, 96 if left out. Gives (data, rows of each client, T, validation rows, test
    rows): client and validation rows are of `data.train`, which holds all of train and id_val; test
    rows are of `data.test`. Raises DataError where the images would have to be enlarged to `size`.
    """
    found = pacs.scan(_found("pacs", size))
    pacs.check_complete(found)
    roles = pacs_roles(found, seed)
    pool, photos = found.rows("train", "id_val"), found.rows("test")
    train, test = (found.samples(rows, size or pacs.SIZE) for rows in (pool, photos))
    data = _dataset("pacs", train, test, pacs.CLASSES, str(found.images.store.place))
    return data, *_placed(roles, pool, photos)


def iwildcam_task(
    clients: int, size: int | None = None
) -> tuple[Dataset, list[Rows], NDArray[np.float64], Rows, Rows]:
    """iWildCam from the search folders, as `pacs_task`, with roles by `iwildcam_roles`.

    `data.train` holds train, client by client, and then val, memory-mapped. A training run copies
    it to float32, four times its size in memory (16 GB for the complete set at 96 px), unless
    `size` is given and the network takes bytes: then it stays on disk, and pages come as they are
    read. Raises DataError as `pacs_task`, and both where the set is not complete.
    """
    found = iwildcam.scan(_found("iwildcam", size))
    iwildcam.check_complete(found)
    roles = iwildcam_roles(found, clients)
    parts, rest = (*roles.clients, roles.validation), found.rows("test")
    train = found.samples(np.concatenate(parts), size or iwildcam.SIZE)
    test = found.samples(rest, size or iwildcam.SIZE)
    data = _dataset("iwildcam", train, test, found.classes, str(found.images.store.place))
    ends = np.cumsum([len(part) for part in parts])
    *own, held = np.split(np.arange(ends[-1]), ends[:-1])
    return data, own, roles.target, held, np.arange(len(rest))


def _found(name: str, size: int | None) -> Path:
    path = find(name)
    if size is not None:
        check_not_enlarged(path, size)
    return path


def _without(found: pacs.Pacs, split: str) -> Rows:
    rows = found.rows(split)
    kept: Rows = rows[found.y[rows] != PACS_ABSENT]
    return kept


def _marginal(labels: Rows, classes: int) -> NDArray[np.float64]:
    return np.bincount(labels, minlength=classes) / len(labels)


def _dataset(
    name: str, train: Samples, test: Samples, classes: Sequence[str], source: str
) -> Dataset:
    licence = catalogue.entry(name).licence
    digest = content_sha256(train, test)
    return Dataset(name, train, test, tuple(classes), digest, source, licence)


def _placed(
    roles: Roles, pool: Rows, rest: Rows
) -> tuple[list[Rows], NDArray[np.float64], Rows, Rows]:
    """The roles with rows counted within the pool and the rest, both ascending."""
    clients = [np.searchsorted(pool, rows) for rows in roles.clients]
    held, test = np.searchsorted(pool, roles.validation), np.searchsorted(rest, roles.test)
    return clients, roles.target, held, test
