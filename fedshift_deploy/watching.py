"""Notice when one of the server's processes has ended: the SuperLink, or one that it started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedshift.errors import TrainingError
from fedshift_deploy.processes import descendants, still_running

# Seconds between two checks, each of which lists all processes of the machine.
PAUSE = 1.0
SUPERLINK, SUPEREXEC, SERVERAPP = "SuperLink", "SuperExec", "ServerApp"
# A word in the command line of each of them.
COMMANDS = {SUPEREXEC: "flower-superexec", SERVERAPP: "flwr-serverapp"}


Ended = Mapping[str, int | None]


def nothing() -> Ended:
    """An `ended` for processes that are not watched."""
    return {}


@dataclass
class Watch:
    """A SuperLink and its processes; `seen` has their commands by process id.

    It keeps processes that are no longer its descendants: if a parent was killed, a process of
    Flower's may go on.
    """

    process: subprocess.Popen[bytes]
    seen: dict[int, str] = field(default_factory=dict)
    _before: frozenset[int] = frozenset()
    _looked: float = 0.0

    def begin(self) -> None:
        """Call when a run begins: a ServerApp that exists now is the last run's, and may end."""
        self.seen.update(descendants(self.process.pid))
        word = COMMANDS[SERVERAPP]
        self._before = frozenset(pid for pid, command in self.seen.items() if word in command)

    def __call__(self) -> Ended:
        """What has ended since the last call, with its exit code if known.

        Checks at most once a second. A process counts as ended only if there is no other of its
        kind.
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
        return over | {name: None for name, word in COMMANDS.items() if self._has_ended(word, lost)}

    def _has_ended(self, word: str, lost: Iterable[str]) -> bool:
        return any(word in c for c in lost) and not any(word in c for c in self.seen.values())


def ending(process: str, code: int | None, out: Path, log: Path, *, begun: bool) -> TrainingError:
    """The error for a server's process that ended in the middle of a run.

    code: its exit code, if known. begun: whether a round is complete from which to resume.
    """
    how = f" by signal {-code}" if code and code < 0 else f" with code {code}" if code else ""
    option = f" --resume {out}" if begun else ""
    return TrainingError(
        f"Flower's {process} was ended{how}, perhaps for lack of memory; go on with `fedshift "
        f"deploy server FOLDER{option}` (see {log})"
    )
