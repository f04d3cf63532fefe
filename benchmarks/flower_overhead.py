"""What Flower costs, and what this library adds: `python benchmarks/flower_overhead.py [--quick]`.

Seconds per round of FedAvg, in this process and in Flower's simulation, where Flower's own FedAvg
with a plain PyTorch client plays in the same runtime, round by round in turn. Then the bytes that
one round takes to a client and back, for every method, counted on the messages themselves.

Writes docs/results/flower_overhead.md; `--quick` tries it at tiny size and prints it only.
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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from engine import WORKLOADS, Workload, plain_round

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.rounds import Federation, run
from fedshift.engine.traffic import size
from fedshift.flower.quiet import quiet
from fedshift.model import build
from fedshift.models.dense import routed_mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator

OUT = HERE.parent / "docs" / "results" / "flower_overhead.md"
CASES = ("W1", "W2")
# Two rounds for densities, one for weights, then the one that is counted; one more for tuning.
COUNTED, ROUNDS = 4, 5


@cache
def made(name: str, quick: bool) -> tuple[Federation, Algorithm, Workload]:
    """A workload of benchmarks/engine.py, once per process."""
    found = next(one for one in WORKLOADS if one.name == name)
    if quick:
        found = replace(found, clients=6, examples=64)
    return *found.federation(False), found


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
            found = method(*args)
            spent = time.perf_counter() - began
            if name == "configure_train":
                self.seconds.append(spent)
            else:
                self.seconds[-1] += spent
            return found

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


def in_simulation(name: str, quick: bool, actors: int, rounds: int) -> tuple[list[float], ...]:
    """(seconds of our rounds, of Flower's own, of them in our strategy, and in Flower's).

    In turn in one runtime, but for the first of each, which starts processes.
    """
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
    return [a for a, _ in pairs], [b for _, b in pairs], *(clock.seconds[1:] for clock in clocks)


def in_process(name: str, quick: bool, rounds: int) -> list[float]:
    """Seconds of rounds in this process, one thread."""
    federation, algorithm, _ = made(name, quick)
    return list(clocked(run(algorithm, federation, rounds + 1)))[1:]


def shown(seconds: list[float]) -> str:
    """Median, with the smallest and largest."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"


def timings(quick: bool, rounds: int) -> Iterator[str]:
    """The rows of the first table."""
    yield "| case | where | ours | Flower's FedAvg | ratio | in our strategy | in Flower's |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in CASES:
        what = made(name, quick)[2].what
        here = shown(in_process(name, quick, rounds))
        yield f"| {what} | this process, 1 thread | {here} | – | – | – | – |"
        for actors in (1, 2):
            ours, theirs, *inside = in_simulation(name, quick, actors, rounds)
            server = " | ".join(f"{statistics.median(one):.4f}" for one in inside)
            ratio = statistics.median([a / b for a, b in zip(ours, theirs, strict=True)])
            place = f"simulation, {actors} actor{'s'[: actors > 1]}"
            yield f"| | {place} | {shown(ours)} | {shown(theirs)} | {ratio:.3f} | {server} |"


# What specs of the methods say a round takes, in floats; P the model, B its buffers, K labels.
EXPECTED = {
    **dict.fromkeys(("fedavg", "fedprox", "fedrs", "fedsam", "moon", "fedpals"), "P / P"),
    "scaffold": "2P / 2P",
    "afl": "P / P + 1",
    **dict.fromkeys(("labelset_fedavg", "labelset_fedprox"), "P_body + (d + 1) L, both ways"),
    "labelset_scaffold": "twice that",
    "local_only": "0 / 0",
}


def methods(setting: Setting) -> dict[str, Callable[[], Algorithm]]:
    """Recipes whose traffic is counted, at their defaults."""
    density = {"density_rounds": 2, "hidden": (50,)}
    tuned = {n: {"tune_rounds": 1} for n in ("fedavgft", "fedproxft", "fedsamft", "fedbabu")}
    options = {"fedpals": {"ess": 0.5}, "feddisk": density, "made": density, **tuned}
    names = [n for n in recipes.__all__ if not n.endswith("_drm_repo")]
    return {n: partial(recipes.recipe(n).make, setting, **options.get(n, {})) for n in names}


