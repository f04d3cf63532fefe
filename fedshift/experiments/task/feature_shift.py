"""Tasks whose clients' inputs differ: split by writer, or with noise added."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedshift import datasets
from fedshift.experiments.config.shift import Split
from fedshift.experiments.task.looks import looks
from fedshift.experiments.task.natural import Dealt, none_such
from fedshift.seeds import numpy_generator
from fedshift.shifts import Partition, Shift, group_shares
from fedshift.shifts.noise import Shared, noise_pool

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
