"""A federation on this machine: one server, three clients, TLS, and a key for each client.

    python examples/loopback/run.py [-c section.key=value ...]

Makes the certificates and keys, starts the clients and the server, prints what the server prints,
and stops everything that it has started. The same numbers in one process, with the
cap that `deploy init` chooses: `fedshift run experiment.toml -c training.max_weight=0.5`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FEDSHIFT = str(Path(sys.executable).with_name("fedshift"))
CLIENTS = 3


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started; nothing, where it has ended."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-c", action="append", default=[], help="as in `fedshift run`")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run")
    given = parser.parse_args()
    changes = [word for change in given.c for word in ("-c", change)]
    # Whoever ends this script ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with (
        tempfile.TemporaryDirectory(prefix="fedshift-loopback-") as made,
        contextlib.ExitStack() as s,
    ):
        folder, port = Path(made) / "federation", free_port()
        init = [FEDSHIFT, "deploy", "init", str(HERE / "experiment.toml"), str(folder), *changes]
        if code := subprocess.run(init, check=False, stdout=subprocess.DEVNULL).returncode:
            return code
        for i in range(CLIENTS):
            place = folder / "clients" / f"client-{i}"
            join = [FEDSHIFT, "deploy", "client", str(place), "--server", f"127.0.0.1:{port}"]
            client = subprocess.Popen(join, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            s.callback(stop, client)
        serve = [FEDSHIFT, "deploy", "server", str(folder), "--port", str(port)]
        out = ["--out", str(given.out or Path(os.getcwd()) / "loopback")]
        server = subprocess.Popen([*serve, *out])
        s.callback(stop, server)
        return server.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
