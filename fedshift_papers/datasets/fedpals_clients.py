"""The FedPALS paper's tasks on PACS and iWildCam: the images of each client, and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.arguments import check_fields
from fedshift.datasets import (
    Dataset,
    OwnClients,
    Samples,
    Wanted,
    content_sha256,
    entry,
    find,
)
from fedshift.datasets.images import check_not_enlarged
from fedshift.errors import InputError
from fedshift.seeds import numpy_generator
from fedshift.shifts import Partition, whole_groups
from fedshift.shifts.base import check_inputs
from fedshift_papers.datasets import iwildcam, pacs

Rows = NDArray[np.int64]

# The label that the target of the PACS task lacks: giraffe.
PACS_ABSENT = 2
# The seed of the permutation, which is the same for all seeds of a run.
_SEED = 1


@dataclass(frozen=True)
class Imbalanced:
    """Three clients, each without one of three labels, the first one reduced to a tenth.

    With a, b, c = `scarce`: client 0 lacks c, client 1 lacks b, client 2 lacks a. The samples of
    other labels are permuted and cut at floor(.33 m) and floor(.66 m); each scarce label is cut in
    halves, in the order of the samples, for the two clients that have it. Client 0 then keeps
    floor(reduced * n) of its samples, drawn from `rng` without replacement; nothing else is random.
    The permutation is always that of numpy's default generator of seed 1, so that seeds differ in
    the reduction alone.

    Source: class ImbalancedSplitter in the authors' development repository (labels 0, 1, 2). The
    paper says "randomly assigned among three clients", and labels are removed after, which gives
    fewer samples. The authors draw the reduction from numpy's global generator. Their code also
    takes the *places* of the scarce samples among the training samples for row numbers of the whole
    data set, where other images stand; here the samples are those that the rule means.

    Raises InputError for another number of clients than 3, or labels that are not three of 0..K-1.
    """

    scarce: tuple[int, int, int] = (0, 1, 2)
    reduced: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.scarce)) != 3:
            raise InputError(f"scarce={self.scarce}; allowed: three different labels")
        if not 0 < self.reduced <= 1:
            raise InputError(f"reduced={self.reduced!r}; allowed: a share, 0 < reduced <= 1")

    def __call__(
        self, labels: Rows, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng)
        if clients != 3:
            raise InputError(f"clients={clients}; this split has exactly 3. Set clients to 3.")
        if not all(0 <= y < classes for y in self.scarce):
            raise InputError(f"scarce={self.scarce}; allowed: labels 0..{classes - 1}")
        rest = np.random.default_rng(_SEED).permutation(
            np.flatnonzero(~np.isin(labels, self.scarce))
        )
        one, two = int(0.33 * len(rest)), int(0.66 * len(rest))
        (a0, a1), (b0, b1), (c0, c1) = (_halves(labels, y) for y in self.scarce)
        small = np.concatenate([rest[:one], a0, b0])
        # The only draw that depends on the run's seed.
        positions = rng.choice(len(small), int(self.reduced * len(small)), replace=False)
        parts = (
            small[positions],
            np.concatenate([rest[one:two], a1, c0]),
            np.concatenate([rest[two:], b1, c1]),
        )
        return tuple(np.sort(part) for part in parts)


class Roles(NamedTuple):
    """Rows of a listing by their use: each client's, for validation, for tests. And T [K].

    Label counts are `fedshift.shifts.label_counts(listing.y, roles.clients, K)`; no image is
    decoded for them.
    """

    clients: tuple[Rows, ...]
    validation: Rows
    test: Rows
    target: NDArray[np.float64]


def pacs_roles(listing: pacs.Pacs, seed: int) -> Roles:
    """Three clients of cartoons and sketches, photographs as the target: FedPALS's PACS task.

    The clients are those of `Imbalanced` on the training images, 190, 1,865 and 1,909 of
    them in the complete set; `seed` draws the reduction of the first. Validation: id_val without
    giraffes; test: all photographs without giraffes, 1,488; T: their label marginal.
    """
    train = listing.rows("train")
    rng = numpy_generator(seed, "split")
    parts = Imbalanced()(listing.y[train], len(pacs.CLASSES), 3, rng)
    validation, test = (
        rows[listing.y[rows] != PACS_ABSENT] for rows in map(listing.rows, ("id_val", "test"))
    )
    clients = tuple(train[part] for part in parts)
    return Roles(clients, validation, test, _marginal(listing.y[test], len(pacs.CLASSES)))


def iwildcam_roles(listing: iwildcam.Wildcam, clients: int) -> Roles:
    """Whole cameras dealt to the clients (`shifts.whole_groups`), the test cameras as the target.

    The paper has 100 clients. Validation: the benchmark's out-of-distribution validation split
    (chosen: the rule of WILDS); T: the label marginal of the test split.
    """
    train, test = listing.rows("train"), listing.rows("test")
    parts = whole_groups(listing.camera[train], clients)
    target = _marginal(listing.y[test], len(listing.classes))
    return Roles(tuple(train[part] for part in parts), listing.rows("val"), test, target)


def pacs_clients(wanted: Wanted) -> OwnClients:
    """PACS from the search folders, decoded, with its rows dealt as `pacs_roles` says.

    `data.train` holds all of train and id_val. Raises DataError where the images would have to be
    enlarged to `wanted.size`.
    """
    listing = pacs.scan(_folder("pacs", wanted.size))
    pacs.check_complete(listing)
    roles = pacs_roles(listing, wanted.seed)
    pool, photos = listing.rows("train", "id_val"), listing.rows("test")
    size = wanted.size or pacs.SIZE
    train, test = listing.samples(pool, size), listing.samples(photos, size)
    data = _dataset("pacs", train, test, pacs.CLASSES, str(listing.images.store.place))
    # The roles are rows of the whole listing; from here on they are rows of the decoded images.
    parts = [np.searchsorted(pool, rows) for rows in roles.clients]
    validation = np.searchsorted(pool, roles.validation)
    return OwnClients(data, parts, roles.target, validation, np.searchsorted(photos, roles.test))


def iwildcam_clients(wanted: Wanted) -> OwnClients:
    """iWildCam from the search folders, as `pacs_clients`, with roles by `iwildcam_roles`.

    `data.train` holds train, client by client, and then val, memory-mapped. A training run copies
    it to float32, four times its size in memory (16 GB for the complete set at 96 px), unless
    `wanted.size` is given and the network takes bytes: then it stays on disk, and pages come as
    they are read. Raises DataError as `pacs_clients`, and both where the set is not complete.
    """
    listing = iwildcam.scan(_folder("iwildcam", wanted.size))
    iwildcam.check_complete(listing)
    roles = iwildcam_roles(listing, wanted.clients)
    parts, rest = (*roles.clients, roles.validation), listing.rows("test")
    size = wanted.size or iwildcam.SIZE
    train, test = listing.samples(np.concatenate(parts), size), listing.samples(rest, size)
    data = _dataset("iwildcam", train, test, listing.classes, str(listing.images.store.place))
    # Rows follow one another client by client, so that a client's images are one piece of the file.
    ends = np.cumsum([len(part) for part in parts])
    *clients, validation = np.split(np.arange(ends[-1]), ends[:-1])
    return OwnClients(data, clients, roles.target, validation, np.arange(len(rest)))


def _folder(name: str, size: int | None) -> Path:
    path = find(name)
    if size is not None:
        check_not_enlarged(path, size)
    return path


def _marginal(labels: Rows, classes: int) -> NDArray[np.float64]:
    return np.bincount(labels, minlength=classes) / len(labels)


def _dataset(
    name: str, train: Samples, test: Samples, classes: Sequence[str], source: str
) -> Dataset:
    licence = entry(name).licence
    digest = content_sha256(train, test)
    return Dataset(name, train, test, tuple(classes), digest, source, licence)


def _halves(labels: Rows, y: int) -> tuple[Rows, Rows]:
    where = np.flatnonzero(labels == y)
    return where[: len(where) // 2], where[len(where) // 2 :]
