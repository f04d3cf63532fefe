"""A client's state between rounds, stored on its own disk so that it outlives Flower's processes.

Flower keeps a node's state for one run of one SuperLink only. If a server is killed and resumes
from its last checkpoint, that is a new run for Flower, without state; a SuperNode that is started
again has no state either. A client's folder has its last two rounds of each run of the server, as
checkpoints (`engine.storage.checkpoint`). They never leave the client.
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

# Without dots and slashes, because a token becomes the name of a folder.
TOKEN = re.compile(r"[0-9a-f]{32}")


class Kept(NamedTuple):
    """Where a client's state in one run is stored, and which rounds of it are valid.

    run    Flower's id of the current run
    after  the round of the server's checkpoint from which this run of Flower began; 0 without one
    """

    folder: Path
    client: int
    run: int
    after: int

    def recall(self) -> Parts | None:
        """The state after the last valid round; None if there is none.

        Rounds after the server's checkpoint are valid only if they belong to the current run. The
        server has lost the others and will play them again, so they are removed. Raises DataError
        for a damaged file: going on from an older state would silently be wrong.
        """
        for t in rounds_in(self.folder):
            saved = read_round(self.folder, t)
            if t <= self.after or saved.facts.get("run") == self.run:
                return saved.round.states.get(self.client)
            remove_round(self.folder, t)
        return None

    def remember(self, state: Parts, t: int) -> None:
        """Write the client's state after round t. Raises InputError if that fails."""
        # Write it as a checkpoint of a round with one client, to use its format and its checks.
        ids = torch.tensor([self.client])
        played = Round(t, {}, {self.client: state}, ids, torch.ones(1), (self.client,), math.nan)
        write_checkpoint(self.folder, played, {"run": self.run})


def folder_of(root: Path, token: str) -> Path:
    """A run's folder in `root`. Raises InputError for a bad token: it comes from the network."""
    if not TOKEN.fullmatch(token):
        raise InputError(
            f'"{shown(token)}" is no name of a run; expected 32 digits and letters a-f'
        )
    return root / token
