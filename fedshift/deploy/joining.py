"""Join a federation as a client, with Flower's SuperNode."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from fedshift.deploy.federation import environment
from fedshift.deploy.inside import inside
from fedshift.deploy.keys import check_certificate, check_pair
from fedshift.deploy.reaching import address_of, answers, clocks
from fedshift.deploy.supernode import Ended, Node, run_node
from fedshift.errors import InputError, from_elsewhere, shown
from fedshift.files import check_unshared
from fedshift.flower.chosen import APP, SITE, imported
from fedshift.flower.quiet import KEEP
from fedshift.record.in_use import alone_in

# Seconds between two attempts, at first and at most.
PAUSE, LONGEST = 2.0, 60.0
# Seconds between two checks whether the server is there, and to wait for its answer. They are
# needed because a SuperNode logs nothing while it trains, and never gives up on a server.
EVERY, ANSWER = 5.0, 5.0
# Seconds that a SuperNode always has to join a server that answers.
BEGINS = 60.0
# Keys of client.json for the client's code and data, and the variables that tell its processes.
CHOSEN = {"app": APP, "site": SITE}
MODULE = re.compile(r"[\w.]+:\w+")
# For so many seconds a server counts a killed SuperNode as connected, and refuses another.
FORGETS = 90.0
# If a SuperNode was up for so many seconds, its end is reported again.
WELL = 600.0
# A text for the operator, and its level in a log: info, warning or error.
Say = Callable[[str, str], None]
# Why the client cannot take part in a round now; "" if it can.
Unready = Callable[[], str]
NOT_JOINED = "not joined"
# The error if the machine is there, but no server listens on it.
REFUSED = os.strerror(errno.ECONNREFUSED)


def silent(text: str, level: str) -> None:
    """A `say` that prints nothing."""


def unwatched(unready: Unready) -> None:
    """A `watch` that ignores the client's state."""


def join(
    place: Path,
    server: str,
    *,
    patience: float = 600.0,
    say: Say = silent,
    watch: Callable[[Unready], None] = unwatched,
) -> None:
    """Be a client of the federation at `server` ("host:port") until it is interrupted.

    `place` is the client's folder, as `fedshift deploy init` made it. If the server is not up yet,
    or is gone, the client tries again for `patience` seconds after it has noticed that. It also
    joins again if its SuperNode was killed. `watch` receives a function that returns at any time
    why the client cannot take part. Raises InputError for a folder that is in use, for a folder,
    key or certificate that cannot be used, and for a server that does not answer, has a certificate
    of another federation, or refuses this client.
    """
    node = node_command(place, server)
    with alone_in(place):
        stay = _Stay(node, place, server, patience, say)
        watch(lambda: stay.unready)
        stay.for_ever()


