"""The three clients of the FedPALS paper's PACS experiment, as its authors' code makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshift.arguments import check_fields
from fedshift.errors import InputError
from fedshift.shifts.base import Ints, Partition, check_inputs

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
    paper says that random thirds come first and labels are removed after, which gives fewer
    samples. The authors draw the reduction from numpy's global generator. Their code also takes
    the *places* of the scarce samples among the training samples for row numbers of the whole
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
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
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
        kept = rng.choice(len(small), int(self.reduced * len(small)), replace=False)
        parts = (
            small[kept],
            np.concatenate([rest[one:two], a1, c0]),
            np.concatenate([rest[two:], b1, c1]),
        )
        return tuple(np.sort(part) for part in parts)


def _halves(labels: Ints, y: int) -> tuple[Ints, Ints]:
    where = np.flatnonzero(labels == y)
    return where[: len(where) // 2], where[len(where) // 2 :]