def small_federation() -> Federation:
    """Six clients of three labels, and an MLP 64-32-10 with a client branch."""
    model = build(lambda: routed_mlp((64,), (32,), 10, 6), seed=0)
    source, clients = generator(0, "flower traffic"), []
    for i in range(6):
        y = (i + torch.randint(3, (60,), generator=source)) % 10
        clients.append(client_data(torch.randn(60, 64, generator=source), y, i))
    return Federation(clients, *model.init(), register(clients, 10), Seeds.of(0))


def one_method(
    algorithm: Algorithm, federation: Federation
) -> tuple[tuple[float, float], float, str]:
    """(bytes down and up per client in the last round, of arrays as sent up, remark)."""
    from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play

    first, clients = (federation.params, federation.buffers), federation.clients
    grid = LocalGrid(client_app(lambda i: Site(algorithm, clients[i], 0, first=first)), 6)
    strategy = AlgorithmStrategy(algorithm, clients=6, classes=10, seeds=Seeds.of(0), first=first)
    sent = [0]
    asked = 0
    for played in play(strategy, grid, COUNTED):
        sent.append(grid.traffic.up["train"])
        asked = len(played.trained)
    remark = "" if asked == 6 else f"{asked} of 6 clients asked"
    return strategy.traffic.each(), (sent[-1] - sent[-2]) / asked, remark


def traffic() -> Iterator[str]:
    """The rows of the second table."""
    federation = small_federation()
    model = build(lambda: routed_mlp((64,), (32,), 10, 6), seed=0)
    local = Local(lr=0.05, steps=4, batch=16)
    setting = Setting(model, (0.1,) * 10, local, rounds=ROUNDS, clients=6, shape=(64,))
    whole = size({"params": federation.params})
    yield "| method | down | up | down / P | up / P | expected, floats | NumPy records, up | |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, make in methods(setting).items():
        (down, up), sent, remark = one_method(make(), federation)
        yield (
            f"| {name} | {down:.0f} | {up:.0f} | {down / whole:.2f} | {up / whole:.2f} | "
            f"{EXPECTED.get(name, '')} | {sent:.0f} | {remark} |"
        )


def page(quick: bool, rounds: int, timed: bool) -> Iterator[str]:
    """The whole page, line by line."""
    import flwr

    yield "# Flower: seconds per round, and bytes"
    yield ""
    yield (
        f"`python benchmarks/flower_overhead.py`, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} CPUs, torch {torch.__version__}, flwr {flwr.__version__}, one thread "
        f"per client. Medians of {rounds} rounds after the first (smallest–largest)."
    )
    if timed:
        yield ""
        yield (
            "Flower's FedAvg has the quick-start's client (plain PyTorch, new optimiser per round) "
            "and plays in turn with ours in one runtime; the ratio is the median of ratios of "
            "neighbouring rounds. The last two columns are the seconds of a round that the server "
            "spends in the strategy itself, without waiting for clients."
        )
        yield ""
        yield from timings(quick, rounds)
    yield ""
    whole = size({"params": small_federation().params})
    yield (
        f"Bytes of tensors per client in round {COUNTED}; P = {whole} bytes, the whole model: an "
        "MLP 64-32-10 with a client branch, for FedDRM's sake. An update has 12 bytes of report "
        "(id and loss). Then what specs say, and the records as Flower sends them: NumPy adds "
        "some 130 bytes to each array."
    )
    yield ""
    yield from traffic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="tiny, and nothing is written")
    parser.add_argument("--bytes", action="store_true", help="the second table alone")
    parser.add_argument("--rounds", type=int, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Ray's processes import this module (and `engine`) by name.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    rounds = given.rounds or (2 if given.quick else 5)
    lines = []
    with quiet():
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        import flower_overhead as module  # pickled by name, not as `__main__`

        for line in module.page(given.quick, rounds, not given.bytes):
            print(line, flush=True)
            lines.append(line)
    if not given.quick and not given.bytes:
        OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