@dataclass
class _Stay:
    """A client that joins again and again, and reports each reason once.

    until   when its patience ends
    begun   when its SuperNode was started
    lost    the SuperNode is up, but the server does not answer
    absent  why it has not joined, apart from `lost`
    over    the end of the run, or of the server, was reported
    played  the last round that the client answered, and of how many
    """

    node: list[str]
    place: Path
    server: str
    patience: float
    say: Say
    unready: str = NOT_JOINED
    absent: str = NOT_JOINED
    until: float = math.inf
    begun: float = 0.0
    looked: float = 0.0
    joined: bool = False
    lost: bool = False
    over: bool = False
    played: tuple[int, int] | None = None
    latest: str = ""
    trouble: str = ""
    news: bool = True
    pause: float = PAUSE
    killed: float = -math.inf

    @property
    def log(self) -> Path:
        return self.place / "supernode.log"

    def for_ever(self) -> None:
        self._be_patient()
        while True:
            if why := answers(self.server, self.place / "ca.crt"):
                self._wait_for_server(why)
            elif (ended := self._stay()).joined:
                self._join_again(ended, time.monotonic() - self.begun)
            elif ended.refused and time.monotonic() < self.killed + FORGETS:
                # The server still counts the killed SuperNode as connected: wait until it does not.
                self.until = max(self.until, self.killed + FORGETS)
            else:
                self.absent = self._why_not(ended)
                self._wait_for_server(self.absent)
            # Pause, but not beyond the end of our patience.
            time.sleep(min(self.pause, max(PAUSE, self.until - time.monotonic())))

    def _be_patient(self) -> None:
        self.until = time.monotonic() + self.patience

    def _stay(self) -> Ended:
        """Run a SuperNode until it ends."""
        self.joined, self.lost = False, False
        self.begun = self.looked = time.monotonic()
        self.unready = self.absent
        try:
            return run_node(self.node, _environment(self.place), self.log, self._look)
        finally:
            self.unready = self.absent

    def _look(self, node: Node) -> None:
        """Called twice a second: read notices, and check the server from time to time."""
        for notice in node.notices():
            self._hear(notice)
        if node.joined and not self.joined:
            self._tell_joined()
        now = time.monotonic()
        if node.up and (now >= self.looked + EVERY or (self.lost and now >= self.until)):
            self._look_for_server(node)
            self.looked = time.monotonic()

    def _look_for_server(self, node: Node) -> None:
        """Check whether the server answers, and whether the SuperNode has joined it."""
        if why := self._unreachable():
            if node.joined and not self.lost:
                # Start to be patient, and report this even if it was the latest report.
                self._be_patient()
                self.latest = ""
            self.lost, self.unready = True, why
            # After the last round a closed port means the end; a silent server may be evaluating.
            if self.played and self.played[0] >= self.played[1] and REFUSED in why:
                self._tell_end()
            self._wait_for_server(why)
        elif not node.joined and time.monotonic() >= max(self.until, self.begun + BEGINS):
            why = f"{self.server} answers, but the SuperNode has not joined it (see {self.log})"
            raise InputError(f"{why}, for {time.monotonic() - self.begun:.0f} s now")
        elif node.joined:
            self._be_patient()
            self.unready = f"{self.server} has not answered the SuperNode yet" if node.away else ""
            if self.lost and not node.away:
                self.lost, self.latest = False, ""
                self.say(f"{self.server} answers again", "info")

    def _unreachable(self) -> str:
        try:
            return answers(self.server, self.place / "ca.crt", ANSWER)
        except InputError as e:
            # Another server may be there for a while. Do not raise: a round may be under way.
            return str(e)

    def _hear(self, notice: Mapping[str, Any]) -> None:
        """Report a notice of the client's app; the same one again only after an answered round."""
        if "trouble" in notice:
            text = from_elsewhere(str(notice["trouble"]), 1000)
            if text != self.trouble:
                self.say(text, "error")
            self.trouble = text
        elif notice.keys() >= {"round", "rounds"}:
            self.trouble, self.played = "", (int(notice["round"]), int(notice["rounds"]))

    def _tell(self, text: str, level: str) -> None:
        self.say(text, level)
        self.news = True

    def _tell_joined(self) -> None:
        self._be_patient()
        # A notice that arrived after the end of a run does not belong to the next one.
        self.played = None if self.over else self.played
        self.joined, self.over, self.trouble, self.unready = True, False, "", ""
        self.absent = NOT_JOINED
        # If a SuperNode is killed again and again, report neither each end nor each new start.
        if self.news:
            self.say(f"joined {self.server}", "info")
        self.news = False

    def _tell_end(self) -> None:
        """Report once that the run, or the server, has ended."""
        if self.over:
            return
        t, rounds = self.played or (0, 0)
        self.over, self.played = True, None
        if not rounds:
            text = "the server has ended"
        elif t < rounds:
            text = f"the server has ended; this client last answered in round {t} of {rounds}"
        else:
            text = f"the run has ended after {rounds} round{'s' * (rounds > 1)}"
        self._tell(f"{text}; waiting for the next one", "info")

    def _wait_for_server(self, why: str) -> None:
        """Report that the server is missing; raises InputError when the patience is over."""
        now = time.monotonic()
        if now >= self.until:
            raise InputError(f"{why}, for {self.patience:g} s now")
        if why != self.latest:
            self._tell(f"{why}; trying again for {self.until - now:.0f} s", "warning")
        self.latest = self.unready = why

    def _why_not(self, ended: Ended) -> str:
        """Why it has not joined; a refusal only if it really came from the server."""
        if not ended.refused:
            return f"{_how(ended)} before it had joined (see {self.log})"
        return clocks(self.server, self.place / "ca.crt") or (
            f"{self.server} does not let this client in ({ended.message}): it does not know the "
            f"key {self.place / 'key'}, or another process has joined with it"
        )

    def _join_again(self, ended: Ended, seconds: float) -> None:
        """After a SuperNode that had joined has ended: report it, and how long to pause."""
        if not self.lost:
            self._be_patient()
        if ended.code == 0:
            # If the server's absence was reported already, keep that as the latest report.
            self.latest, self.pause = self.latest if self.lost else "", PAUSE
            self._tell_end()
            return
        self.killed = time.monotonic()
        text = _how(ended)
        # If it is killed for lack of memory, that will happen again: wait longer each time.
        self.pause = PAUSE if seconds > WELL else min(2 * self.pause, LONGEST)
        if text != self.latest or seconds > WELL:
            more = f"joining again, which may take a minute (see {self.log})"
            self._tell(f"{text}; {more}", "warning")
        self.latest, self.absent = text, f"{text}; joining again"
        self.unready = self.absent


