"""Joining a federation as a client, over Flower's SuperNode."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from fedshift.deploy.federation import environment
from fedshift.deploy.inside import inside, private_socket
from fedshift.deploy.keys import check_certificate, check_pair
from fedshift.deploy.processes import running
from fedshift.deploy.reaching import address_of, answers, clocks
from fedshift.errors import InputError, shown
from fedshift.files import check_unshared
from fedshift.flower.chosen import APP, SITE, imported
from fedshift.flower.quiet import KEEP
from fedshift.record.in_use import alone_in

# Seconds between two attempts, at first and at most, and the line of Flower's log that tells of
# success.
PAUSE, LONGEST = 2.0, 60.0
POLL = 0.5
JOINED = "SuperNode ID:"
# What client.json may say of the client's code and data, and how its processes learn it.
CHOSEN = {"app": APP, "site": SITE}
MODULE = re.compile(r"[\w.]+:\w+")
# For so long a server counts a SuperNode that was killed as connected, and refuses another.
FORGETS = 90.0
# A SuperNode that was up for so long was well: the next end is news.
WELL = 600.0
Say = Callable[[str], None]
Joined = Callable[[], bool]


@dataclass(frozen=True)
class Ended:
    """How a SuperNode ended: its exit code, whether it had joined, and its last message.

    Codes below 0 are signals, as in `subprocess`.
    """

    code: int
    joined: bool
    message: str


def silent(text: str) -> None:
    """Print nothing."""


def unwatched(joined: Joined) -> None:
    """Watch no SuperNode."""


def join(
    place: Path,
    server: str,
    *,
    patience: float = 600.0,
    say: Say = silent,
    watch: Callable[[Joined], None] = unwatched,
) -> None:
    """Be a client of the federation at `server` ("host:port") until it is interrupted.

    `place` is the client's folder, as `fedshift deploy init` made it. If the server is not up yet,
    or ends, the client tries again for `patience` seconds; it also joins again when its SuperNode
    was killed. `watch` gets a function for each SuperNode, which tells whether it has joined and
    goes on. Raises InputError for a folder that is in use, a folder, key or certificate that
    cannot be used, and for a server that does not answer, shows a certificate that is not the
    federation's, or does not let this client in.
    """
    node = node_command(place, server)
    with alone_in(place):
        _Stay(node, place, server, patience, say, watch).for_ever()


@dataclass
class _Stay:
    """A client that joins again and again, and says each reason once."""

    node: list[str]
    place: Path
    server: str
    patience: float
    say: Say
    watch: Callable[[Joined], None]
    latest: str = ""
    news: bool = True
    pause: float = PAUSE
    killed: float = -math.inf

    def for_ever(self) -> None:
        until = time.monotonic() + self.patience
        while True:
            began = time.monotonic()
            if why := answers(self.server, self.place / "ca.crt"):
                self._wait_for_server(why, until)
            elif (ended := self._stay()).joined or ended.code < 0:
                self._join_again(ended, time.monotonic() - began)
                until = time.monotonic() + self.patience
            else:
                self._wait_for_server(self._refusal(ended), until)
            time.sleep(self.pause)

    def _stay(self) -> Ended:
        return _run_node(self.node, self.place, self.watch, self._tell_joined)

    def _tell(self, text: str) -> None:
        self.say(text)
        self.news = True

    def _tell_joined(self) -> None:
        # Not of a SuperNode that is killed again and again: of its end there is one line, too.
        if self.news:
            self.say(f"joined {self.server}")
        self.news = False

    def _wait_for_server(self, why: str, until: float) -> None:
        now = time.monotonic()
        if now < self.killed + FORGETS:
            return
        if now > until:
            raise InputError(f"{why}, for {self.patience:g} s now")
        if why != self.latest:
            self._tell(f"{why}; trying again for {until - now:.0f} s")
        self.latest = why

    def _refusal(self, ended: Ended) -> str:
        return clocks(self.server, self.place / "ca.crt") or (
            f"{self.server} does not let this client in ({ended.message}): it does not know the "
            f"key {self.place / 'key'}, or another process has joined with it"
        )

    def _join_again(self, ended: Ended, seconds: float) -> None:
        if ended.code == 0:
            self.latest, self.pause = "", PAUSE
            self._tell("the server has ended; waiting for the next one")
            return
        self.killed = time.monotonic()
        if ended.code > 0:
            text = f"the SuperNode failed ({ended.message})"
        else:
            text = f"the SuperNode was ended by signal {-ended.code}, perhaps for lack of memory"
        # Where memory is too small it would end again and again: less and less often.
        self.pause = PAUSE if seconds > WELL else min(2 * self.pause, LONGEST)
        if text != self.latest or seconds > WELL:
            log = self.place / "supernode.log"
            self._tell(f"{text}; joining again, which may take a minute (see {log})")
        self.latest = text


def node_command(place: Path, server: str) -> list[str]:
    """The SuperNode's command. Raises InputError as `join` does for its inputs."""
    node_config = check_place(place)
    # For its error, before any process is started.
    address_of(server)
    return [
        *inside("flower-supernode", "--isolation", "process", "--superlink", server),
        "--root-certificates", str(place / "ca.crt"),
        "--auth-supernode-private-key", str(place / "key"), "--node-config", node_config,
    ]  # fmt: skip


def check_place(place: Path) -> str:
    """What a client's folder says of its node. Raises InputError for files that cannot be used."""
    client = _description(place)
    files = ("ca.crt", "key", "key.pub", "client.json", "site.toml", "experiment.toml", "flower")
    # A site's own code is run, too.
    check_unshared(place, *(place / name for name in files), *place.glob("*.py"))
    check_certificate(place / "ca.crt")
    check_pair(place / "key")
    _check_chosen(place / "client.json", client)
    return f"partition-id={client['partition']} num-partitions={client['partitions']}"


def _check_chosen(file: Path, client: dict[str, Any]) -> None:
    """Raise InputError for code that client.json names and this installation does not have."""
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
    """A client's folder in its own words (client.json). Raises InputError."""
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


def _run_node(
    node: list[str], place: Path, watch: Callable[[Joined], None], tell_joined: Callable[[], None]
) -> Ended:
    log = place / "supernode.log"
    env = environment(place.absolute() / "flower") | {KEEP: str(_state_folder(place.absolute()))}
    client = _description(place)
    env |= {variable: client[key] for key, variable in CHOSEN.items() if key in client}
    # The log is appended to; only lines of this process count.
    before = log.stat().st_size if log.exists() else 0

    def lines() -> list[str]:
        with log.open("rb") as f:
            f.seek(before)
            return f.read().decode("utf-8", "replace").splitlines()

    def joined() -> bool:
        return any(JOINED in line for line in lines())

    with private_socket() as socket, running(node, env | socket, log) as process:
        watch(lambda: process.poll() is None and joined())
        while process.poll() is None and not joined():
            time.sleep(POLL)
        if joined():
            tell_joined()
        code = process.wait()
    return Ended(code, joined(), _reason(lines()))


def _state_folder(place: Path) -> Path:
    """The folder for the client's state between rounds, readable by its owner alone."""
    folder = place / "kept"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise InputError(f"{folder}: cannot be made: {e.strerror}") from None
    return folder


def _reason(lines: list[str]) -> str:
    """Flower's reason for a refusal: the line after the one that reports the refusal."""
    texts = [line.strip() for line in lines if line.strip()]
    reasons = [b for a, b in pairwise(texts) if a.startswith("Failed to init")]
    return reasons[-1] if reasons else (texts or ["it said nothing"])[-1]
