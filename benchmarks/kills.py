"""Runs killed at random points and resumed: `python benchmarks/kills.py [--points N] [--write]`.

Real processes of `fedshift run` are ended by SIGKILL in the middle of a round, of a checkpoint (at
each of its steps, with files written in part), and in one of their worker processes; then they are
resumed. The files must be those of a run that nothing happened to, bit for bit, and at most one
round may have been played again. The points are a function of the seed.

Most processes are forked from one that has loaded the libraries; every tenth run is resumed by the
installed command from nothing, which is the one whose start is timed.

What is done is in `--folder`, and the same command goes on from there. `--write` writes
results/kills.md. Two hundred points take six minutes of one core. Linux.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import json
import platform
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from killable import PATIENCE, children, ended, events, first_event, gone, spawn, waited

from fedshift.experiments.config.load import dumps, validate
from fedshift.record.in_use import IN_USE

OUT = Path(__file__).parents[1] / "results" / "kills.md"
ROUNDS, COLD, START = 12, 10, 5.0
# In the middle of a round in one process, of a checkpoint, in a worker, in the process above them.
KINDS = ("round", "checkpoint", "worker", "above workers")
CLIENTS = {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 4}
METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "ditto": {"shift": CLIENTS},
    "feddisk": {
        "method": {"name": "feddisk", "density_rounds": 3, "hidden": [6], "estimator": "direct"}
    },
    "feddrm": {"shift": CLIENTS, "model": {"name": "mlp-projected", "hidden": [8]}},
    "labelset_fedavg": {
        "shift": {"target": "union", "kind": "label-sets", "clients": 5, "samples": 80}
    },
}


def toml_of(method: str) -> str:
    """Twelve rounds over some of a few small clients, measured every second round."""
    tables = {
        "name": "run",
        "data": {"name": "fashion-mnist-mini"},
        "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 6},
        "model": {"name": "linear"},
        "method": {"name": method},
        "training": {"rounds": ROUNDS, "steps": 2, "cohort": 3, "evaluate_every": 2, "lr": 0.05},
    }
    return dumps(validate(tables | METHODS[method]))


@dataclass(frozen=True)
class Point:
    """Where a run is killed.

    after   once this round is reported (0: once the process has begun)
    delay   then so many rounds' times later
    step    at this share of all steps of writing checkpoints, with the share `kept` of a file
    """

    number: int
    method: str
    kind: str
    after: int
    delay: float
    step: float
    kept: float

    @property
    def options(self) -> tuple[str, ...]:
        """Further options of the command."""
        return ("--workers", "2") if "worker" in self.kind else ()


def point(number: int, seed: int) -> Point:
    """Point `number` of the seed's sequence; methods take turns, and so do kinds."""
    source = random.Random(f"{seed} {number}")
    names = list(METHODS)
    kind = KINDS[number // len(names) % len(KINDS)]
    first = 1 if "worker" in kind else 0
    return Point(
        number, names[number % len(names)], kind, source.randrange(first, ROUNDS),
        source.random(), source.random(), source.random(),
    )  # fmt: skip


def kill(where: Point, place: Path, pid: int, seconds: float) -> tuple[int, bool]:
    """Kill as the point says; (exit code of the main process, whether all workers ended)."""
    until = time.monotonic() + PATIENCE
    while where.after and (code := ended(pid)) is None and time.monotonic() < until:
        if any(e["event"] == "round" and e["round"] >= where.after for e in events(place)):
            break
        time.sleep(0.002)
    else:
        if where.after:
            return (code if code is not None else waited(pid)), True
    time.sleep(where.delay * (seconds if where.after else 20 * seconds))
    below = children(pid)
    if (code := ended(pid)) is not None:
        return code, True
    if where.kind == "worker" and below:
        os.kill(below[where.number % len(below)], signal.SIGKILL)
        return waited(pid), gone(below)
    os.kill(pid, signal.SIGKILL)
    return waited(pid), gone(below)


def whole(folder: Path, method: str) -> tuple[dict[str, bytes], float, int]:
    """(files, seconds per round, steps of writing checkpoints) of a run without a fault."""
    place = folder / "whole" / method
    if not (place / "steps").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "f.toml").write_text(toml_of(method))
        code = waited(spawn(place, ["run", "f.toml", "--out", "o", "--checkpoint-every", "1"]))
        if code:
            raise RuntimeError(f"{method} ends with {code}: {(place / 'said.log').read_text()}")
    times = [e["time"] for e in events(place) if e["event"] == "round"]
    return left(place), (times[-1] - times[0]) / (ROUNDS - 1), int((place / "steps").read_text())


