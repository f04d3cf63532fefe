"""A client's SuperNode: run its process, and read its log and the notices of its apps."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedshift_deploy.inside import SOCKET, private_socket
from fedshift_deploy.notices import NOTICES, read_notice
from fedshift_deploy.processes import running

POLL = 0.5
# Texts in Flower's log: it has joined; the server does not answer; it answers again.
JOINED, AWAY, BACK = "SuperNode ID:", "Connection attempt failed", "Connection successful"
FAILED = "Failed to init"
# Texts of a server's refusal: Flower's own code, or a status of HTTP.
REFUSAL = re.compile(r"\[code: \d+\]|'[45]\d\d ")
# How many lines of the log are kept, to find the reason when it ends.
LINES = 50


@dataclass(frozen=True)
class Ended:
    """How a SuperNode ended: its exit code, whether it had joined, and the reason from its log.

    Codes below 0 are signals, as in `subprocess`. refused: the server refused it.
    """

    code: int
    joined: bool
    message: str
    refused: bool = False


class Appended:
    """Reads the lines that others append to a file, each once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = self._size()

    def _size(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_size
        return 0

    def lines(self, *, last: bool = False) -> list[str]:
        """New complete lines; with `last`, also one without a line break."""
        size = self._size()
        # If the file is shorter now, logrotate has truncated it: start from the beginning.
        self._at = self._at if self._at <= size else 0
        if self._at == size:
            return []
        try:
            with self.path.open("rb") as f:
                f.seek(self._at)
                new = f.read(size - self._at)
        except FileNotFoundError:
            return []  # removed just now
        new = new if last else new[: new.rfind(b"\n") + 1]
        self._at += len(new)
        return new.decode("utf-8", "replace").splitlines()


class Node:
    """The state of a SuperNode.

    up      it is running
    joined  the server has accepted it
    away    its log says that the server does not answer
    """

    def __init__(self, log: Path, notices: Path) -> None:
        # The log may have lines of earlier processes: `Appended` starts at its end.
        self.up, self.joined, self.away = True, False, False
        self._log, self._notices = Appended(log), Appended(notices)
        self._latest = deque[str](maxlen=LINES)

    def look(self, *, last: bool = False) -> None:
        """Read new lines of the log."""
        for line in self._log.lines(last=last):
            if line.strip():
                self._latest.append(line.strip())
            self.joined |= JOINED in line
            self.away = AWAY in line or (self.away and BACK not in line)

    def notices(self) -> Iterator[dict[str, Any]]:
        """New notices of its apps since the last call (`fedshift_deploy.notices`)."""
        return (notice for line in self._notices.lines() if (notice := read_notice(line)))

    def ended(self, code: int) -> Ended:
        """How it ended, from its exit code and its log."""
        self.look(last=True)
        self.up = False
        texts = list(self._latest)
        # Flower's reason is in the line after the one that reports the failure.
        reasons = [b for a, b in pairwise(texts) if FAILED in a]
        message = reasons[-1] if reasons else (texts or ["it said nothing"])[-1]
        # A SuperNode whose signature is refused exits with code 0.
        refused = not self.joined and (code == 0 or bool(reasons and REFUSAL.search(message)))
        return Ended(code, self.joined, message, refused)


def run_node(
    command: Sequence[str], env: Mapping[str, str], log: Path, look: Callable[[Node], None]
) -> Ended:
    """Run a SuperNode until it ends, or until `look`, called twice a second, raises."""
    with private_socket() as socket:
        notices = Path(socket[SOCKET]).with_name("notices")
        node, mine = Node(log, notices), {NOTICES: str(notices)}
        with running(command, {**env, **socket, **mine}, log) as process:
            while process.poll() is None:
                node.look()
                look(node)
                time.sleep(POLL)
            ended = node.ended(process.wait())
            look(node)  # once more, for notices that came since
    return ended
