"""Local training in bfloat16 beside float32: `python benchmarks/precision.py [--quick]`.

Seconds of a training step of the CNN of W1 and the ResNet-18 of W4, by the loop and with channels
side by side, in one process on one thread, in turn; and how far the gradient at the first weights
is from float64's, ||g - g64|| / ||g64|| over all parameters. Inputs and labels are random: time
does not depend on what they show, and errors are those of a network that has learned nothing yet.

Times depend on the processor. With instructions for bfloat16 (amx_bf16 above all, avx512_bf16)
it is faster than float32 where products take most of the time; without them it may be slower. The
figures name those that the processor has.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import results
import torch
import workloads

from fedshift.client.local import Local, gradient_of, plan_all
from fedshift.client.objectives import CrossEntropy
from fedshift.client.oracles import Precision
from fedshift.data import ClientData, client_data, take
from fedshift.engine.one_by_one import with_channels_last
from fedshift.kernels.allocator import keep_memory
from fedshift.model import Model, build
from fedshift.seeds import generator
from fedshift.tree import Params

# With the batch of a trial; the whole benchmark has the workload's own.
WORKLOADS = {"W1": 32, "W4": 8}
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
CLASSES = 10
REPEAT = 5
# Seconds of steps in one measurement, so that short steps are taken several at a time.
AT_LEAST = 0.2
EXTENSIONS = ("amx_bf16", "avx512_bf16", "bf16")


def data_of(shape: tuple[int, ...], batch: int) -> ClientData:
    """A client whose examples make one batch."""
    source = generator(0, "precision")
    y = torch.randint(CLASSES, (batch,), generator=source)
    return client_data(torch.randn(batch, *shape, generator=source), y, 0)


def steps_of(
    model: Model, data: ClientData, local: Local, steps: int
) -> dict[str, Callable[[], object]]:
    """So many steps on the client, by each precision and layout."""
    params, buffers = model.init()
    by_name: dict[str, Callable[[], object]] = {}
    for precision in PRECISIONS:
        phase = replace(local, epochs=None, steps=steps, precision=precision)
        plan = plan_all({"train": phase}, data, 1, 0, 0)["train"]
        for layout in ("", ", channels-last"):
            train = with_channels_last if layout else Local.__call__
            by_name[precision + layout] = partial(
                train, phase, model, CrossEntropy(), params, buffers, {}, data, plan
            )
    return by_name


def seconds_of(todo: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Medians, all contenders in turn; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(repeat + 1):
        for name, what in todo.items():
            began = time.perf_counter()
            what()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def gradient(
    model: Model, data: ClientData, local: Local, precision: Precision, dtype: torch.dtype
) -> Params:
    """The gradient of the mean loss over the client's one batch, at the first weights."""
    params, buffers = ({k: v.to(dtype) for k, v in part.items()} for part in model.init())
    data = data._replace(x=data.x.to(dtype), w=data.w.to(dtype))
    batch = take(data, plan_all({"train": local}, data, 1, 0, 0)["train"], 0)
    return gradient_of(model, CrossEntropy(), {}, buffers, batch, {}, precision)(params).grad


def errors_of(model: Model, data: ClientData, local: Local) -> dict[str, float]:
    """||g - g64|| / ||g64|| by precision."""
    right = gradient(model, data, local, "float32", torch.float64)
    size = math.hypot(*(float(v.norm()) for v in right.values()))
    errors = {}
    for precision in PRECISIONS:
        gradients = gradient(model, data, local, precision, torch.float32)
        gaps = (float((gradients[k].double() - v).norm()) for k, v in right.items())
        errors[precision] = math.hypot(*gaps) / size
    return errors


def measure(workload: workloads.Workload, quick: bool) -> dict[str, Any]:
    """One row: seconds of a step by each way, and the gradient's errors."""
    batch = WORKLOADS[workload.name] if quick else workload.local.batch
    model, data = build(workload.net, seed=0), data_of(workload.shape, batch)
    local = replace(workload.local, batch=batch)
    one = seconds_of({"float32": steps_of(model, data, local, 1)["float32"]}, 1)["float32"]
    steps = max(1, math.ceil(AT_LEAST / one))
    taken = seconds_of(steps_of(model, data, local, steps), 1 if quick else REPEAT)
    return {
        "workload": workload.name,
        "batch": batch,
        "seconds": {name: s / steps for name, s in taken.items()},
        "errors": errors_of(model, data, local),
    }


def extensions() -> list[str]:
    """The processor's instructions for bfloat16, where the system lists them."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [name for name in EXTENSIONS if name in words]


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    keep_memory()
    rows = []
    for workload in workloads.WORKLOADS:
        if workload.name not in WORKLOADS:
            continue
        row = measure(workload, options.quick)
        rows.append(row)
        first = row["seconds"]["float32"]
        print(f"{row['workload']}, batch {row['batch']}: float32 {first:.4f} s a step", flush=True)
        for name, taken in row["seconds"].items():
            print(f"  {name:24} {first / taken:.2f}x")
        for name, error in row["errors"].items():
            print(f"  gradient of {name:12} {error:.1e} from float64", flush=True)
    has = extensions()
    print(f"instructions for bfloat16: {', '.join(has) or 'none'}")
    results.save(options.out, {"extensions": has, "rows": rows}, quick=options.quick)


if __name__ == "__main__":
    main()