def left(place: Path) -> dict[str, bytes]:
    """All files of a run but events and page, which have times, and the lock of its process."""
    passing = ("events.jsonl", "report.html", IN_USE)
    files = (p for p in (place / "o").rglob("*") if p.is_file() and p.name not in passing)
    return {str(p.relative_to(place)): p.read_bytes() for p in files}


@dataclass(frozen=True)
class Outcome:
    """What came of one point.

    killed   whether it was before the run had ended; begun: whether there was something to resume
    mid      whether a checkpoint was being written; redone: rounds played twice
    seconds, processor: from the start of the resuming process to its first event
    """

    number: int
    method: str
    kind: str
    killed: bool
    begun: bool = True
    mid: bool = False
    redone: int = 0
    cold: bool = False
    seconds: float = 0.0
    processor: float = 0.0
    wrong: str = ""


def tried(where: Point, folder: Path) -> Outcome:
    """Kill a run at a point, resume it, and compare."""
    files, seconds, steps = whole(folder, where.method)
    place = folder / "cut"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "f.toml").write_text(toml_of(where.method))
    fresh = ["run", "f.toml", "--out", "o", "--checkpoint-every", "1", *where.options]
    if where.kind == "checkpoint":
        code = waited(spawn(place, fresh, 1 + int(where.step * steps), where.kept))
        orderly = True
    else:
        code, orderly = kill(where, place, spawn(place, fresh), seconds)
    if code not in (-signal.SIGKILL, 4) or (place / "o" / "summary.json").exists():
        wrong = "" if code == 0 else _told_complete(place)
        wrong = wrong or _apart(place, files)
        return Outcome(where.number, where.method, where.kind, False, wrong=wrong)
    mid = any((place / "o" / "checkpoints").rglob("*.part"))
    return _resumed(where, place, files, mid, "" if orderly else "workers were left behind")


def _told_complete(place: Path) -> str:
    """A run that was killed after its last file says so, and its page can be drawn."""
    resumed, drawn = (
        waited(spawn(place, arguments)) for arguments in (["run", "--resume", "o"], ["report", "o"])
    )
    return "" if (resumed, drawn) == (2, 0) else f"exit codes {resumed}, {drawn} at the end"


def _resumed(
    where: Point, place: Path, files: Mapping[str, bytes], mid: bool, wrong: str
) -> Outcome:
    before, cold = events(place), where.number % COLD == COLD - 1
    begun = (place / "o" / "config.resolved.toml").exists()
    arguments = ["run", "--resume", "o", "--checkpoint-every", "1", *where.options]
    if not begun:  # nothing is lost, and nothing to go on from
        shutil.rmtree(place / "o", ignore_errors=True)
        arguments = ["run", "f.toml", "--out", "o", *where.options]
        before = []
    began = time.time()
    pid = spawn(place, arguments, cold=cold)
    seconds, processor, code = first_event(place, pid, len(before), began)
    rounds = [e["round"] for e in before if e["event"] == "round"]
    again = [e["round"] for e in events(place)[len(before) :] if e["event"] == "round"]
    redone = len(set(rounds) & set(again))
    wrong = wrong or (f"exit code {code} of the resumed run" if code else "")
    wrong = wrong or ("more than one round played again" if redone > 1 else "")
    wrong = wrong or _apart(place, files)
    return Outcome(
        where.number, where.method, where.kind, True, begun, mid, redone, cold, seconds, processor,
        wrong,
    )  # fmt: skip


