"""A client's screen with real processes: the end of a run, and of the processes it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra ops)")
from fedshift_deploy.place import make_place
from fedshift_deploy.processes import descendants, free_port
from support.loopback import FEDSHIFT, environ, gone
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


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command of `fedshift deploy`, which ends with the block."""
    line = [FEDSHIFT, "deploy", *arguments]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environ()) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def test_the_end_of_a_run_and_of_the_patience(tmp_path: Path) -> None:
    """One line for each; the client is not ready, and ends while its SuperNode would go on."""
    (tmp_path / "one.toml").write_text(ONE)
    folder, port, metrics = str(tmp_path / "f"), str(free_port()), free_port()
    init = [FEDSHIFT, "deploy", "init", str(tmp_path / "one.toml"), folder]
    subprocess.run(init, check=True, env=environ(), capture_output=True)
    joins = ("client", f"{folder}/clients/client-0", "--server", f"127.0.0.1:{port}")
    with running("server", folder, "--port", port) as server:
        assert line_with(server.stderr, "listening")
        with running(*joins, "--patience", "12", "--metrics", str(metrics)) as client:
            assert line_with(client.stderr, "joined")
            assert readiness(metrics) == 200
            line = line_with(client.stderr, "ended")
            assert line == "the run has ended after 2 rounds; waiting for the next one"
            began = time.monotonic()
            refused = "cannot be reached: Connection refused"
            assert line_with(client.stderr, "reached").endswith(f"{refused}; trying again for 12 s")
            assert readiness(metrics) == 503
            assert line_with(client.stderr, "error: ").endswith(f"{refused}, for 12 s now")
            assert 10 < time.monotonic() - began < 20
            assert client.wait(30) == 2
        assert server.wait(60) == 0
    assert gone(str(tmp_path))


def test_a_superexec_that_dies_before_its_node_has_joined(tmp_path: Path) -> None:
    """The server shows its certificate and answers nothing, which is not reported as a refusal."""
    make_place(tmp_path / "f", ONE, 1, ["127.0.0.1"])
    place = tmp_path / "f" / "clients" / "client-0"
    with tls_server(tmp_path / "f") as here:
        joins = ("client", str(place), "--server", here, "--patience", "100")
        with running(*joins) as client:
            end, lost = time.monotonic() + 60, list[int]()
            while not lost and time.monotonic() < end:
                below = descendants(client.pid).items()
                lost = [pid for pid, command in below if "flower-superexec" in command]
            os.kill(lost[0], signal.SIGKILL)
            line = line_with(client.stderr, "SuperNode")
            client.send_signal(signal.SIGTERM)
            assert client.wait(60) == 143
    log = place / "supernode.log"
    assert line.startswith(f"the SuperNode failed ({EXEC}) before it had joined (see {log}); tryi")
    assert gone(str(tmp_path))
