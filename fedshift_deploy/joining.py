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

from fedshift.errors import InputError, from_elsewhere, shown
from fedshift.files import check_unshared
from fedshift.record.in_use import alone_in
from fedshift_deploy.chosen import APP, KEEP, SITE, imported
from fedshift_deploy.federation import environment
from fedshift_deploy.inside import inside
from fedshift_deploy.keys import check_certificate, check_pair
from fedshift_deploy.reaching import address_of, answers, clocks
from fedshift_deploy.supernode import Ended, Node, run_node

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


def print_nothing(text: str, level: str) -> None:
    """A `say` that prints nothing."""


def unwatched(unready: Unready) -> None:
    """A `watch` that ignores the client's state."""


def join(
    place: Path,
    server: str,
    *,
    patience: float = 600.0,
    say: Say = print_nothing,
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
        membership = _Membership(node, place, server, patience, say)
        watch(lambda: membership.unready)
        membership.stay()


@dataclass
class _Membership:
    """A client that joins again and again, and reports each reason once.

    unready             why it cannot take part now; "" if it can
    not_joined_because  the same, apart from `server_lost`, while it has not joined
    deadline            when its patience ends
    started_at          when its SuperNode was started; checked_at: when the server was checked
    joined              its SuperNode has joined
    server_lost         its SuperNode is up, but the server does not answer
    end_reported        the end of the run, or of the server, was reported
    last_round          the last round that the client answered, and of how many
    last_report         the last report on the server; last_trouble: the app's last one
    report_joined       report when it joins: False if nothing was reported since it last joined
    pause               seconds until the next attempt
    killed_at           when its SuperNode was killed last
    """

    node: list[str]
    place: Path
    server: str
    patience: float
    say: Say
    unready: str = NOT_JOINED
    not_joined_because: str = NOT_JOINED
    deadline: float = math.inf
    started_at: float = 0.0
    checked_at: float = 0.0
    joined: bool = False
    server_lost: bool = False
    end_reported: bool = False
    last_round: tuple[int, int] | None = None
    last_report: str = ""
    last_trouble: str = ""
    report_joined: bool = True
    pause: float = PAUSE
    killed_at: float = -math.inf

    @property
    def log(self) -> Path:
        return self.place / "supernode.log"

    def stay(self) -> None:
        self._be_patient()
        while True:
            if why := answers(self.server, self.place / "ca.crt"):
                self._wait_for_server(why)
            elif (ended := self._run_node()).joined:
                self._join_again(ended, time.monotonic() - self.started_at)
            elif ended.refused and time.monotonic() < self.killed_at + FORGETS:
                # The server still counts the killed SuperNode as connected: wait until it does not.
                self.deadline = max(self.deadline, self.killed_at + FORGETS)
            else:
                self.not_joined_because = self._why_not(ended)
                self._wait_for_server(self.not_joined_because)
            # Pause, but not beyond the end of our patience.
            time.sleep(min(self.pause, max(PAUSE, self.deadline - time.monotonic())))

    def _be_patient(self) -> None:
        self.deadline = time.monotonic() + self.patience

    def _run_node(self) -> Ended:
        """Run a SuperNode until it ends."""
        self.joined, self.server_lost = False, False
        self.started_at = self.checked_at = time.monotonic()
        self.unready = self.not_joined_because
        try:
            return run_node(self.node, _environment(self.place), self.log, self._check)
        finally:
            self.unready = self.not_joined_because

    def _check(self, node: Node) -> None:
        """Called twice a second: read notices, and check the server from time to time."""
        for notice in node.notices():
            self._report_notice(notice)
        if node.joined and not self.joined:
            self._report_joined()
        now = time.monotonic()
        if node.up and (
            now >= self.checked_at + EVERY or (self.server_lost and now >= self.deadline)
        ):
            self._check_server(node)
            self.checked_at = time.monotonic()

    def _check_server(self, node: Node) -> None:
        """Check whether the server answers, and whether the SuperNode has joined it."""
        if why := self._unreachable():
            if node.joined and not self.server_lost:
                # Start to be patient, and report this even if it was the latest report.
                self._be_patient()
                self.last_report = ""
            self.server_lost, self.unready = True, why
            # After the last round a closed port means the end; a silent server may be evaluating.
            if self.last_round and self.last_round[0] >= self.last_round[1] and REFUSED in why:
                self._report_end()
            self._wait_for_server(why)
        elif not node.joined and time.monotonic() >= max(self.deadline, self.started_at + BEGINS):
            why = f"{self.server} answers, but the SuperNode has not joined it (see {self.log})"
            raise InputError(f"{why}, for {time.monotonic() - self.started_at:.0f} s now")
        elif node.joined:
            self._be_patient()
            self.unready = f"{self.server} has not answered the SuperNode yet" if node.away else ""
            if self.server_lost and not node.away:
                self.server_lost, self.last_report = False, ""
                self.say(f"{self.server} answers again", "info")

    def _unreachable(self) -> str:
        try:
            return answers(self.server, self.place / "ca.crt", ANSWER)
        except InputError as e:
            # Another server may be there for a while. Do not raise: a round may be under way.
            return str(e)

    def _report_notice(self, notice: Mapping[str, Any]) -> None:
        """Report a notice of the client's app; the same one again only after an answered round."""
        if "trouble" in notice:
            text = from_elsewhere(str(notice["trouble"]), 1000)
            if text != self.last_trouble:
                self.say(text, "error")
            self.last_trouble = text
        elif notice.keys() >= {"round", "rounds"}:
            self.last_trouble, self.last_round = "", (int(notice["round"]), int(notice["rounds"]))

    def _report(self, text: str, level: str) -> None:
        self.say(text, level)
        self.report_joined = True

    def _report_joined(self) -> None:
        self._be_patient()
        # A notice that arrived after the end of a run does not belong to the next one.
        self.last_round = None if self.end_reported else self.last_round
        self.joined, self.end_reported, self.last_trouble, self.unready = True, False, "", ""
        self.not_joined_because = NOT_JOINED
        # If a SuperNode is killed again and again, report neither each end nor each new start.
        if self.report_joined:
            self.say(f"joined {self.server}", "info")
        self.report_joined = False

    def _report_end(self) -> None:
        """Report once that the run, or the server, has ended."""
        if self.end_reported:
            return
        t, rounds = self.last_round or (0, 0)
        self.end_reported, self.last_round = True, None
        if not rounds:
            text = "the server has ended"
        elif t < rounds:
            text = f"the server has ended; this client last answered in round {t} of {rounds}"
        else:
            text = f"the run has ended after {rounds} round{'s' * (rounds > 1)}"
        self._report(f"{text}; waiting for the next one", "info")

    def _wait_for_server(self, why: str) -> None:
        """Report that the server is missing; raises InputError when the patience is over."""
        now = time.monotonic()
        if now >= self.deadline:
            raise InputError(f"{why}, for {self.patience:g} s now")
        if why != self.last_report:
            self._report(f"{why}; trying again for {self.deadline - now:.0f} s", "warning")
        self.last_report = self.unready = why

    def _why_not(self, ended: Ended) -> str:
        """Why it has not joined; a refusal only if it really came from the server."""
        if not ended.refused:
            return f"{_how_ended(ended)} before it had joined (see {self.log})"
        return clocks(self.server, self.place / "ca.crt") or (
            f"{self.server} does not let this client in ({ended.message}): it does not know the "
            f"key {self.place / 'key'}, or another process has joined with it"
        )

    def _join_again(self, ended: Ended, seconds: float) -> None:
        """After a SuperNode that had joined has ended: report it, and how long to pause."""
        if not self.server_lost:
            self._be_patient()
        if ended.code == 0:
            # If the server's absence was reported already, keep that as the latest report.
            self.last_report, self.pause = self.last_report if self.server_lost else "", PAUSE
            self._report_end()
            return
        self.killed_at = time.monotonic()
        text = _how_ended(ended)
        # If it is killed for lack of memory, that will happen again: wait longer each time.
        self.pause = PAUSE if seconds > WELL else min(2 * self.pause, LONGEST)
        if text != self.last_report or seconds > WELL:
            more = f"joining again, which may take a minute (see {self.log})"
            self._report(f"{text}; {more}", "warning")
        self.last_report, self.not_joined_because = text, f"{text}; joining again"
        self.unready = self.not_joined_because


def _how_ended(ended: Ended) -> str:
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
    client = _read_description(place)
    files = ("ca.crt", "key", "key.pub", "client.json", "site.toml", "experiment.toml", "flower")
    # The folder's Python files are checked, too, because a site's own code is run.
    check_unshared(place, *(place / name for name in files), *place.glob("*.py"))
    check_certificate(place / "ca.crt")
    check_pair(place / "key")
    _check_chosen(place / "client.json", client)
    return f"partition-id={client['partition']} num-partitions={client['partitions']}"


def number_of(place: Path) -> int:
    """The number of the client, from 0, whose folder this is. Raises InputError for others."""
    return int(_read_description(place)["partition"])


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


def _read_description(place: Path) -> dict[str, Any]:
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
    client, kept = _read_description(place), _state_folder(place.absolute())
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
