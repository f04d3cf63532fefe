"""Seconds of a round on a CUDA GPU: `python benchmarks/gpu.py [--only W1,W2] [--out FILE]`.

"plain" is a round as one writes it by hand, its clients' examples on the GPU as well. All play the
same rounds in turn; medians, after one round that does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import results
import torch
from workloads import WORKLOADS, Workload, plain_round

from fedshift.data import ClientData
from fedshift.engine.backends import loop
from fedshift.engine.device import on
from fedshift.engine.run import draw_cohort, play_round, start
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import UnfitError

ROUNDS = 5
Play = Callable[[int], object]


def contenders(workload: Workload, quick: bool) -> dict[str, Play]:
    """Round t by hand, one client after the other, and stacked."""
    federation, algorithm = workload.federation(quick)
    first, net = start(algorithm, federation), workload.net().cuda()
    params = {k: v.cuda() for k, v in federation.params.items()}
    there = [ClientData(*(v.cuda() for v in client)) for client in federation.clients]

    def cohort(t: int) -> torch.Tensor:
        return draw_cohort(workload.clients, workload.cohort or workload.clients, t, 0)

    def plain(t: int) -> None:
        plain_round(net, params, [there[i] for i in cohort(t).tolist()], workload.local)

    ways = {"cuda-loop": on("cuda", loop), "cuda": on("cuda", Stacked())}
    return {"plain": plain} | {
        name: lambda t, way=way: play_round(
            algorithm, federation, first.server, {}, cohort(t), t, way
        )
        for name, way in ways.items()
    }


def seconds(play: Play, t: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    play(t)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(workload: Workload, quick: bool) -> dict[str, float]:
    """Median seconds by contender, without those that the network does not fit."""
    plays, times = contenders(workload, quick), dict[str, list[float]]()
    for name, play in plays.items():
        try:
            seconds(play, 1)
            times[name] = []
        except UnfitError as e:
            print(f"{workload.name}: {name} is left out: {e}", flush=True)
    for t in range(1, ROUNDS + 1):
        for name, taken in times.items():
            taken.append(seconds(plays[name], t))
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--only", default="", help="as in W1,W3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for workload in WORKLOADS:
        if options.only and workload.name not in options.only.split(","):
            continue
        figures[workload.name] = taken = measure(workload, options.quick)
        ratios = ", ".join(f"{k} {taken['plain'] / v:.2f}x" for k, v in taken.items())
        print(f"{workload.name}: plain {taken['plain']:.3f} s; {ratios}", flush=True)
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
