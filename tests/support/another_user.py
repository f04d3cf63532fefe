"""Work as another user of this machine, or as another machine, in a child process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)
# Addresses that are for tests of networks (RFC 2544).
SERVER, OTHER = "198.18.7.1", "198.18.7.2"
needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user"
)


def elsewhere(
    work: Callable[[], Any], *, user: int = NOBODY, group: int | None = None, network: str = ""
) -> Any:
    """The JSON that `work` returns, run by another user, in a separate network if one is named.

    group: the user's, where it is not that of the same number.

    Import what it needs first: that user may be unable to read this Python.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        answer: Any = {"error": "died"}
        try:
            if network:
                # Python has this call from 3.12 on.
                with open(f"/run/netns/{network}") as f:
                    assert ctypes.CDLL(None).setns(f.fileno(), NEW_NETWORK) == 0
            os.setgroups([])
            os.setgid(user if group is None else group)
            os.setuid(user)
            answer = work()
        except BaseException as e:
            answer = {"error": repr(e)}
        finally:
            os.write(theirs, json.dumps(answer).encode())
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as f:
        answer = json.loads(f.read())
    os.waitpid(child, 0)
    if isinstance(answer, dict) and "error" in answer:
        raise AssertionError(answer["error"])
    return answer


@contextlib.contextmanager
def another_machine() -> Iterator[str]:
    """The name of a network in which this machine is SERVER and the only other is OTHER."""
    name = f"fedshift{os.getpid()}"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name]).returncode:
        pytest.skip("no second network can be made here (ip netns add)")
    link = f"fs{os.getpid() % 10**6}"
    try:
        for line in (
            f"link add {link}a type veth peer name {link}b netns {name}",
            f"addr add {SERVER}/30 dev {link}a",
            f"link set {link}a up",
            f"-n {name} addr add {OTHER}/30 dev {link}b",
            f"-n {name} link set {link}b up",
        ):
            if subprocess.run(["ip", *line.split()]).returncode:
                pytest.skip(f"no second network can be made here (ip {line})")
        yield name
    finally:
        # Its end of the pair goes with it, and so does the other.
        subprocess.run(["ip", "netns", "del", name], check=True)


def command_lines() -> list[str]:
    """The command lines of all processes that any user may read."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return lines


def ports_of(processes: Iterable[int]) -> list[str]:
    """The TCP addresses on which these processes listen, in the kernel's notation."""
    handles = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                handles.add(os.readlink(link))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in handles]


def sockets_named(part: str) -> list[str]:
    """The paths of Unix sockets that contain this text; any user may read them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    paths = {line.split(None, 7)[7] for line in lines[1:] if len(line.split(None, 7)) == 8}
    return sorted(path for path in paths if part in path)
