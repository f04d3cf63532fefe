"""W6, 100,000 registered clients, 100 a round: `python benchmarks/registered.py [--quick]`.

Logistic regression, 3 local steps of batch 20. A client is 60 rows of a pool of 60,000 images
(ranges overlap, so that examples take no more memory than Fashion-MNIST). Start-up is all that
happens before the first client trains, imports included, the making of the pool not. What a client
costs beyond its examples is the growth of the process over the number of clients.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

BEGAN = time.perf_counter()

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import statistics

import memory
import results
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.data import register
from fedshift.engine.run import Federation, run
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.pooled import Pooled
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator

IMPORTED, IMPORTED_WORK = time.perf_counter(), time.process_time()
POOL, EXAMPLES, CLASSES, COHORT = 60_000, 60, 10, 100
LOCAL = Local(lr=0.05, steps=3, batch=20)


def begun(x: Tensor, y: Tensor, count: int) -> tuple[Federation, Method]:
    """So many registered clients of the pool, and what they train."""
    starts = torch.randint(POOL - EXAMPLES, (count,), generator=generator(1, "benchmark", "W6"))
    clients = Pooled(x, y, starts, torch.full((count,), EXAMPLES))
    model = build(lambda: Mlp((1, 28, 28), (), CLASSES), seed=0)
    federation = Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))
    return federation, recipes.fedavg(Setting(model, (1 / CLASSES,) * CLASSES, LOCAL))


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    count, rounds = (10_000, 3) if options.quick else (100_000, 20)
    source = generator(0, "benchmark", "registered")
    x = torch.randn(POOL, 1, 28, 28, generator=source)
    y = torch.randint(CLASSES, (POOL,), generator=source)
    begun(x, y, 1000)  # what the first federation of a process loads is not the clients'
    memory.forget_peak()
    before, began, work = memory.resident(), time.perf_counter(), time.process_time()
    federation, algorithm = begun(x, y, count)
    ready, made = time.perf_counter() - began, memory.resident()
    worked = time.process_time() - work
    times: list[float] = []
    began = time.perf_counter()
    for _ in run(algorithm, federation, rounds, cohort=COHORT):
        times.append(time.perf_counter() - began)
        began = time.perf_counter()
    second = statistics.median(times[1:])
    figures = {
        "clients": count,
        "cohort": COHORT,
        "startup": (IMPORTED - BEGAN) + ready + max(times[0] - second, 0.0),
        "imports": IMPORTED - BEGAN,
        "processor": IMPORTED_WORK + worked,
        "round": second,
        "bytes_per_client": (made - before) / count,
        "peak": memory.peak(),
        "pool": x.nbytes + y.nbytes,
    }
    print(
        f"{count} clients: start-up {figures['startup']:.2f} s (imports "
        f"{figures['imports']:.2f}; processor {figures['processor']:.2f}), "
        f"{second:.3f} s a round of {COHORT}, "
        f"{figures['bytes_per_client']:.0f} bytes a client, peak "
        f"{figures['peak'] / 2**20:.0f} MiB with a pool of {figures['pool'] / 2**20:.0f} MiB"
    )
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
