"""Tasks that are tested on the clients' own data: every client keeps a test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift import datasets
from fedshift.datasets import Dataset, Samples
from fedshift.datasets.base import joined
from fedshift.errors import InputError
from fedshift.experiments.config.schema import Data
from fedshift.experiments.config.shift import Split
from fedshift.experiments.config.wording import in_file_words
from fedshift.experiments.task.feature_shift import dealing, looks
from fedshift.experiments.task.natural import Dealt, none_such
from fedshift.holdout import hold_out
from fedshift.seeds import numpy_generator

Indices = NDArray[np.int64]


def deal_to_clients(section: Data, split: Split, seed: int) -> Dealt:
    """Pool the training and test file, deal the pool to the clients, and split each client's part.

    Of a client's n rows floor((1 - share) n) are for training and the others are its test set,
    drawn by (seed, client); share is `data.test`. T is the label marginal of all test sets
    together. With shift.transform each client's images are changed by a look of its own. Source:
    Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 4, whose share is 0.3.
    """
    share = section.test
    if split.kind == "natural":
        data, trains, tests = _deal_sites(section, split, seed)
    else:
        data, parts = _deal_pool(section, split, seed)
        try:
            trains, tests = hold_out(parts, share, seed)
        except InputError as e:
            raise InputError(f"data.test = {share}: {e}") from None
    counts = np.bincount(data.train.y.numpy()[np.concatenate(tests)], minlength=len(data.classes))
    # There are no global test rows: all of them are the clients'.
    nothing = np.empty(0, np.int64)
    return Dealt(
        data, trains, counts / counts.sum(), None, nothing, tests, looks(split, len(trains), seed)
    )


def _deal_pool(section: Data, split: Split, seed: int) -> tuple[Dataset, Sequence[Indices]]:
    """(the pool as a data set without a test file, rows of each client)."""
    both, limit = datasets.load(section.name, size=section.size), section.limit
    data = pool(both, limit, seed)
    # As in FedDRM, CIFAR-20 is dealt by its fine labels, but trained on its coarse ones.
    finer = datasets.entry(section.name).finer
    dealt = pool(datasets.load(finer), limit, seed) if finer else data
    rng = numpy_generator(seed, "split")
    with in_file_words("shift", split.arguments()):
        deal = dealing(split, section.name, seed, pool_rows(both, limit, seed))
        return data, deal(dealt.train.y.numpy(), len(dealt.classes), split.clients, rng)


def _deal_sites(
    section: Data, split: Split, seed: int
) -> tuple[Dataset, Sequence[Indices], Sequence[Indices]]:
    """(all examples as a data set without a test file, training rows, test rows of each site)."""
    name, share = section.name, section.test
    one = datasets.entry(name)
    if one.at_sites is None:
        key = 'shift.kind = "natural" with target = "clients"'
        what = "data set whose sites are clients"
        raise none_such(key, what, name, lambda other: other.at_sites)
    everyone, rows = one.at_sites(datasets.find(name), seed, share)
    if split.clients != len(everyone.sites):
        raise InputError(
            f"shift.clients = {split.clients}, but {name} has {len(everyone.sites)} sites; "
            f"set shift.clients = {len(everyone.sites)}"
        )
    train = Samples(everyone.x, everyone.y)
    no_test = Samples(everyone.x[:0], everyone.y[:0])
    return replace(datasets.load(name), train=train, test=no_test), rows.train, rows.test


def pool(data: Dataset, limit: int | None, seed: int) -> Dataset:
    """Training and test examples together, or `limit` of them, drawn without replacement.

    Raises InputError if there are fewer than `limit`.
    """
    both = joined([data.train, data.test])
    if limit is not None:
        both = both.take(torch.from_numpy(pool_rows(data, limit, seed)))
    return replace(data, train=both, test=Samples(both.x[:0], both.y[:0]))


def pool_rows(data: Dataset, limit: int | None, seed: int) -> Indices:
    """The rows of the pool. Those of the test file are numbered on after the training file's last.

    Raises InputError if there are fewer than `limit`.
    """
    n = len(data.train) + len(data.test)
    if limit is None:
        return np.arange(n)
    if limit > n:
        raise InputError(f"data.limit = {limit}, but {data.name} has {n} examples")
    return numpy_generator(seed, "limit").permutation(n)[:limit]
