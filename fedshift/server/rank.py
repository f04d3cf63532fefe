"""The rank of a table of counts, in integers: dependent rows versus nearly dependent ones."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedshift.server.simplex import Floats

# A rank modulo a prime is never too large, and too small only where the prime divides all the
# minors that count: by chance for one in 2^31 of tables, and for two primes at once for none.
PRIMES = (2**31 - 1, 2**31 - 19)

Integers = NDArray[np.int64]


def rank(counts: Floats) -> int:
    """The rank of counts [M, K], whole numbers or not, without rounding."""
    if min(counts.shape, default=0) == 0:
        return 0
    return max(_rank_modulo(_remainders(counts, p), p) for p in PRIMES)


def _remainders(counts: Floats, prime: int) -> Integers:
    """Every row as integers modulo a prime; floats are whole multiples of a power of 2."""
    if (counts == np.rint(counts)).all() and float(np.abs(counts).max()) < 2.0**62:
        return counts.astype(np.int64) % prime
    rows = []
    for row in counts.tolist():
        exact = [Fraction(x) for x in row]
        common = max(x.denominator for x in exact)
        rows.append([int(x * common) % prime for x in exact])
    return np.array(rows, dtype=np.int64)


def _rank_modulo(table: Integers, prime: int) -> int:
    """By elimination; products of two remainders stay below 2^62."""
    rest = table if table.shape[0] <= table.shape[1] else np.ascontiguousarray(table.T)
    count = 0
    while rest.size:
        row, rest = rest[0], rest[1:]
        columns = np.flatnonzero(row)
        if columns.size == 0:
            continue
        column = int(columns[0])
        row = row * pow(int(row[column]), -1, prime) % prime
        rest = (rest - rest[:, column : column + 1] * row % prime) % prime
        rest = np.delete(rest, column, axis=1)
        count += 1
    return count
