"""What `Router.predict` costs in forward passes: `python benchmarks/predict.py [--quick]`.

Processor time of one process, all ways in turn, medians; a pass is one of the same network over the
same queries. "hard" sends each query to one client, "mixture" asks all.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch
from torch import Tensor, nn

from fedshift.engine.allocator import keep_memory
from fedshift.model import Model, build
from fedshift.models.dense import routed_mlp
from fedshift.models.lenet_gn import SMALL, lenet_gn
from fedshift.models.routed import Routed, projection
from fedshift.router.route import Router
from fedshift.seeds import generator

CLASSES, QUERIES, REPEAT = 10, 1000, 15
CLIENTS = (8, 100)


def small_cnn(clients: int) -> nn.Module:
    """Two 3x3 convolutions on 28 pixels, then 64 features for either branch."""
    stages = (
        lambda: nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda: projection(800, 64),
    )
    return Routed(stages, 64, CLASSES, clients, shared=2)


NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Module]]] = {
    "MLP 13-32-16": ((13,), lambda n: routed_mlp((13,), (32, 16), CLASSES, n)),
    "MLP 784-256-128": ((784,), lambda n: routed_mlp((784,), (256, 128), CLASSES, n)),
    "small CNN": ((1, 28, 28), small_cnn),
    "LeNet-GN small": ((1, 28, 28), lambda n: lenet_gn(1, 28, CLASSES, n, widths=SMALL)),
    "LeNet-GN": ((3, 32, 32), lambda n: lenet_gn(3, 32, CLASSES, n)),
}


def router_of(model: Model, clients: int) -> Router:
    """Clients of the network's first weights with heads of their own."""
    source, (params, buffers) = generator(0, "predict"), model.init()

    def own() -> dict[str, Tensor]:
        names = (k for k in params if k.startswith("head."))
        return {k: torch.randn(params[k].shape, generator=source) for k in names}

    served = {i: (params | own(), buffers) for i in range(clients)}
    return Router(model, (params, buffers), served, torch.ones(clients))


def seconds_of(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median processor time of each; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name, way in ways.items():
            began = time.process_time()
            way()
            if turn:
                times[name].append(time.process_time() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure(name: str, clients: int, queries: int, repeat: int) -> dict[str, Any]:
    """One row."""
    shape, net = NETWORKS[name]
    model = build(lambda: net(clients), seed=0)
    x = torch.randn(queries, *shape, generator=generator(0, "queries"))
    router, pair = router_of(model, clients), model.init()

    def one_pass() -> None:
        with torch.no_grad():
            model(*pair, x)

    ways = {
        "pass": one_pass,
        "hard": lambda: router.predict(x),
        "mixture": lambda: router.predict(x, "mixture"),
    }
    return {"network": name, "clients": clients} | seconds_of(ways, repeat)


def main() -> None:
    given = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_memory()
    repeat = 1 if given.quick else REPEAT
    rows = [measure(name, n, QUERIES, repeat) for name in NETWORKS for n in CLIENTS]
    print(f"{QUERIES} queries    clients   pass, ms   hard / pass   mixture / hard")
    for row in rows:
        hard, mixture = row["hard"] / row["pass"], row["mixture"] / row["hard"]
        print(
            f"{row['network']:16} {row['clients']:6} {1e3 * row['pass']:10.2f} "
            f"{hard:13.2f} {mixture:16.2f}"
        )
    results.save(given.out, rows, quick=given.quick)


if __name__ == "__main__":
    main()
