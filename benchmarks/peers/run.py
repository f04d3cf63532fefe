"""Other libraries on W1 to W3: `python benchmarks/peers/run.py [--tiny] [--only pfl,fedjax]`.

On W4 with `--workloads W4`.

Each peer is installed from the package index into a virtual environment of its own, by its public
interface alone plays rounds of FedAvg in turn with the plain loop of benchmarks/workloads.py, in
one process, and is reported as a ratio to that loop. One that does not install or run is listed
with the reason. Nothing but the Python standard library is needed here.

All have the CPU builds of torch and torchvision in constraints.txt: where pip finds none (give
PyTorch's CPU index with PIP_EXTRA_INDEX_URL), peers are left out rather than gigabytes of another
build loaded. The package index itself has no CPU build of torchvision for Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from results import save  # noqa: E402

# A round of all eight clients of W4 takes each peer many minutes; it is played when asked for.
WORKLOADS = ("W1", "W2", "W3")
DEEP = "W4"
FEW = {DEEP: 2}
# Where the page of all benchmarks looks for peers.json and peers-deep.json.
OUT = HERE.parents[1] / "build" / "benchmarks"
INSTALL, PLAY = 1800, 3600  # seconds that either may take
Version = tuple[int, int]


@dataclass(frozen=True)
class Peer:
    """A library: what is imported of it, the Pythons it is for, from the first to the second."""

    module: str
    since: Version
    before: Version = (4, 0)


PEERS = {
    "blazefl": Peer("blazefl", (3, 14)),
    "fedjax": Peer("fedjax", (3, 9), (3, 13)),
    "pfl": Peer("pfl", (3, 10), (3, 13)),
    "flower": Peer("flwr.simulation", (3, 10), (3, 14)),
    "fluke": Peer("fluke.algorithms.fedavg", (3, 10)),
    "flgo": Peer("flgo.algorithm.fedavg", (3, 9)),
    "fedlab": Peer("fedlab.contrib.algorithm.basic_client", (3, 9)),
}
Row = dict[str, Any]


class Missing(Exception):  # noqa: N818
    """Why there is no figure."""


def environment(name: str, place: Path) -> Path:
    """The interpreter of a peer's virtual environment, made and filled if need be."""
    peer, now = PEERS[name], sys.version_info[:2]
    if not peer.since <= now < peer.before:
        wants = f"Python {peer.since[0]}.{peer.since[1]} or newer"
        wants += "" if peer.before == (4, 0) else f", below {peer.before[0]}.{peer.before[1]}"
        raise Missing(f"needs {wants}; this is {now[0]}.{now[1]}")
    folder = place / name
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        wanted = ["-r", f"needs/{name}.txt", "-c", "constraints.txt"]
        called(
            [str(python), "-m", "pip", "install", "--quiet", *wanted], "does not install", INSTALL
        )
        (folder / "complete").write_text("")
    called([str(python), "-c", f"import {peer.module}"], "does not import", PLAY)
    return python


def called(command: list[str], failed: str, seconds: int) -> str:
    """What a command prints. Raises Missing with the last line that it says on failure."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=os.environ | one, cwd=HERE
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"{failed} within {seconds} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("WARNING")]
        lines = lines or [f"exit code {done.returncode}"]
        errors = [line for line in lines if "rror" in line]
        # pip says first what is wrong, and then how to read about it; a traceback ends with it.
        message = (errors or lines)[0 if "pip" in command else -1]
        raise Missing(f"{failed}: {message.strip()[:200]}")
    return done.stdout


def played(name: str, python: Path, workload: str, options: list[str]) -> Row:
    """A peer's line of figures for a workload."""
    script = HERE / f"{name}_.py"
    if not script.exists():
        raise Missing("installs, but there is no script that plays it yet")
    output = called([str(python), str(script), workload, *options], "does not run", PLAY)
    row: Row = json.loads(output.strip().splitlines()[-1])
    return row | {"ratio": row["plain"] / row["seconds"]}


def rows(names: list[str], workloads: list[str], place: Path, options: list[str]) -> list[Row]:
    """Every peer on every workload, or why not."""
    results: list[Row] = []
    for name in names:
        try:
            python = environment(name, place)
            for workload in workloads:
                few = ["--clients", str(FEW[workload])] if workload in FEW else []
                results.append(played(name, python, workload, [*options, *few]))
                print(line(results[-1]), flush=True)
        except Missing as e:
            results.append({"peer": name, "missing": str(e)})
            print(line(results[-1]), flush=True)
    return results


def line(row: Row) -> str:
    """A row of figures in words."""
    if "missing" in row:
        return f"{row['peer']:18} {row['missing']}"
    tiny = ", tiny" if row["tiny"] else ""
    return (
        f"{row['peer']:18} {row['version']:8} {row['workload']}: {row['seconds']:.4f} s a round, "
        f"{row['ratio']:.2f}x the plain loop's speed ({row['plain']:.4f} s{tiny})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PEERS), help="as in pfl,fedjax")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="as in W1,W3; also W4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a few clients, to try it out")
    parser.add_argument("--venvs", type=Path, default=HERE.parents[1] / "build" / "peers")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    arguments = parser.parse_args()
    names, workloads = arguments.only.split(","), arguments.workloads.split(",")
    if odd := [*set(names) - set(PEERS), *set(workloads) - {*WORKLOADS, DEEP}]:
        there = f"peers {', '.join(PEERS)}; workloads {', '.join((*WORKLOADS, DEEP))}"
        raise SystemExit(f"unknown: {', '.join(sorted(odd))}; there are {there}")
    if DEEP in workloads and len(workloads) > 1:
        raise SystemExit(f"{DEEP} has a file of its own; ask for it alone")
    options = ["--rounds", str(arguments.rounds), *(["--tiny"] if arguments.tiny else [])]
    results = rows(names, workloads, arguments.venvs.resolve(), options)
    out = arguments.out or OUT / ("peers-deep.json" if workloads == [DEEP] else "peers.json")
    save(out, {"rows": results}, quick=arguments.tiny)


if __name__ == "__main__":
    main()