def _how(ended: Ended) -> str:
    if ended.code >= 0:
        return f"the SuperNode failed ({ended.message})"
    return f"the SuperNode was ended by signal {-ended.code}, perhaps for lack of memory"


def node_command(place: Path, server: str) -> list[str]:
    """The SuperNode's command. Raises InputError as `join` does for its inputs."""
    node_config = check_place(place)
    address_of(server)  # raises for an invalid address, before any process is started
    return [
        *inside("flower-supernode", "--isolation", "process", "--superlink", server),
        "--root-certificates", str(place / "ca.crt"),
        "--auth-supernode-private-key", str(place / "key"), "--node-config", node_config,
    ]  # fmt: skip


def check_place(place: Path) -> str:
    """The node's configuration from a client's folder. Raises InputError for unusable files."""
    client = _description(place)
    files = ("ca.crt", "key", "key.pub", "client.json", "site.toml", "experiment.toml", "flower")
    # The folder's Python files are checked, too, because a site's own code is run.
    check_unshared(place, *(place / name for name in files), *place.glob("*.py"))
    check_certificate(place / "ca.crt")
    check_pair(place / "key")
    _check_chosen(place / "client.json", client)
    return f"partition-id={client['partition']} num-partitions={client['partitions']}"


def number_of(place: Path) -> int:
    """The number of the client, from 0, whose folder this is. Raises InputError for others."""
    return int(_description(place)["partition"])


def _check_chosen(file: Path, client: dict[str, Any]) -> None:
    """Raise InputError if client.json names code that this installation does not have."""
    for key, kind, what in (("app", ClientApp, "a ClientApp of Flower"), ("site", object, "")):
        if key not in client:
            continue
        try:
            named = imported(str(client[key]))
        except InputError as e:
            raise InputError(f"{file}: {key} {e}; {_OR_NONE.format(key)}") from None
        if not isinstance(named, kind) or not callable(named):
            raise InputError(
                f'{file}: {key} "{shown(str(client[key]))}" is {type(named).__name__}, not '
                f"{what or 'a function'}; {_OR_NONE.format(key)}"
            )


_OR_NONE = "give one of this installation, or leave {} out for the library's"


def _description(place: Path) -> dict[str, Any]:
    """The contents of client.json. Raises InputError if they are not valid."""
    try:
        client = json.loads((place / "client.json").read_text(encoding="utf-8"))
        numbers = {name: int(client[name]) for name in ("partition", "partitions")}
    except PermissionError as e:
        raise InputError(f"{e.filename}: cannot be read: {e.strerror}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{place}: no client's folder; give one of clients/client-0, ... that "
            "`fedshift deploy init` made"
        ) from None
    if not 0 <= numbers["partition"] < numbers["partitions"]:
        raise InputError(
            f"{place / 'client.json'}: partition {numbers['partition']} of "
            f"{numbers['partitions']}: they count from 0 to {numbers['partitions'] - 1}; take the "
            "file that `fedshift deploy init` made"
        )
    for key in CHOSEN:
        if key in client and not MODULE.fullmatch(str(client[key])):
            raise InputError(
                f'{place / "client.json"}: {key} "{shown(str(client[key]))}": write "module:name"'
            )
    return {**client, **numbers}


def _environment(place: Path) -> dict[str, str]:
    """The environment of a client's SuperNode and of its apps."""
    client, kept = _description(place), _state_folder(place.absolute())
    chosen = {variable: client[key] for key, variable in CHOSEN.items() if key in client}
    return {**environment(place.absolute() / "flower"), KEEP: str(kept), **chosen}


def _state_folder(place: Path) -> Path:
    """The folder for the client's state between rounds, readable by its owner alone."""
    folder = place / "kept"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise InputError(f"{folder}: cannot be made: {e.strerror}") from None
    return folder