def _apart(place: Path, files: Mapping[str, bytes]) -> str:
    written = left(place)
    odd = sorted(k for k in written.keys() | files.keys() if written.get(k) != files.get(k))
    return f"{', '.join(odd[:3])} not as without the kill" if odd else ""


def all_points(folder: Path, points: int, seed: int) -> Iterator[Outcome]:
    """So many points that hit a run before it ended; those that are done are read."""
    log = folder / f"points-{seed}.jsonl"
    done = [Outcome(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() \
        else []  # fmt: skip
    hits, number = 0, 0
    while hits < points:
        if number >= len(done):
            done.append(tried(point(number, seed), folder))
            with log.open("a") as f:
                f.write(json.dumps(asdict(done[number])) + "\n")
        hits, number = hits + done[number].killed, number + 1
        yield done[number - 1]


def table(outcomes: Sequence[Outcome]) -> str:
    """Methods in rows, kinds of points in columns."""
    lines = ["| method | " + " | ".join(KINDS) + " | the same files | rounds played again |",
             "| --- " * (len(KINDS) + 3) + "|"]  # fmt: skip
    hit = [one for one in outcomes if one.killed]
    for method in (*METHODS, "all"):
        mine = [one for one in hit if method in (one.method, "all")]
        of = [str(sum(one.kind == kind for one in mine)) for kind in KINDS]
        same = f"{sum(not one.wrong for one in mine)} of {len(mine)}"
        again = f"{sum(one.redone for one in mine)}, at most {max([o.redone for o in mine] or [0])}"
        lines.append(f"| {method} | " + " | ".join([*of, same, again]) + " |")
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome], seed: int) -> str:
    """The page for results."""
    hit = [one for one in outcomes if one.killed]
    cold = [one for one in hit if one.cold and one.begun]
    wrong = "; ".join(f"{o.number} {o.method}, {o.kind}: {o.wrong}" for o in outcomes if o.wrong)
    return PAGE.format(
        table=table(outcomes), points=len(hit), seed=seed, rounds=ROUNDS, wrong=wrong or "none",
        mid=sum(one.mid for one in hit), unbegun=sum(not one.begun for one in hit),
        missed=len(outcomes) - len(hit), cold=len(cold),
        seconds=max([one.seconds for one in cold] or [0.0]),
        processor=max([one.processor for one in cold] or [0.0]),
        torch=torch.__version__, machine=platform.machine(),
    )  # fmt: skip


PAGE = """# Killed and resumed

{points} runs of {rounds} rounds with a checkpoint a round, each ended by SIGKILL at a random point
and resumed; made by `python benchmarks/kills.py --points {points} --seed {seed} --write` (torch
{torch}, {machine}). `the same files`: all files of the run folder but events.jsonl and report.html,
which have times (and in-use, where a run was killed after its end) are, byte for byte, those of a
run without a fault, models and metrics among them. `above workers`: the process that has worker
processes is killed; they must end by themselves.

{table}

- {mid} were killed while a checkpoint was half written, {unbegun} before the run had written
  anything to resume from (they were started anew); {missed} further points came after the end.
- Resumed by the command from nothing, {cold} times: at most {seconds:.1f} s to its first event, and
  at most {processor:.1f} s of the processor's time.
- What was wrong: {wrong}
"""


def main() -> int:
    """All points, one line each; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for one in all_points(options.folder.absolute(), options.points, options.seed):
        outcomes.append(one)
        verdict = one.wrong or ("the same" if one.killed else "ended before")
        print(f"{one.number} {one.method}, {one.kind}: {verdict}, {one.redone} again", flush=True)
    text = page(outcomes, options.seed)
    print(text)
    if options.write:
        OUT.write_text(text)
    slow = [one for one in outcomes if one.cold and one.processor > START]
    return int(bool(slow) or any(one.wrong for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
