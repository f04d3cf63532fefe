"""Seconds per round against a plain loop: `python benchmarks/engine.py [--quick] [--only W1,W2]`.

The plain loop is what one writes by hand: one thread, one `nn.Module`, `torch.optim.SGD`, a
weighted sum of state dictionaries at the end of a round. Every figure is a ratio to it: all
contenders play the same round in turn, again and again, and the medians of their times are
compared. Before that, each must end a round of the same batches with the plain loop's parameters.

Inputs are random numbers of the right shape: time does not depend on what they show.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import contextlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.client.local import Local, plan_all
from fedshift.data import ClientData, client_data, register
from fedshift.engine.allocator import keep_memory
from fedshift.engine.backends import Backend, loop
from fedshift.engine.levers import channels_last
from fedshift.engine.rounds import Federation, draw_cohort, play_round, start
from fedshift.engine.stacked import Stacked
from fedshift.engine.workers import Team, workers
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.models.resnet import ResNet
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.tree import Params

CLASSES = 10
# Largest share of a round's change that rounding may make of itself.
AMPLIFIED = 1e-2
# Steps of the comparison where a round is an epoch.
CHECKED = 10


class Cnn(nn.Module):
    """conv5x5x32 - pool - conv5x5x64 - pool - fc512 - fc10; padding is 0 or 2."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        left = 7 if padding else 4
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * left * left, 512), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@dataclass(frozen=True)
class Workload:
    """Clients of equal size and a network; `cohort` of them train in each round."""

    name: str
    what: str
    shape: tuple[int, ...]
    net: Callable[[], nn.Module]
    clients: int
    examples: int
    local: Local
    cohort: int | None = None
    labels: int = CLASSES
    method: Callable[[Setting], Algorithm] = recipes.fedavg

    def federation(self, quick: bool) -> tuple[Federation, Algorithm]:
        """The clients with random inputs, and the method; a fifth of the examples if `quick`."""
        source = generator(0, "benchmark", self.name)
        n = max(self.examples // 5, self.local.batch) if quick else self.examples
        clients: list[ClientData] = []
        for i in range(self.clients):
            y = (i + torch.randint(self.labels, (n,), generator=source)) % CLASSES
            clients.append(client_data(torch.randn(n, *self.shape, generator=source), y, i))
        model = build(self.net, seed=0)
        table = register(clients, CLASSES)
        algorithm = self.method(Setting(model, TARGET, self.local))
        return Federation(clients, *model.init(), table, Seeds.of(0)), algorithm


TARGET = (0.5, 0.5, *(0.0,) * (CLASSES - 2))
MLP = lambda: Mlp((1, 28, 28), (200,), CLASSES)  # noqa: E731
WORKLOADS = (
    Workload("W1", "CNN, 10 clients x 6,000, 1 epoch of batch 32", (1, 28, 28), Cnn, 10, 6000,
             Local(lr=0.05, epochs=1, batch=32)),
    Workload("W2", "MLP 784-200-10, 100 clients x 600, 10 steps of batch 32", (1, 28, 28), MLP, 100,
             600, Local(lr=0.05, steps=10, batch=32)),
    Workload("W3", "logistic regression, 100 of 1,000 clients x 60, 3 steps of batch 20",
             (1, 28, 28), lambda: Mlp((1, 28, 28), (), CLASSES), 1000, 60,
             Local(lr=0.05, steps=3, batch=20), cohort=100),
    Workload("W4", "ResNet-18 with GroupNorm, 8 clients, 10 steps of batch 128", (3, 32, 32),
             lambda: ResNet(18, CLASSES, norm="group", stem="cifar"), 8, 1280,
             Local(lr=0.05, steps=10, batch=128)),
    Workload("W5", "MLP, 100 clients of 2 labels, FedPALS for 2 labels", (1, 28, 28), MLP, 100, 600,
             Local(lr=0.05, steps=10, batch=32), labels=2,
             method=lambda s: recipes.fedpals(s, lam=0.0)),
)  # fmt: skip


def plain_round(
    net: nn.Module, params: Params, clients: Sequence[ClientData], local: Local,
    batches: Sequence[Sequence[Tensor]] | None = None,
) -> Params:  # fmt: skip
    """A round of FedAvg as one writes it by hand; batches are drawn unless given."""
    total = sum(len(c.y) for c in clients)
    mixed: Params = {}
    for i, client in enumerate(clients):
        with torch.no_grad():
            for k, p in net.named_parameters():
                p.copy_(params[k])
        optimizer = torch.optim.SGD(net.parameters(), lr=local.lr)
        for rows in drawn(len(client.y), local) if batches is None else batches[i]:
            out = net(client.x[rows])
            out = out["logits"] if isinstance(out, dict) else out
            optimizer.zero_grad()
            nn.functional.cross_entropy(out, client.y[rows]).backward()
            optimizer.step()
        share = len(client.y) / total
        for k, p in net.named_parameters():
            mixed[k] = mixed.get(k, 0.0) + share * p.detach()
    return mixed


def drawn(n: int, local: Local) -> list[Tensor]:
    """One epoch's batches, or a fixed number of steps."""
    if local.steps is None:
        return list(torch.randperm(n).split(local.batch))
    found: list[Tensor] = []
    while len(found) < local.steps:
        found += torch.randperm(n).split(local.batch)
    return found[: local.steps]


@dataclass(frozen=True)
class Result:
    """Medians in seconds by contender, the plain loop first; and how far parameters are apart."""

    workload: Workload
    seconds: dict[str, float]
    apart: float
    weighing: int

    def ratio(self, contender: str) -> float:
        """How many times as fast as the plain loop."""
        return self.seconds["plain"] / self.seconds[contender]


def measure(workload: Workload, quick: bool, repeat: int, count: int) -> Result:
    """Check that all contenders do the same, then time them in turn."""
    federation, algorithm = workload.federation(quick)
    ids = draw_cohort(workload.clients, workload.cohort or workload.clients, 1, 0)
    local = workload.local
    # Rounding grows from step to step: an epoch of 188 would be compared with chance.
    short = replace(local, epochs=None, steps=CHECKED) if local.steps is None else local
    briefly = replace(workload, local=short)
    brief = briefly.method(Setting(algorithm.model, TARGET, short))
    with workers(federation.clients, count) as team:
        checked = contenders_of(briefly, brief, federation, ids, team)
        apart = check(briefly, brief, federation, checked, ids)
        contenders = contenders_of(workload, algorithm, federation, ids, team)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(repeat):
            for name, play in contenders.items():
                began = time.perf_counter()
                play()
                times[name].append(time.perf_counter() - began)
    weighing = int((algorithm.weigh(start(algorithm, federation).server, ids) > 0).sum())
    return Result(workload, {k: statistics.median(v) for k, v in times.items()}, apart, weighing)


def contenders_of(
    workload: Workload, algorithm: Algorithm, federation: Federation, ids: Tensor, team: Team
) -> dict[str, Callable[[], Params]]:
    """A round by the plain loop, and by every backend that may be the fastest."""
    net, first, count = workload.net(), start(algorithm, federation), len(team.members)
    cohort = [federation.clients[i] for i in ids.tolist()]

    def ours(backend: Backend) -> Callable[[], Params]:
        return lambda: play_round(
            algorithm, federation, first.server, {}, ids, 1, backend
        ).server["params"]  # fmt: skip

    found = {
        "plain": lambda: plain_round(net, federation.params, cohort, workload.local),
        "loop": ours(loop),
        f"{count} workers": ours(team),
        "stacked": ours(Stacked()),
    }
    if isinstance(net, Cnn):
        found["channels-last"] = ours(channels_last(loop))
        found[f"channels-last, {count} workers"] = ours(channels_last(team))
    if isinstance(net, Mlp):
        found["dense"] = ours(Stacked(dense=True))
        found[f"dense, {count} workers"] = ours(team.blocks(Stacked(dense=True)))
    return found


def check(
    workload: Workload, algorithm: Algorithm, federation: Federation,
    contenders: dict[str, Callable[[], Params]], ids: Tensor,
) -> float:  # fmt: skip
    """The largest difference to the plain loop over the size of the round's change.

    FedPALS weighs otherwise than the plain loop: only the backends are compared there.
    """
    found = {name: play() for name, play in list(contenders.items())[1:]}
    loops = found.pop("loop")
    moved = max(float((loops[k] - federation.params[k]).abs().max()) for k in loops)
    for name, other in found.items():
        gap = max(float((loops[k] - other[k]).abs().max()) for k in loops)
        # Workers: bit for bit. Others: rounding, which a deep network amplifies from step to step.
        if gap > (0.0 if name.endswith(" workers") and "," not in name else AMPLIFIED * moved):
            raise SystemExit(f"{workload.name}: {name} and loop differ by {gap / moved:.1e}")
    if workload.method is not recipes.fedavg:
        return float("nan")
    cohort = [federation.clients[i] for i in ids.tolist()]
    batches = []
    for client in cohort:
        (plan,) = plan_all(algorithm.phases(), client, 1, 0, int(client.id)).values()
        batches.append([plan.rows[s, : plan.sizes[s]] for s in range(plan.steps)])
    plain = plain_round(workload.net(), federation.params, cohort, workload.local, batches)
    change = max(float((plain[k] - federation.params[k]).abs().max()) for k in plain)
    apart = max(float((plain[k] - loops[k]).abs().max()) for k in plain) / change
    if not apart < 1e-2:
        raise SystemExit(f"{workload.name}: {apart:.1e} of the change away from the plain loop")
    return apart


def table(results: Sequence[Result]) -> Iterator[str]:
    """Markdown: seconds of the plain loop, and everybody's speed relative to it."""
    names = list(dict.fromkeys(name for r in results for name in r.seconds))[1:]
    yield f"| | workload | plain loop, s | {' | '.join(names)} | apart | clients with weight |"
    yield "|---|---|---|" + "---|" * (len(names) + 2)
    for r in results:
        ratios = " | ".join(f"{r.ratio(n):.2f}x" if n in r.seconds else "–" for n in names)
        apart = "–" if r.apart != r.apart else f"{r.apart:.0e}"
        yield (
            f"| {r.workload.name} | {r.workload.what} | {r.seconds['plain']:.3f} | {ratios} | "
            f"{apart} | {r.weighing} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of the examples, W1 and W4")
    parser.add_argument("--only", default="", help="as in W1,W3")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of each contender")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="folder for engine.md and engine.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    chosen = [w for w in WORKLOADS if not given.only or w.name in given.only.split(",")]
    results = []
    for workload in chosen:
        results.append(measure(workload, given.quick, given.repeat, given.workers))
        print(f"{workload.name}: {results[-1].seconds}", flush=True)
    text = "\n".join(table(results))
    machine = (
        f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"\n{text}\n\n{machine}; medians of {given.repeat} rounds.")
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        rows = [{"workload": r.workload.name, "apart": r.apart, **r.seconds} for r in results]
        (given.out / "engine.md").write_text(f"{text}\n\n{machine}; medians of {given.repeat}.\n")
        (given.out / "engine.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
