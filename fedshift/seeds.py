"""Random streams keyed by their purpose, so that no draw depends on which draws came before it.

Every draw in the library comes from a generator made here from (seed, purpose, round, client, ...).
There is no random *state* to save or restore. Global generators are left unchanged: networks that
draw from them are seeded for each pass (`fedshift.randomness`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from operator import index

import numpy as np
import torch

from fedshift.arguments import check_fields, check_whole

Part = int | str


def key(*parts: Part) -> int:
    """A 63-bit seed that is a function of the parts alone: BLAKE2b of their representation.

    `1` and `"1"` give different keys, and so do `("ab", "c")` and `("a", "bc")`. Raises InputError
    for numbers that are not whole: 0.5 would be 0.
    """
    # Other integers, such as numpy's, are converted to give the key of the equal int. `hash` would
    # not do, because Python salts it in every process.
    plain = {int, str}.issuperset(map(type, parts))
    text = repr(parts if plain else tuple(p if isinstance(p, str) else _whole(p) for p in parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _whole(part: object) -> int:
    try:
        return index(part)  # type: ignore[arg-type]
    except TypeError:
        check_whole("a seed, or a part of one,", part)
        raise


def generator(*parts: Part) -> torch.Generator:
    """A CPU torch generator for the stream named by `parts`."""
    # Always on the CPU: a GPU's generator gives other numbers for the same seed.
    return torch.Generator().manual_seed(key(*parts))


def numpy_generator(*parts: Part) -> np.random.Generator:
    """A numpy generator for the stream named by `parts`."""
    # PCG64 by name, because numpy's default may change with its version.
    return np.random.Generator(np.random.PCG64(key(*parts)))


@dataclass(frozen=True)
class Seeds:
    """The four seeds of a run, which can be changed one at a time.

    `split` draws the clients' and the target's data, `init` the first model, `cohort` the clients
    of each round, `batch` the order of examples within a client. Raises InputError for seeds that
    are not whole numbers of 0 or more.
    """

    split: int = 0
    init: int = 0
    cohort: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("split", "init", "cohort", "batch"):
            check_whole(f"Seeds {name}", getattr(self, name), 0)

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """All four from one run seed."""
        return cls(seed, seed, seed, seed)
