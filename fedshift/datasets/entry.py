"""Entries of the catalogue: names of a data set on disk, where it comes from, how it is checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.datasets import idx
from fedshift.datasets.base import Dataset, Samples
from fedshift.datasets.sites import Sites, SiteSplit

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Remote:
    """A file at its official address. Of an archive, `members` are the files to take (name, md5).

    `size` in bytes.
    """

    url: str
    md5: str
    size: int
    members: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The files (name, md5) that lie in the folder once this has been fetched."""
        # Archives are not kept: the folder then has their members.
        return self.members or ((self.name, self.md5),)


@dataclass(frozen=True)
class Wanted:
    """What an experiment asks of a data set that has clients of its own.

    clients  the number of clients
    seed     the seed of everything that is drawn
    size     pixels a side; None if the experiment does not choose
    delta    how far the target moves away from the clients, 0 to 1
    """

    clients: int
    seed: int
    size: int | None = None
    delta: float = 0.0


class OwnClients(NamedTuple):
    """A data set with clients and a target of its own: `parts` and `validation` are rows of
    `data.train`, `test` are rows of `data.test`, which follow the target T [K].
    log_ratios  log p(x) - log q_i(x) of each row of `data.train`, for the client i that has the
                row; p is the density of all clients' inputs. None if the densities are not known
    """

    data: Dataset
    parts: Sequence[Rows]
    target: NDArray[np.float64]
    validation: Rows | None
    test: Rows
    log_ratios: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Entry:
    """One known data set.

    `folders` are the sub-folder names tried in each search folder; a download goes to the first.
    `missing` lists what a folder lacks, `read` gives (train, test), `examples` their right sizes
    (None where they depend on how the set was made) and `content` their right digest. `content` is
    None where the order of the examples depends on the layout on disk (CIFAR-10), and where no
    digest is known (CIFAR-100); there the sizes per class are checked alone, or by `read` where it
    is `self_checked`. `built_in` says why a set needs no download, `package` names a Debian package
    that holds it, `by_hand` says how to get a set that is not downloaded. A set that is generated
    has `generate` in place of `read`.

    What else a set can do:
    sized      `read` takes a number of pixels a side as well
    needs      packages beyond the library's requirements whose version can change the examples
    finer      the set with the same images in the same order and the labels that clients are dealt
               by, where those are others (Wang et al. 2026, FedDRM, `utils/dataset.py`)
    writers    (train, test) with the writer of every example
    clients    clients and a target of its own; `moves`: the target moves by `Wanted.delta`
    at_sites   (folder, seed, test share) -> all examples and the rows of each of its `sites`, which
               are clients that are tested on their own examples
    """

    name: str
    summary: str
    classes: tuple[str, ...]
    examples: tuple[int, int] | None
    shape: str
    licence: str
    page: str
    built_in: str = ""
    package: str = ""
    by_hand: str = ""
    self_checked: bool = False
    folders: tuple[str, ...] = ()
    missing: Callable[[Path], tuple[str, ...]] = idx.missing
    read: Callable[..., tuple[Samples, Samples]] | None = None
    content: str | None = None
    remotes: tuple[Remote, ...] = ()
    generate: Callable[[], tuple[Samples, Samples]] | None = None
    sized: bool = False
    needs: tuple[str, ...] = ()
    finer: str = ""
    writers: Callable[[Path], tuple[Sites, Sites]] | None = None
    clients: Callable[[Wanted], OwnClients] | None = None
    moves: bool = False
    sites: tuple[str, ...] = ()
    at_sites: Callable[[Path, int, float], tuple[Sites, SiteSplit]] | None = None

    @property
    def how(self) -> str:
        """How to get the set, in a few words."""
        if self.built_in or self.by_hand:
            return self.built_in or self.by_hand
        debian = f"apt-get install {self.package}, or " if self.package else ""
        return f"{debian}fedshift datasets fetch {self.name}"

    @property
    def amount(self) -> str:
        """How many examples, in words."""
        if self.examples is None:
            return "as many examples as were prepared"
        train, test = self.examples
        return f"{train:,} + {test:,} examples"


def remotes_at(base: str, *files: tuple[str, str, int]) -> tuple[Remote, ...]:
    """Files (name, md5, size) of one address, to which the names are appended."""
    return tuple(Remote(base + name, md5, size) for name, md5, size in files)
