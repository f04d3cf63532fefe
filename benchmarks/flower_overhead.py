"""What Flower costs, and what this library adds: `python benchmarks/flower_overhead.py [--write]`.

Seconds per round of FedAvg and memory, in this process and in Flower's simulation, where Flower's
own FedAvg with a plain PyTorch client plays in the same runtime, round by round in turn.

`--write` puts the table into results/flower_overhead.md; `--quick` tries it at tiny size and
prints it only. The whole takes a quarter of an hour on two idle cores; on a busy machine its
numbers mean little.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import logging
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from workloads import WORKLOADS, Cnn, Workload, plain_round

from fedshift.algorithms.method import Method
from fedshift.engine.run import Federation, run
from fedshift.flower.quiet import quiet

OUT = HERE.parent / "results" / "flower_overhead.md"
# Workloads of benchmarks/workloads.py, and how many rounds of each for one of the first.
CASES = {"W1": 1, "W2": 4}
LIMIT = 0.05  # what our strategy may add to Flower's own round
MIB = 1 << 20


@cache
def made(name: str, quick: bool) -> tuple[Federation, Method, Workload]:
    """A workload of benchmarks/workloads.py, once per process; convolutions are padded by 2."""
    workload = next(one for one in WORKLOADS if one.name == name)
    if workload.net is Cnn:
        workload = replace(
            workload, net=partial(Cnn, 2), what=workload.what.replace("CNN", "padded CNN")
        )
    if quick:
        workload = replace(workload, clients=6, examples=64)
    return *workload.federation(False), workload


def site(name: str, quick: bool, client: int) -> Any:
    """What a client has, for our client app."""
    from fedshift.flower import Site

    federation, algorithm, _ = made(name, quick)
    first = (federation.params, federation.buffers)
    return Site(algorithm, federation.clients[client], federation.seeds.batch, first=first)


def both_apps(name: str, quick: bool) -> Any:
    """Our client app, which answers Flower's own FedAvg as the quick-start's client does."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    from fedshift.flower import client_app

    ours, app = client_app(partial(site, name, quick)), ClientApp()

    @app.query("register")
    def register_(message: Message, context: Context) -> Message:
        return ours(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if "run" in message.content:
            return ours(message, context)
        torch.set_num_threads(1)
        federation, _, work = made(name, quick)
        client = federation.clients[int(context.node_config["partition-id"])]
        params = dict(message.content["arrays"].to_torch_state_dict())
        after = plain_round(work.net(), params, [client], work.local)
        metrics = MetricRecord({"num-examples": len(client.y)})
        record = ArrayRecord({k: v.contiguous() for k, v in after.items()})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    return app


def clocked(rounds: Iterator[Any]) -> Iterator[float]:
    """Seconds of each round, drawn one by one."""
    while True:
        began = time.perf_counter()
        if next(rounds, None) is None:
            return
        yield time.perf_counter() - began


class Clock:
    """Seconds that a strategy spends in its own code, round by round; waiting is not its own."""

    def __init__(self, strategy: Any) -> None:
        self.seconds: list[float] = []
        for name in ("configure_train", "aggregate_train"):
            setattr(strategy, name, self._timed(getattr(strategy, name), name))

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = method(*args)
            spent = time.perf_counter() - began
            if name == "configure_train":
                self.seconds.append(spent)
            else:
                self.seconds[-1] += spent
            return result

        return timed


def own_rounds(grid: Any, federation: Federation, clocks: list[Clock]) -> Iterator[bool]:
    """Flower's FedAvg, as its `start` plays it, on Flower's own grid."""
    from flwr.app import ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fedshift.flower.records import to_record

    strategy, arrays, t = FedAvg(fraction_evaluate=0.0), to_record(federation.params), 0
    clocks.append(Clock(strategy))
    while True:
        t += 1
        messages = strategy.configure_train(t, arrays, ConfigRecord(), grid)
        after, _ = strategy.aggregate_train(t, grid.send_and_receive(messages, timeout=3600.0))
        if after is None:
            raise SystemExit("Flower's own round failed")
        arrays = after
        yield True


@dataclass(frozen=True)
class Memory:
    """Of some processes, in bytes: resident, its highest so far, and each page shared out among
    the processes that have it."""

    resident: int
    peak: int
    proportional: int

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.resident + other.resident,
            self.peak + other.peak,
            self.proportional + other.proportional,
        )


def memory(process: int) -> Memory:
    """As Linux counts it."""

    def field(file: str, name: str) -> int:
        text = Path(f"/proc/{process}/{file}").read_text()
        return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1])

    resident = 1024 * field("smaps_rollup", "Rss:")
    return Memory(resident, 1024 * field("status", "VmHWM:"), 1024 * field("smaps_rollup", "Pss:"))


