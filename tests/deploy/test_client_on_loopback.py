"""What a client's operator sees, with real processes: the end of a run, and of what it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra ops)")
from fedshift.deploy.place import make_place
from fedshift.deploy.processes import descendants, free_port
from support.loopback import FEDSHIFT, environ, gone, loopback
from support.tls import tls_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes as on Linux"),
]
ONE = """name = "run"
data = { name = "fashion-mnist-mini", limit = 300 }
shift = { kind = "iid", clients = 1 }
model.name = "linear"
training = { rounds = 2, steps = 2 }
"""
EXEC = "Flower's SuperExec was ended by signal 9, perhaps for lack of memory"


def line_with(stream: IO[str] | None, word: str) -> str:
    """The next line that has a word; "" at the end."""
    assert stream is not None
    return next((line.strip() for line in stream if word in line), "")


def readiness(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as e:
        return e.code


def test_the_end_of_a_run_and_of_the_patience(tmp_path: Path) -> None:
    port = free_port()
    with loopback(tmp_path / "f", ONE, 1) as fed:
        client = fed.join(0, "--patience", "12", "--metrics", str(port))
        assert line_with(client.stderr, "joined")
        assert readiness(port) == 200
        fed.play(tmp_path / "run")
        began = time.monotonic()
        fed.serving.close()
        told = line_with(client.stderr, "has ended")
        assert told == "the run has ended after 2 rounds; waiting for the next one"
        assert line_with(client.stderr, "cannot be reached: Connection refused; trying again for ")
        assert readiness(port) == 503
        assert line_with(client.stderr, "error: ").endswith("Connection refused, for 12 s now")
        assert client.wait(30) == 2
        # Starting and ending processes takes seconds, more of them on a busy machine.
        assert 10 < time.monotonic() - began < 40
    assert gone(str(tmp_path))


def test_a_superexec_that_dies_before_its_node_has_joined(tmp_path: Path) -> None:
    """The server shows its certificate and answers nothing: that is not called a refusal."""
    make_place(tmp_path / "f", ONE, 1, ["127.0.0.1"])
    place = tmp_path / "f" / "clients" / "client-0"
    with tls_server(tmp_path / "f") as here:
        join = [FEDSHIFT, "deploy", "client", str(place), "--server", here, "--patience", "100"]
        with subprocess.Popen(join, stderr=subprocess.PIPE, text=True, env=environ()) as client:
            end, lost = time.monotonic() + 60, list[int]()
            while not lost and time.monotonic() < end:
                below = descendants(client.pid).items()
                lost = [pid for pid, command in below if "flower-superexec" in command]
            os.kill(lost[0], signal.SIGKILL)
            told = line_with(client.stderr, "SuperNode")
            client.send_signal(signal.SIGTERM)
            assert client.wait(60) == 143
    log = place / "supernode.log"
    assert told.startswith(f"the SuperNode failed ({EXEC}) before it had joined (see {log}); tryi")
    assert gone(str(tmp_path))
