"""Tasks whose clients and target come with the data: nothing is dealt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.datasets import Dataset, Samples, content_sha256, gaussians
from fedshift.errors import InputError, unknown
from fedshift.experiments.config_shift import Split
from fedshift.experiments.image_sets import iwildcam_task, pacs_task

Indices = NDArray[np.int64]
# Data sets whose sites are clients that use the model themselves.
AT_SITES = ("heart-disease", "retina")


class Dealt(NamedTuple):
    """A data set and who holds which of its rows.

    parts    training rows of each client
    target   T [K]
    held     training rows that stand for the target in validation, or None
    test     test rows that follow T
    own      training rows that each client is tested on, where the model is used by the clients
    looks    what each client's images go through, on [0, 1]; () where they stay as they are
    test_look  what the test rows' images go through, or None
    server   training rows that the server has without their labels
    """

    data: Dataset
    parts: Sequence[Indices]
    target: NDArray[np.float64]
    held: Indices | None
    test: Indices
    own: Sequence[Indices] = ()
    looks: Sequence[Callable[[Tensor], Tensor]] = ()
    server: Indices | None = None
    test_look: Callable[[Tensor], Tensor] | None = None


def natural(name: str, split: Split, seed: int, size: int | None = None) -> Dealt:
    """The data set's own clients and target; photographs at `size` pixels a side.

    Raises InputError where the data set has no clients of its own, or another number of them.
    """
    makers: dict[str, Callable[[Split, int], Dealt]] = {
        "gaussians": _gaussians,
        "pacs": lambda _, seed: Dealt(*pacs_task(seed, size)),
        "iwildcam": lambda split, _: Dealt(*iwildcam_task(split.clients, size)),
    }
    if name in AT_SITES:
        raise InputError(
            f'shift.kind = "natural": the clients of {name} are its sites, and its target is their '
            'own patients; set shift.target = "clients"'
        )
    if name not in makers:
        error = unknown("data set with clients of its own", name, makers)
        raise InputError(f'shift.kind = "natural": {error}')
    if split.delta is not None and name != "gaussians":
        raise InputError(f"shift.delta moves the target of gaussians; {name} has a fixed one")
    dealt = makers[name](split, seed)
    if split.clients != len(dealt.parts):
        raise InputError(
            f"shift.clients = {split.clients}, but {name} comes with {len(dealt.parts)} clients; "
            f"set shift.clients = {len(dealt.parts)}"
        )
    return dealt


def _gaussians(split: Split, seed: int) -> Dealt:
    """Two clients and a target that moves away from them by delta (0 where left out)."""
    drawn = gaussians(seed, split.delta or 0.0)
    train = Samples(
        torch.cat([c.x for c in drawn.clients]), torch.cat([c.y for c in drawn.clients])
    )
    ends = np.cumsum([len(c) for c in drawn.clients])
    parts = np.split(np.arange(len(train)), ends[:-1])
    digest = content_sha256(train, drawn.test)
    data = Dataset(
        "gaussians", train, drawn.test, ("0", "1", "2"), digest, "generated", "generated"
    )
    return Dealt(data, parts, drawn.target, None, np.arange(len(drawn.test)))