def below(process: int) -> dict[int, str]:
    """The commands of all processes that descend from this one."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}
    pids = {process}
    while new := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= new
    return {int(pid): command for pid, _, command in rows if int(pid) in pids - {process}}


def of_actors() -> tuple[Memory, Memory]:
    """(of the largest actor, of all of Ray's processes together)."""
    commands = below(os.getpid())
    of = {pid: memory(pid) for pid in commands if Path(f"/proc/{pid}/smaps_rollup").exists()}
    actors = [usage for pid, usage in of.items() if "ClientAppActor" in commands[pid]]
    return max(actors, key=lambda m: m.peak), sum(of.values(), start=Memory(0, 0, 0))


@dataclass(frozen=True)
class Played:
    """Seconds of rounds in the simulation: ours and Flower's own, and what of them was spent in the
    strategies themselves; then the memory of the largest actor, and of all of Ray."""

    ours: list[float]
    theirs: list[float]
    inside: list[float]
    inside_theirs: list[float]
    actor: Memory
    ray: Memory

    @property
    def ratio(self) -> float:
        """Ours by Flower's own: the median over neighbouring rounds."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return statistics.median([a / b for a, b in pairs])

    @property
    def added(self) -> float:
        """What our strategy takes more than Flower's own, as a share of Flower's round."""
        more = statistics.median(self.inside) - statistics.median(self.inside_theirs)
        return more / statistics.median(self.theirs)


def in_simulation(name: str, quick: bool, actors: int, rounds: int) -> Played:
    """Our rounds and Flower's own, in turn in one runtime, but for the first of each, which starts
    processes."""
    from fedshift.flower import AlgorithmStrategy, play
    from fedshift.flower.simulation import simulation

    federation, algorithm, _ = made(name, quick)
    clients = len(federation.clients)
    strategy = AlgorithmStrategy(
        algorithm, clients=clients, classes=federation.table["labels"].shape[1],
        seeds=federation.seeds, first=(federation.params, federation.buffers),
    )  # fmt: skip
    clocks = [Clock(strategy)]
    with simulation(both_apps(name, quick), clients, actors=actors) as grid:
        ours = clocked(play(strategy, grid, rounds + 1))
        theirs = clocked(own_rounds(grid.grid, federation, clocks))  # type: ignore[attr-defined]
        pairs = [(next(ours), next(theirs)) for _ in range(rounds + 1)][1:]
        used = of_actors()
    inside, inside_theirs = (clock.seconds[1:] for clock in clocks)
    return Played([a for a, _ in pairs], [b for _, b in pairs], inside, inside_theirs, *used)


def in_process(name: str, quick: bool, rounds: int) -> tuple[list[float], int]:
    """(seconds of rounds in this process, one thread; its highest memory in bytes)."""
    federation, algorithm, _ = made(name, quick)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    seconds = list(clocked(run(algorithm, federation, rounds + 1)))[1:]
    return seconds, memory(os.getpid()).peak


def shown(seconds: list[float]) -> str:
    """Median, with the smallest and largest."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"


def tables(quick: bool, rounds: int) -> Iterator[str]:
    """Seconds, memory, and whether our strategy keeps within its limit."""
    yield "| case | where | ours | Flower's FedAvg | ratio | in our strategy | in Flower's |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    peaks, added = [], []
    for name, times in CASES.items():
        what = made(name, quick)[2].what
        seconds, peak = in_process(name, quick, rounds * times)
        yield f"| {what} | this process, 1 thread | {shown(seconds)} | – | – | – | – |"
        peaks.append(f"| {what} | this process | {peak / MIB:.0f} | | | |")
        for actors in (1, 2):
            got = in_simulation(name, quick, actors, rounds * times)
            place = f"simulation, {actors} actor{'s'[: actors > 1]}"
            inside = [statistics.median(one) for one in (got.inside, got.inside_theirs)]
            yield (
                f"| | {place} | {shown(got.ours)} | {shown(got.theirs)} | {got.ratio:.3f} | "
                f"{inside[0]:.4f} | {inside[1]:.4f} |"
            )
            added.append(got.added)
            sizes = (got.actor.peak, got.actor.resident, got.actor.proportional)
            cells = " | ".join(f"{v / MIB:.0f}" for v in (*sizes, got.ray.proportional))
            peaks.append(f"| | {place} | {cells} |")
    yield ""
    yield (
        f"Our strategy adds {', '.join(f'{100 * v:+.1f} %' for v in added)} to Flower's own round "
        f"(in the order of the rows; limit {100 * LIMIT:.0f} %): "
        f"{'kept' if max(added) <= LIMIT else 'NOT kept'}."
    )
    yield ""
    yield "Memory in MiB; for an actor, of the largest one:"
    yield ""
    yield "| case | where | highest | resident | proportional | all of Ray, proportional |"
    yield "| --- | --- | --- | --- | --- | --- |"
    yield from peaks


def page(quick: bool, rounds: int) -> Iterator[str]:
    """The whole page, line by line."""
    import flwr

    yield "# Flower: seconds per round, and memory"
    yield ""
    samples = " and ".join(f"{rounds * times} ({name})" for name, times in CASES.items())
    yield (
        f"`python benchmarks/flower_overhead.py --write --rounds {rounds}`, "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch "
        f"{torch.__version__}, flwr {flwr.__version__}, one thread per client. Medians of "
        f"{samples} rounds after the first (smallest–largest), workloads of "
        "benchmarks/workloads.py."
    )
    yield ""
    yield (
        "Seconds. Flower's FedAvg has the quick-start's client (plain PyTorch, new optimiser per "
        "round) and plays in turn with ours in one runtime; the ratio is the median of ratios of "
        "neighbouring rounds, clients and polling included. The last two columns are what of a "
        "round the server spends in the strategy itself, without waiting for clients; what ours "
        "adds is their difference, as a share of Flower's round."
    )
    yield ""
    yield from tables(quick, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="tiny, and nothing is written")
    parser.add_argument("--write", action="store_true", help=f"into {OUT.name}, not only printed")
    parser.add_argument("--rounds", type=int, default=3, help="of the CNN; four times of the MLP")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick prints only; leave out --write")
    torch.set_num_threads(1)
    # Ray's processes import this module (and `workloads`) by name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    lines = []
    with quiet():
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        import flower_overhead as module  # pickled by name, not as `__main__`

        for line in module.page(options.quick, options.rounds):
            print(line, flush=True)
            lines.append(line)
    if options.write:
        OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
