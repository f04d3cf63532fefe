"""What `Router.predict` costs in forward passes: `python benchmarks/predict.py [--quick]`.

Processor time of one process, all ways in turn, medians; a pass is one of the same network over the
same queries. "hard" sends each query to one client, "mixture" asks all. Both once more as the bare
products, without a check, a class or a sum in float64: what the same arithmetic cannot do without.

`--write` writes results/predict.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.kernels.allocator import keep_memory
from fedshift.model import Model, build
from fedshift.models.dense import routed_mlp
from fedshift.models.lenet_gn import SMALL, lenet_gn
from fedshift.models.routed import Routed, projection
from fedshift.router.route import Router
from fedshift.seeds import generator

OUT = Path(__file__).parents[1] / "results" / "predict.md"
CLASSES, QUERIES = 10, 1000
# Turns, and those of a network whose pass takes less than SHORT seconds.
REPEAT, OFTEN, SHORT = 15, 151, 0.02
CLIENTS = (8, 100)
ASKED = {"hard": 1.15, "mixture": 1.5}


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

    def new_head() -> dict[str, Tensor]:
        names = (k for k in params if k.startswith("head."))
        return {k: torch.randn(params[k].shape, generator=source) for k in names}

    served = {i: (params | new_head(), buffers) for i in range(clients)}
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


def bare_ways(router: Router, x: Tensor) -> dict[str, Callable[[], object]]:
    """Passes and products alone; of hard routing two ways, as either may be the shorter."""
    tensors = [params for params, _ in router.served.values()]
    weight = torch.stack([v["head.weight"] for v in tensors])  # [N, K, width]
    bias = torch.stack([v["head.bias"] for v in tensors])
    flat, shift = weight.transpose(0, 1).flatten(0, 1), bias.T[..., None]

    def grouped() -> Tensor:
        out = router.model(*router.shared, x)
        client = out["client_logits"].argmax(1)
        counts = torch.bincount(client, minlength=len(weight)).tolist()
        pieces = out["features"].index_select(0, client.argsort()).split(counts)
        answers = [F.linear(p, weight[i], bias[i]) for i, p in enumerate(pieces) if len(p)]
        return torch.cat(answers).T.contiguous().softmax(0)

    def gathered() -> Tensor:
        out = router.model(*router.shared, x)
        client = out["client_logits"].argmax(1)
        heads, biases = weight.index_select(0, client), bias.index_select(0, client)
        logits = torch.baddbmm(biases[..., None], heads, out["features"][..., None])
        return logits[..., 0].T.contiguous().softmax(0)

    def mixture() -> Tensor:
        out = router.model(*router.shared, x)
        share = out["client_logits"].softmax(1).T
        logits = (flat @ out["features"].T).view(CLASSES, len(weight), len(x)).add_(shift)
        return logits.softmax(0).mul_(share).sum(1)

    return {"grouped": grouped, "gathered": gathered, "bare mixture": mixture}


def measure(name: str, clients: int, quick: bool) -> dict[str, Any]:
    """One row."""
    shape, net = NETWORKS[name]
    model = build(lambda: net(clients), seed=0)
    x = torch.randn(QUERIES, *shape, generator=generator(0, "queries"))
    router = router_of(model, clients)

    def one_pass() -> Tensor:
        return model(*router.shared, x)["logits"]

    ways = {
        "pass": one_pass,
        "hard": lambda: router.predict(x),
        "mixture": lambda: router.predict(x, "mixture"),
    }
    with torch.no_grad():
        short = seconds_of({"pass": one_pass}, 3)["pass"] < SHORT
        repeat = 1 if quick else OFTEN if short else REPEAT
        times = seconds_of(ways | bare_ways(router, x), repeat)
    times["bare hard"] = min(times.pop("grouped"), times.pop("gathered"))
    return {"network": name, "clients": clients} | times


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    kinds = {"": row, "bare ": {k: row[f"bare {k}"] for k in ASKED} | {"pass": row["pass"]}}
    ratios = [(v["hard"] / v["pass"], v["mixture"] / v["hard"]) for v in kinds.values()]
    (hard, mixture), (least, mixed) = ratios
    met = (hard <= ASKED["hard"]), row["clients"] < 100 or mixture <= ASKED["mixture"]
    missed = [name for name, one in zip(ASKED, met, strict=True) if not one]
    return (
        f"| {row['network']} | {row['clients']} | {1e3 * row['pass']:.2f} | {hard:.2f} | "
        f"{mixture:.2f} | {least:.2f} | {mixed:.2f} | {' and '.join(missed) or 'nothing'} |"
    )


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    rows = []
    print(HEAD)
    for name in NETWORKS:
        for clients in CLIENTS:
            rows.append(measure(name, clients, options.quick))
            print(line(rows[-1]), flush=True)
    results.save(options.out, rows, quick=options.quick)
    if options.write:
        OUT.write_text(PAGE.format(table="\n".join([HEAD, *map(line, rows)]), queries=QUERIES))


HEAD = """\
| network | clients | pass, ms | hard / pass | mixture / hard | bare hard / pass | \
bare mixture / bare hard | missed |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
PAGE = """# What `Router.predict` costs

Processor time of one core for {queries} queries, clients that differ in a linear classifier of ten
classes, medians of ways that take turns, made by `python benchmarks/predict.py --write`. *Pass*:
the network alone. *Hard*: each query is answered by its client; asked is at most 1.15 passes.
*Mixture*: all clients answer; asked is at most 1.5 times hard with 100 of them. *Bare*: the pass
and the same products in plain PyTorch calls, in float32, without a look at queries or client
logits: about the least that such answers cost.

{table}

Networks of convolutions keep to both.

A pass of 13-32-16 takes a fraction of a millisecond. Even the bare calls do not fit into 15 % of
it, and the bare mixture of 100 clients, with the exponentials of {queries} x 10 x 100 logits, takes
several times the bare hard answer.

With 784-256-128 and 100 clients, a call is due for every classifier that is asked, so that the bare
calls leave hardly anything of the 15 %; the rest is what is looked at besides (are queries and
client logits finite, the prior, float64). The bare mixture is at the line, too.
"""

if __name__ == "__main__":
    main()
