"""How cost grows: `python benchmarks/growth.py [--quick]`.

Seconds per round, how much of them is not the clients' own work, and the process's peak memory:
for more registered clients at one cohort, larger cohorts, larger models, and more rounds. One
thread, one client after the other, FedAvg, 3 local steps of batch 20 on clients of 60 examples.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import statistics
import time
from dataclasses import dataclass

import memory
import results
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import register
from fedshift.engine.profile import COMPUTE, Stopwatch
from fedshift.engine.run import Federation, run
from fedshift.engine.traffic import Meter
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.pooled import Pooled
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator

POOL, EXAMPLES, CLASSES, INPUTS = 6_000, 60, 10, 784
LOCAL = Local(lr=0.05, steps=3, batch=20)


@dataclass(frozen=True)
class Point:
    """One federation: clients, cohort, width of the hidden layer (0: none), rounds."""

    clients: int = 100
    cohort: int = 10
    hidden: int = 0
    rounds: int = 8


# What grows, and along which field.
AXES = {
    "clients": [Point(clients=n) for n in (10, 100, 1_000, 10_000)],
    "cohort": [Point(clients=1_000, cohort=c) for c in (10, 100, 1_000)],
    "parameters": [Point(hidden=h, rounds=4) for h in (1, 12, 125, 1_250, 12_500)],
    "rounds": [Point(rounds=n) for n in (10, 100, 1_000)],
}
QUICK = {
    "clients": [Point(clients=n, rounds=3) for n in (10, 1_000)],
    "cohort": [Point(clients=100, cohort=c, rounds=3) for c in (10, 100)],
    "parameters": [Point(hidden=h, rounds=3) for h in (1, 125)],
    "rounds": [Point(rounds=n) for n in (5, 10)],
}


def measured(point: Point) -> dict[str, float]:
    """Median seconds of a round after the first, the share beside the clients', peak memory."""
    source = generator(0, "benchmark", "growth")
    x = torch.randn(POOL, INPUTS, generator=source)
    y = torch.randint(CLASSES, (POOL,), generator=source)
    starts = torch.randint(POOL - EXAMPLES, (point.clients,), generator=source)
    clients = Pooled(x, y, starts, torch.full((point.clients,), EXAMPLES))
    hidden = (point.hidden,) if point.hidden else ()
    model = build(lambda: Mlp((INPUTS,), hidden, CLASSES), seed=0)
    federation = Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))
    algorithm = recipes.fedavg(Setting(model, (1 / CLASSES,) * CLASSES, LOCAL))
    watch, times, cohort = Stopwatch(), list[float](), min(point.cohort, point.clients)
    memory.forget_peak()
    began = time.perf_counter()
    played = run(algorithm, federation, point.rounds, cohort=cohort, meter=Meter(watch))
    for _ in watch.each("round", played):
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    tenth = max(1, len(times) // 10)
    return {
        **vars(point),
        "model": sum(v.numel() for v in federation.params.values()),
        "seconds": statistics.median(times[1:]),
        "first_tenth": statistics.median(times[1 : 1 + tenth]),
        "last_tenth": statistics.median(times[-tenth:]),
        "beside": 1 - watch.seconds[COMPUTE] / sum(watch.seconds.values()),
        "peak": memory.peak(),
    }


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    measured(Point(rounds=2))  # what the first round of a process loads
    figures: dict[str, list[dict[str, float]]] = {}
    for axis, points in (QUICK if options.quick else AXES).items():
        for point in points:
            figures.setdefault(axis, []).append(row := measured(point))
            grown = row["model"] if axis == "parameters" else row[axis]
            print(
                f"{axis:10} {grown:>10}: {row['seconds']:8.4f} s a round, "
                f"{100 * row['beside']:.0f} % beside the clients' work, "
                f"peak {row['peak'] / 2**20:.0f} MiB",
                flush=True,
            )
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
