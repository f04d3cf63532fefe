"""Folding 100 clients of 11.3 million parameters: `python benchmarks/aggregation.py [--quick]`.

Against a plain float64 weighted sum of the same tensors, in the same process and in turn. Ours is
all that happens between the last client's work and the server's new model: the gate's look at every
number, the sums, and the server's step. Two forms: replies that come one after the other and are
let go (a round whose first bad reply ends the run), and replies that are all there already.
Memory is what is held beyond the replies, in models of float32.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import memory
import results
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.backends import Reply, Stage
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import Federation, play_round, start
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.models.resnet import ResNet
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from fedshift.tree import Params, Parts

REPEAT = 3


def federation_of(quick: bool) -> Federation:
    """ResNet-18 (11.2 million parameters) on 100 clients, or on 10."""
    net = build(lambda: ResNet(18, 100, norm="group", stem="cifar"), seed=0)
    count = 10 if quick else 100
    clients = [client_data(torch.zeros(1, 1), torch.tensor([0]), i) for i in range(count)]
    table = register(clients, 10) | {"n": torch.arange(1.0, count + 1, dtype=torch.float64)}
    return Federation(clients, *net.init(), table, Seeds.of(0))


def updates_of(federation: Federation) -> list[Parts]:
    """A random change per client. Every client has tensors of its own."""
    return [
        {
            "delta": {k: torch.rand_like(v) for k, v in federation.params.items()},
            "buffers": {},
            "counters": {},
            "report": {"id": torch.tensor(i), "loss": torch.tensor(1.0)},
        }
        for i in range(len(federation.clients))
    ]


def plain(updates: Sequence[Parts], weights: Sequence[float], start: Params) -> Params:
    """sum_i w_i v_i in float64, tensor by tensor, and one step of the server."""
    mixed: Params = {}
    for name, old in start.items():
        total = torch.zeros(old.shape, dtype=torch.float64)
        for update, w in zip(updates, weights, strict=True):
            total += w * update["delta"][name].double()
        mixed[name] = old + total.to(old.dtype)
    return mixed


def contenders(federation: Federation) -> dict[str, Callable[[], Params]]:
    """The plain sum and ours, over the same updates."""
    model = build(lambda: Mlp((784,), (), 10), seed=0)  # never run: replies are given
    algorithm = recipes.fedavg(Setting(model, (0.1,) * 10, Local()))
    updates, server = updates_of(federation), start(algorithm, federation).server
    ids = torch.arange(len(updates))
    weights = algorithm.weigh(server, ids).tolist()

    def prepared(stage: Stage, jobs: Any) -> Iterator[Reply]:
        return (Reply(i, dict(parts), {}, 1) for i, parts in enumerate(updates))

    def ours(gate: Gate) -> Callable[[], Params]:
        place = Federation(
            federation.clients, federation.params, federation.buffers, federation.table,
            federation.seeds, gate,
        )  # fmt: skip
        return lambda: play_round(algorithm, place, server, {}, ids, 1, prepared).server["params"]

    return {
        "plain": lambda: plain(updates, weights, federation.params),
        "as they come": ours(Gate()),
        "all there": ours(Gate(on_bad="drop")),
    }


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    federation = federation_of(options.quick)
    size = sum(v.numel() for v in federation.params.values())
    todo = contenders(federation)
    models = {name: memory.taken_by(what) / (4 * size) for name, what in todo.items()}
    seconds: dict[str, list[float]] = {name: [] for name in todo}
    worked: dict[str, list[float]] = {name: [] for name in todo}
    right = todo["plain"]()
    for _ in range(REPEAT):
        for name, what in todo.items():
            began, work = time.perf_counter(), time.process_time()
            result = what()
            seconds[name].append(time.perf_counter() - began)
            worked[name].append(time.process_time() - work)
            if any(not torch.equal(v, right[k]) for k, v in result.items()):
                raise SystemExit(f"{name} gives other parameters than the plain sum")
    rows = {
        name: {
            "seconds": statistics.median(seconds[name]),
            "processor": statistics.median(worked[name]),
            "models": models[name],
        }
        for name in todo
    }
    for name, row in rows.items():
        ratio = row["seconds"] / rows["plain"]["seconds"]
        print(
            f"{name:14} {row['seconds']:7.2f} s, {ratio:.2f}x, processor "
            f"{row['processor']:.2f} s, {row['models']:.2f} models"
        )
    figures = {"clients": len(federation.clients), "parameters": size, "rows": rows}
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
