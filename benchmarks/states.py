"""1,000 clients with SCAFFOLD on a two-layer CNN: `python benchmarks/states.py [--quick]`.

Every client keeps a control of the network's size, 6.7 MB; all of them train in every round, with
controls on disk beyond a budget. The figure is the process's peak memory. With few clients, the
rounds are played with all controls in memory as well and must be the same bit for bit.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import memory
import results
import torch
from workloads import CLASSES, Cnn

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.run import Federation, Round, run
from fedshift.engine.storage.client_states import Shelf
from fedshift.model import build
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator

EXAMPLES, ROUNDS, BUDGET = 20, 2, 256 << 20
LOCAL = Local(lr=0.05, steps=1, batch=10)
COMPARED = 20


def federation_of(count: int, shelf: Shelf) -> Federation:
    """Clients with random images."""
    source = generator(0, "benchmark", "states")
    clients = [
        client_data(
            torch.randn(EXAMPLES, 1, 28, 28, generator=source),
            torch.randint(CLASSES, (EXAMPLES,), generator=source),
            i,
        )
        for i in range(count)
    ]
    model = build(Cnn, seed=0)
    return Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0), shelf=shelf)


def last(federation: Federation) -> Round:
    """The last of a few rounds."""
    model = build(Cnn, seed=0)
    algorithm = recipes.scaffold(Setting(model, (1 / CLASSES,) * CLASSES, LOCAL))
    played = None
    for played in run(algorithm, federation, ROUNDS):  # noqa: B007 (only the last one is kept)
        pass
    assert played is not None
    return played


def same(folder: Path) -> bool:
    """Whether a small federation ends with the same bits in memory and on disk."""
    federation = federation_of(COMPARED, Shelf())
    one, other = last(federation), last(replace(federation, shelf=Shelf(0, folder)))
    trees = [(one.server[k], other.server[k]) for k in ("params", "control")]
    trees += [(one.states[i]["control"], other.states[i]["control"]) for i in one.states]
    return all(torch.equal(a[k], b[k]) for a, b in trees for k in a)


def main() -> None:
    options = results.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    count = 50 if options.quick else 1000
    budget = 32 << 20 if options.quick else BUDGET
    with tempfile.TemporaryDirectory() as place:
        if not same(Path(place)):
            raise SystemExit("states on disk give another result than states in memory")
        memory.forget_peak()
        began = time.perf_counter()
        played = last(federation_of(count, Shelf(budget, Path(place))))
        seconds = (time.perf_counter() - began) / ROUNDS
        files = [p.stat().st_size for p in Path(place).iterdir()]
        del played
    figures = {
        "clients": count,
        "steps": LOCAL.steps,
        "budget": budget,
        "peak": memory.peak(),
        "files": len(files),
        "on_disk": sum(files),
        "seconds": seconds,
    }
    print(
        f"{count} clients: peak {figures['peak'] / 2**20:.0f} MiB, {len(files)} states of "
        f"{sum(files) / 2**20:.0f} MiB on disk, {seconds:.1f} s a round"
    )
    results.save(options.out, figures, quick=options.quick)


if __name__ == "__main__":
    main()
