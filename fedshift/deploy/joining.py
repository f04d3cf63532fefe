"""Joining a federation as a client, over Flower's SuperNode."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedshift.deploy.federation import environment
from fedshift.deploy.inside import inside, private_socket
from fedshift.deploy.keys import check_certificate, check_client_key
from fedshift.deploy.processes import running
from fedshift.deploy.reaching import address_of, answers
from fedshift.errors import InputError, TrainingError, shown
from fedshift.files import check_unshared
from fedshift.flower.chosen import APP, SITE
from fedshift.flower.kept import KEEP

# Seconds between two attempts, and the line of Flower's log that tells of success.
PAUSE = 2.0
JOINED = "SuperNode ID:"
# What client.json may say of the client's code and data, and how its processes learn it.
CHOSEN = {"app": APP, "site": SITE}
MODULE = re.compile(r"[\w.]+:\w+")
Say = Callable[[str], None]


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


def join(place: Path, server: str, *, patience: float = 600.0, say: Say = silent) -> None:
    """Be a client of the federation at `server` ("host:port") until it is interrupted.

    `place` is the client's folder, as `fedshift deploy init` made it. If the server is not up yet,
    or ends, the client tries again for `patience` seconds. Raises
    InputError for a folder, key or certificate that cannot be used, for a server that does not
    answer, shows a certificate that is not the federation's, or does not let this client in, and
    TrainingError for a SuperNode that was killed.
    """
    node = node_command(place, server)
    last_reason, until = "", time.monotonic() + patience
    while True:
        if why := _work_once(node, place, server, say):
            if time.monotonic() > until:
                raise InputError(f"{why}, for {patience:g} s now")
            # Said once, not at every attempt.
            if why != last_reason:
                say(f"{why}; trying again for {until - time.monotonic():.0f} s")
            last_reason = why
        else:
            last_reason, until = "", time.monotonic() + patience
        time.sleep(PAUSE)


def node_command(place: Path, server: str) -> list[str]:
    """The SuperNode's command. Raises InputError as `join` does for its inputs."""
    client = _description(place)
    check_unshared(place)
    node_config = f"partition-id={client['partition']} num-partitions={client['partitions']}"
    check_certificate(place / "ca.crt")
    check_client_key(place / "key")
    # For its error, before any process is started.
    address_of(server)
    return [
        *inside("flower-supernode", "--isolation", "process", "--superlink", server),
        "--root-certificates", str(place / "ca.crt"),
        "--auth-supernode-private-key", str(place / "key"), "--node-config", node_config,
    ]  # fmt: skip


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
    for key in CHOSEN:
        if key in client and not MODULE.fullmatch(str(client[key])):
            raise InputError(
                f'{place / "client.json"}: {key} "{shown(str(client[key]))}": write "module:name"'
            )
    return {**client, **numbers}


def _work_once(node: list[str], place: Path, server: str, say: Say) -> str:
    """Work for the server until it ends; return the reason if that was impossible, else "".

    Raises InputError for errors that a retry cannot cure, TrainingError for a killed SuperNode.
    """
    if why := answers(server, place / "ca.crt"):
        return why
    ended = _run_node(node, place)
    # A signal from outside; joining again would only fill the memory again.
    if ended.code < 0:
        raise TrainingError(
            f"the SuperNode was ended by signal {-ended.code}, perhaps for lack of memory; see "
            f"{place / 'supernode.log'}"
        )
    if ended.joined:
        lost = f"the SuperNode failed ({ended.message}); joining again"
        say(lost if ended.code else "the server has ended; waiting for the next one")
        return ""
    return (
        f"{server} does not let this client in ({ended.message}): it does not know the key "
        f"{place / 'key'}, or not yet, or another process has joined with it"
    )


def _run_node(node: list[str], place: Path) -> Ended:
    log = place / "supernode.log"
    env = environment(place.absolute() / "flower") | {KEEP: str(_state_folder(place.absolute()))}
    client = _description(place)
    env |= {variable: client[key] for key, variable in CHOSEN.items() if key in client}
    # The log is appended to; only lines of this process count.
    before = log.stat().st_size if log.exists() else 0
    with private_socket() as socket, running(node, env | socket, log) as process:
        code = process.wait()
    with log.open("rb") as f:
        f.seek(before)
        lines = f.read().decode("utf-8", "replace").splitlines()
    return Ended(code, any(JOINED in line for line in lines), _reason(lines))


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
