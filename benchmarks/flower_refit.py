"""A router fitted by gradients over machines: `python benchmarks/flower_refit.py [--write]`.

Real processes on this machine: `fedshift deploy server --refit` and three clients, with TLS and
keys, FedDRM on a small network. The router's last layer is fitted from sums that the clients send
in many messages. The file must be, byte for byte, that of `fedshift run` in one process.

The federation is in `--folder`. The same command goes on with a run that was interrupted, and only
compares one that is over. `--write` writes results/flower_refit.md. Minutes. Linux.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

from flower_faults import FEDSHIFT, Fed

from fedshift_deploy.processes import free_port

OUT = Path(__file__).parents[1] / "results" / "flower_refit.md"
EXPERIMENT = """name = "run"
data = { name = "fashion-mnist-mini", limit = 300 }
shift = { target = "clients", kind = "dirichlet-per-client", beta = 1.0, clients = 3 }
model = { name = "mlp-projected", hidden = [8] }
method.name = "feddrm"
training = { rounds = 2, steps = 3, lr = 0.05, evaluate_every = 2 }
"""
FILES = ("router.safetensors", "clients.csv")


def play(fed: Fed, patience: float = 3600.0) -> None:
    """The run to its end, from where it is."""
    run = fed.folder / "run"
    more = ["--resume", str(run)] if (run / "checkpoints").exists() else []
    server = fed.serve("--refit", "--patience", "600", "--timeout", "600", *more)
    fed.join(0, 1, 2, patience=patience)
    try:
        if code := server.code(patience):
            raise SystemExit(f"the server ended with {code}: {server.words()}")
    finally:
        fed.end()


def messages(fed: Fed, kind: str) -> int:
    """How many messages of a kind client 0 was sent, in all sittings."""
    log = (fed.client(0) / "supernode.log").read_text(errors="replace")
    return len(re.findall(rf"Receiving: {kind}\b", log))


def main() -> int:
    """Play and compare; exit code 1 where a file differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/flower_refit"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    fed, began = Fed(folder, free_port()), time.monotonic()
    if not fed.folder.exists():
        (folder / "e.toml").write_text(EXPERIMENT)
        init = [FEDSHIFT, "deploy", "init", str(folder / "e.toml"), str(fed.folder)]
        subprocess.run([*init, "--host", "127.0.0.1"], check=True, stdout=subprocess.DEVNULL)
    there, here = fed.folder / "run", folder / "here"
    if not (there / "summary.json").exists():
        play(fed)
        (folder / "seconds").write_text(f"{time.monotonic() - began:.0f}")
    if not (here / "summary.json").exists():
        alone = [FEDSHIFT, "run", str(fed.folder / "experiment.toml"), "--out", str(here)]
        subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
    odd = [name for name in FILES if (there / name).read_bytes() != (here / name).read_bytes()]
    text = PAGE.format(
        rounds=messages(fed, "train"), router=messages(fed, "query"),
        seconds=(folder / "seconds").read_text(),
        same="the same bytes" if not odd else f"other bytes in {', '.join(odd)}",
    )  # fmt: skip
    print(text)
    if options.write:
        OUT.write_text(text)
    return int(bool(odd))


PAGE = """# A router fitted by gradients over machines

`python benchmarks/flower_refit.py --write`: a server with `--refit` and three clients in processes
of their own, with TLS and keys, FedDRM on a small network, two rounds. Messages are those that one
client was sent. `router.safetensors` and `clients.csv` are set beside those of `fedshift run`. Each
message starts a Python with torch at each client, which is most of the time; other work kept both
cores busy.

| messages of rounds | of the router and of scores | seconds, last sitting | router and clients |
| --- | --- | --- | --- |
| {rounds} | {router} | {seconds} | {same} |
"""

if __name__ == "__main__":
    sys.exit(main())
