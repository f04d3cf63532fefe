"""Clients that hold a few labels each and all have equally many examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshift.errors import InputError
from fedshift.shifts.base import Ints, Partition, check_count, check_inputs, deal
from fedshift.shifts.label import draw_label_sets

Sets = NDArray[np.bool_]
TRIES = 1000


@dataclass(frozen=True)
class LabelSetSplit:
    """Every client holds k labels and `samples` examples, divided evenly among its labels.

    n_iy = floor(n/k) or ceil(n/k) for y in Y_i, with n = `samples`, and 0 elsewhere; which labels
    get one more is drawn. The rest of the data stays unused.

    common = None    Y_i is drawn uniformly without replacement, for each client on its own. All
                     sets are drawn anew, up to 1,000 times, while some label asks for more examples
                     than there are or, with `cover`, has no client
    common = c       all clients share c labels, and no other client has the k - c others: any two
                     sets have c labels in common, all together c + M (k - c) labels. c = 0 is
                     disjoint, c = k full overlap. `cover` is ignored
    reach = r        overlap at fixed labels and fixed k: client i has set i mod S of the S
                     `cyclic_sets` of the labels in a random order. `cover` is ignored

    `InputError`: k < 1 or above the number of labels that have samples, n < k, c outside 0..k, too
    few labels for c, both c and r, fewer clients than S, or draws that never fit.

    Source: Breitholtz, Listo Zec and Johansson 2025, arXiv 2508.18774, whose clients hold labels
    drawn uniformly at random (2,000 examples each, as reported to us). `cover` and `common`
    are ours: the paper gives no rule for labels without a client.
    """

    labels_per_client: int
    samples: int = 2000
    common: int | None = None
    cover: bool = True
    reach: int | None = None

    def __post_init__(self) -> None:
        k = check_count("labels_per_client", self.labels_per_client, 1)
        check_count("samples", self.samples, k, do="Each of a client's labels needs an example.")
        if self.common is not None:
            check_count("common", self.common, 0, k, "A client shares some of its labels, or all.")
        if self.reach is not None:
            check_count("reach", self.reach, 0)
            if self.common is not None:
                raise InputError(
                    f"common={self.common} and reach={self.reach} both say how sets overlap; give "
                    "one of them"
                )

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        labels = check_inputs(labels, classes, clients, rng)
        if clients * self.samples > labels.size:
            raise InputError(
                f"samples={self.samples} for each of {clients} clients; there are {labels.size} in "
                f"all. Lower samples to at most {labels.size // clients}, or ask for fewer clients."
            )
        supply = np.bincount(labels, minlength=classes)
        problem = ""
        drawn = self.common is None and self.reach is None
        for _ in range(TRIES if drawn else 1):
            sets = self._sets(supply > 0, clients, rng)
            counts = shared_evenly(self.samples, sets, rng)
            problem = self._problem(sets, counts, supply)
            if not problem:
                return deal(labels, counts, rng)
        raise InputError(problem)

    def _sets(self, present: Sets, clients: int, rng: np.random.Generator) -> Sets:
        k, c = self.labels_per_client, self.common
        if self.reach is not None:
            return self._cyclic(present, clients, rng)
        if c is None:
            return draw_label_sets(k, present, clients, rng).astype(np.bool_)
        order = rng.permutation(np.flatnonzero(present))
        needed = c + clients * (k - c)
        if needed > len(order):
            raise InputError(
                f"common={c} of labels_per_client={k} with {clients} clients needs {needed} "
                f"labels; there are {len(order)}. Use fewer clients, a smaller labels_per_client "
                "or a larger common."
            )
        sets = np.zeros((clients, len(present)), np.bool_)
        # The first c labels for all clients, the next k - c for the first one, and so on.
        sets[:, order[:c]] = True
        sets[np.arange(clients)[:, None], order[c:needed].reshape(clients, k - c)] = True
        return sets

    def _cyclic(self, present: Sets, clients: int, rng: np.random.Generator) -> Sets:
        order = rng.permutation(np.flatnonzero(present))
        each = cyclic_sets(len(order), self.labels_per_client, self.reach or 0)
        if clients < len(each):
            raise InputError(
                f"reach={self.reach} of labels_per_client={self.labels_per_client} has {len(each)} "
                f"different sets of {len(order)} labels, and there are {clients} clients; give "
                f"{len(each)} or more, or a smaller reach"
            )
        sets = np.zeros((clients, len(present)), np.bool_)
        for i in range(clients):
            sets[i, order[list(each[i % len(each)])]] = True
        return sets

    def _problem(self, sets: Sets, counts: Ints, supply: Ints) -> str:
        """Why these sets cannot be used, in words; empty where they can."""
        drawn = self.common is None and self.reach is None
        if drawn and self.cover and (~sets[:, supply > 0].any(axis=0)).any():
            return (
                f"none of {TRIES} draws of {self.labels_per_client} labels for each of "
                f"{len(sets)} clients could be used; in the last one some label had no client. "
                "Raise labels_per_client or clients, or set cover = false."
            )
        short = np.flatnonzero(counts.sum(0) > supply)
        if short.size:
            y = int(short[0])
            return (
                f"label {y} is held by {sets[:, y].sum()} clients that want "
                f"{counts[:, y].sum()} examples of it; there are {supply[y]}. Lower samples "
                f"(given {self.samples}) or clients."
            )
        return ""


def cyclic_sets(labels: int, k: int, reach: int) -> tuple[tuple[int, ...], ...]:
    """Sets of k of the labels 0, ..., K - 1 on a ring, each once, in a fixed order.

    reach 0: the blocks {0, ..., k - 1}, {k, ..., 2k - 1}, ...; none has a label of another. Reach
    r: {a, a + d, ..., a + (k - 1) d} mod K for d = 1, ..., r and every a, without those that come
    round to a label again. At k = 2 the graph of labels that share a set is of disjoint pairs for
    0, a ring for 1 and complete for K // 2. Each label is in equally many sets.

    Raises InputError for k that does not divide K at reach 0, and where no set is left.

    >>> from fedshift.shifts.label_sets import cyclic_sets
    >>> cyclic_sets(4, 2, 0)
    ((0, 1), (2, 3))
    >>> cyclic_sets(4, 2, 1)
    ((0, 1), (1, 2), (2, 3), (0, 3))
    """
    if reach == 0:
        if labels % k:
            raise InputError(
                f"reach=0 cuts {labels} labels into blocks of labels_per_client={k}, which does "
                "not divide them; give a divisor, or a reach of 1 or more"
            )
        return tuple(tuple(range(a, a + k)) for a in range(0, labels, k))
    steps = ((d, a) for d in range(1, reach + 1) for a in range(labels))
    sets = (tuple(sorted({(a + j * d) % labels for j in range(k)})) for d, a in steps)
    whole = tuple(dict.fromkeys(s for s in sets if len(s) == k))
    if not whole:
        raise InputError(f"labels_per_client={k} of {labels} labels leaves no set")
    return whole


def shared_evenly(samples: int, sets: Sets, rng: np.random.Generator) -> Ints:
    """Divide `samples` among the labels of each row: sets [M, K] -> counts [M, K].

    Entries of a row differ by at most one; the labels with one more are drawn from `rng`. A row
    without labels has zeros.
    """
    size = sets.sum(axis=1, keepdims=True)
    # The rank of each label in a random order; labels outside of the set come last.
    order = np.where(sets, rng.random(sets.shape), np.inf).argsort(axis=1).argsort(axis=1)
    base, more = samples // np.maximum(size, 1), samples % np.maximum(size, 1)
    return np.asarray(sets * (base + (order < more)), dtype=np.int64)
