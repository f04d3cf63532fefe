"""Notice that one of the server's processes has ended: a SuperLink, and those that it starts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedshift.deploy.processes import descendants, still_running
from fedshift.errors import TrainingError

# Seconds between two looks: one lists all processes of the machine.
PAUSE = 1.0
SUPERLINK, SUPEREXEC, SERVERAPP = "SuperLink", "SuperExec", "ServerApp"
# A word of the command that each of them runs.
COMMANDS = {SUPEREXEC: "flower-superexec", SERVERAPP: "flwr-serverapp"}


Ended = Mapping[str, int | None]


def nothing() -> Ended:
    """For processes that are not watched."""
    return {}


@dataclass
class Watch:
    """A SuperLink's processes. `seen` also has those that are no longer its descendants.

    Flower's processes end with their parents, but not with one that is killed and not waited for.
    """

    process: subprocess.Popen[bytes]
    seen: dict[int, str] = field(default_factory=dict)
    _before: frozenset[int] = frozenset()
    _looked: float = 0.0

    def begin(self) -> None:
        """A run begins: a ServerApp that is still there is that of the run before, and may end."""
        self.seen.update(descendants(self.process.pid))
        word = COMMANDS[SERVERAPP]
        self._before = frozenset(pid for pid, command in self.seen.items() if word in command)

    def __call__(self) -> Ended:
        """What has ended since the last look, and its exit code where there is one.

        Looks once a second. A ServerApp counts as ended where there is no other.
        """
        if time.monotonic() - self._looked < PAUSE:
            return {}
        self._looked = time.monotonic()
        code = self.process.poll()
        alive = set(still_running(self.seen))
        ended = {pid: self.seen.pop(pid) for pid in self.seen.keys() - alive}
        lost = [command for pid, command in ended.items() if pid not in self._before]
        self.seen.update(descendants(self.process.pid))
        over = {} if code is None else {SUPERLINK: code}
        return over | {name: None for name, word in COMMANDS.items() if self._lost(word, lost)}

    def _lost(self, word: str, lost: Iterable[str]) -> bool:
        return any(word in c for c in lost) and not any(word in c for c in self.seen.values())


def ending(process: str, code: int | None, out: Path, log: Path, *, begun: bool) -> TrainingError:
    """The error for a server's process that ended in the middle of a run.

    code: its exit code where there is one. begun: whether a round is over, from which to go on.
    """
    how = f" by signal {-code}" if code and code < 0 else f" with code {code}" if code else ""
    option = f" --resume {out}" if begun else ""
    return TrainingError(
        f"Flower's {process} was ended{how}, perhaps for lack of memory; go on with `fedshift "
        f"deploy server FOLDER{option}` (see {log})"
    )
