"""Quantity skew: clients that differ in the size of their data, not in its kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedshift.shifts.base import (
    Ints,
    Partition,
    check_beta,
    check_count,
    check_inputs,
    dirichlet,
    largest_remainder,
    split_by_owner,
)


@dataclass(frozen=True)
class QuantitySkew:
    """Sizes in proportions q ~ Dir_M(beta), samples dealt at random.

    n_i = m + q_i (n - M m), rounded with sum n (largest remainders), m = `min_size`. Every sample
    is used. `InputError`: beta outside 1e-6..1e6, min_size < 0, M * min_size > n.

    Source: NIID-Bench (Li et al. 2022, arXiv:2102.02079), quantity skew. It draws q again until the
    smallest client has 10 samples, which for small beta does not end; here the minimum is dealt
    first, so it is always kept. With min_size=0 the two agree.
    """

    beta: float
    min_size: int = 1

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_count("min_size", self.min_size, 0)

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition:
        n = check_inputs(labels, classes, clients, rng, self.min_size).size
        # The minimum first, the rest in proportion: no draw has to be repeated.
        q = dirichlet(self.beta, clients, 1, rng)[0]
        sizes = self.min_size + largest_remainder(q * (n - clients * self.min_size))
        return split_by_owner(rng.permutation(n), np.repeat(np.arange(clients), sizes), clients)
