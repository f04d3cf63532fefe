"""Tasks whose clients and target come with the data set, so that nothing is dealt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedshift.datasets import Dataset, Entry, Wanted, entries, entry
from fedshift.errors import InputError, unknown
from fedshift.experiments.config.shift import Split

Indices = NDArray[np.int64]


class Dealt(NamedTuple):
    """A data set, and which of its rows are for what.

    parts       training rows of each client
    target      T [K]
    validation  rows of the training file that follow T, for validation; None without any
    test        rows of the test file that follow T
    tests       rows of the training file on which each client is tested, if clients use the model
    looks       the change of each client's images, on [0, 1]; () for none
    server      rows of the training file that the server has without their labels
    test_look   the change of the test rows' images, or None
    log_ratios  as in `datasets.OwnClients`
    """

    data: Dataset
    parts: Sequence[Indices]
    target: NDArray[np.float64]
    validation: Indices | None
    test: Indices
    tests: Sequence[Indices] = ()
    looks: Sequence[Callable[[Tensor], Tensor]] = ()
    server: Indices | None = None
    test_look: Callable[[Tensor], Tensor] | None = None
    log_ratios: NDArray[np.float64] | None = None


def none_such(key: str, what: str, name: str, offers: Callable[[Entry], object]) -> InputError:
    """The error for `key` if a data set lacks something; it names the data sets that have it."""
    names = [one.name for one in entries() if offers(one)]
    return InputError(f"{key}: {unknown(what, name, names)}")


def natural(name: str, split: Split, seed: int, size: int | None = None) -> Dealt:
    """The data set's own clients and target; photographs at `size` pixels a side.

    Raises InputError if the data set has no clients of its own, or another number of them.
    """
    one = entry(name)
    # Checked first: for these sets the cure is another target, and not another data set.
    if one.clients is None and one.at_sites is not None:
        raise InputError(
            f'shift.kind = "natural": the clients of {name} are its sites, and its target is their '
            'own examples; set shift.target = "clients"'
        )
    if one.clients is None:
        what = "data set with clients of its own"
        raise none_such('shift.kind = "natural"', what, name, lambda other: other.clients)
    if split.delta is not None and not one.moves:
        moving = " and ".join(other.name for other in entries() if other.moves)
        raise InputError(f"shift.delta moves the target of {moving}; {name} has a fixed one")
    natural = one.clients(Wanted(split.clients, seed, size, split.delta or 0.0))
    dealt = Dealt(*natural[:5], log_ratios=natural.log_ratios)
    # Refused instead of set to the right number: recipes have been checked with shift.clients.
    if split.clients != len(dealt.parts):
        raise InputError(
            f"shift.clients = {split.clients}, but {name} comes with {len(dealt.parts)} clients; "
            f"set shift.clients = {len(dealt.parts)}"
        )
    return dealt
