"""A federation on this machine: one server, three clients, TLS, and a key for each client.

    python examples/loopback/run.py [-c section.key=value ...]

Makes the certificates and keys, starts the clients and the server, prints what the server prints,
and stops everything that it has started. The same experiment in one process:
`fedshift run examples/loopback/experiment.toml`.
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
    """End a client and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-c", action="append", default=[], help="as in `fedshift run`")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run")
    given = parser.parse_args()
    changes = [word for change in given.c for word in ("-c", change)]
    with (
        tempfile.TemporaryDirectory(prefix="fedshift-loopback-") as made,
        contextlib.ExitStack() as s,
    ):
        folder, port = Path(made) / "federation", free_port()
        init = [FEDSHIFT, "deploy", "init", str(HERE / "experiment.toml"), str(folder), *changes]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
        for i in range(CLIENTS):
            place = folder / "clients" / f"client-{i}"
            join = [FEDSHIFT, "deploy", "client", str(place), "--server", f"127.0.0.1:{port}"]
            client = subprocess.Popen(join, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            s.callback(stop, client)
        serve = [FEDSHIFT, "deploy", "server", str(folder), "--port", str(port)]
        out = ["--out", str(given.out or Path(os.getcwd()) / "loopback")]
        return subprocess.run([*serve, *out], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
