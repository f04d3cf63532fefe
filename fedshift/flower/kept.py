"""What one client keeps between rounds, on its own disk too: it outlives servers and SuperNodes.

Flower ties what a node keeps to one run of one SuperLink. A server that is killed and goes on from
its last checkpoint is another run of Flower's, in which nodes have nothing; and so has a SuperNode
that is started again. A client's folder holds its last two rounds of each run of the server's, as
checkpoints (`engine.storage.checkpoint`). Nothing of it leaves the client.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import torch

from fedshift.engine.round import Round
from fedshift.engine.storage.checkpoint import read_round, remove_round, rounds_in, write_checkpoint
from fedshift.errors import InputError, shown
from fedshift.tree import Parts

# The environment variable by which `fedshift deploy client` says where.
KEEP = "FEDSHIFT_KEEP"
TOKEN = re.compile(r"[0-9a-f]{32}")


class Kept(NamedTuple):
    """Where a client keeps what it has of one run, and what of it counts.

    run    Flower's id of the run that is under way
    after  the round of the server's checkpoint that this run of Flower's began from; 0 without one
    """

    folder: Path
    client: int
    run: int
    after: int

    def recall(self) -> Parts | None:
        """What is left of its last round; None where there was none.

        Rounds after the server's checkpoint count only if they are of the run under way: the server
        has forgotten the others, and plays them again. They are removed. Raises DataError for a
        damaged file, since an older state in its place would be a wrong one.
        """
        for t in rounds_in(self.folder):
            saved = read_round(self.folder, t)
            if t <= self.after or saved.facts.get("run") == self.run:
                return saved.round.states.get(self.client)
            remove_round(self.folder, t)
        return None

    def remember(self, state: Parts, t: int) -> None:
        """Write what the client keeps after round t. Raises InputError where it cannot."""
        one = torch.tensor([self.client])
        played = Round(t, {}, {self.client: state}, one, torch.ones(1), (self.client,), math.nan)
        write_checkpoint(self.folder, played, {"run": self.run})


def folder_of(root: Path, token: str) -> Path:
    """A run's folder in `root`. Raises InputError for what is no token: it came by the network."""
    if not TOKEN.fullmatch(token):
        raise InputError(
            f'"{shown(token)}" is no name of a run; expected 32 digits and letters a-f'
        )
    return root / token
