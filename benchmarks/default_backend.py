"""What runs that name no backend gain: `fs.fit` by `loop` and by the default, in turn.

Two workloads that users have: a table of 20,000 rows and 40 columns at ten clients, with five
epochs a round, and Fashion-MNIST (its small part where the whole is not found) at ten clients with
LeNet. Both runs of a turn must end in the same bits. Seconds depend on what else the machine does.
Processor time hardly does, and from it follows the ratio on free cores: (loop) / (of the main
process + of its workers / cores).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from comparing import measured, task
from results import arguments, save

import fedshift as fs
from fedshift import datasets
from fedshift.shifts import Sparsity


@dataclass(frozen=True)
class Workload:
    """A task with what `fs.fit` trains on it."""

    name: str
    task: Callable[[], fs.Task]
    net: str
    keys: dict[str, Any]


def images() -> fs.Task:
    """Ten clients of three labels each, and an eleventh of that kind as the target."""
    try:
        data = datasets.load("fashion-mnist")
    except fs.DataError:
        data = datasets.load("fashion-mnist-mini")
    return fs.Task.from_split(
        data.train.x, data.train.y, Sparsity(3), clients=11, target="10", name=data.name
    )


WORKLOADS = (
    Workload("table", lambda: task(20_000, 40), "mlp", {"hidden": [64], "epochs": 5, "rounds": 20}),
    Workload("images", images, "lenet", {"epochs": 1, "rounds": 10}),
)


def played(of: fs.Task, work: Workload, turns: int) -> list[dict[str, Any]]:
    """Seconds and processor time of each turn. Raises SystemExit for runs of different bits."""
    made: dict[str | None, dict[str, Any]] = {}

    def fit(backend: str | None) -> None:
        result = fs.fit(of, work.net, lr=0.05, backend=backend, progress=False, **work.keys)
        made[backend] = result.module().state_dict()

    figures = []
    for _ in range(turns):
        loop, default = measured(lambda: fit("loop")), measured(lambda: fit(None))
        if not all(torch.equal(v, made[None][k]) for k, v in made["loop"].items()):
            raise SystemExit(f"{work.name}: the default backend gave other numbers than the loop")
        figures.append({"loop": loop, "default": default, "load": round(os.getloadavg()[0], 1)})
    return figures


def ratios(figure: dict[str, Any]) -> tuple[float, float]:
    """How many times as fast the default is: by the clock, and on free cores."""
    (loop, *its), (default, main, workers) = figure["loop"], figure["default"]
    return loop / default, sum(its) / (main + workers / (os.cpu_count() or 1))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="table or images")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    every: dict[str, Any] = {}
    for work in WORKLOADS:
        if options.only not in ("", work.name):
            continue
        work.keys["rounds"] = 6 if options.quick else work.keys["rounds"]
        of = work.task()
        rows = sum(len(client.y) for client in of.build().task.clients)
        figures = every[work.name] = played(of, work, options.turns)
        for turn, figure in enumerate(figures):
            (loop, *its), (default, *parts) = figure["loop"], figure["default"]
            print(
                f"{work.name}, {rows:,} rows of {of.name}, turn {turn}: loop {loop:.1f} s "
                f"({sum(its):.1f} s of processor time), default {default:.1f} s ({parts[0]:.1f} s "
                f"in the main process, {parts[1]:.1f} s in workers); load {figure['load']}",
                flush=True,
            )
        here, free = (statistics.median(each) for each in zip(*map(ratios, figures), strict=True))
        print(
            f"{work.name}: the default is {here:.2f} times as fast here, and {free:.2f} times on "
            f"{os.cpu_count()} free cores, by processor time; the same bits"
        )
    save(options.out, every, quick=options.quick)


if __name__ == "__main__":
    main()
