"""W1 to W4 and the plain loop, for processes in which fedshift is not installed.

The workloads are those of benchmarks/workloads.py; tests/docs/test_benchmarks.py compares the two.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before torch is imported, or it does nothing

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from torch import Tensor, nn

CLASSES, RATE = 10, 0.05
Params = dict[str, Tensor]
Client = tuple[Tensor, Tensor]


def cnn() -> nn.Module:
    """conv5x5x32 - pool - conv5x5x64 - pool - fc512 - fc10, of McMahan et al. 2017."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def mlp() -> nn.Module:
    """784 - 200 - 10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def linear() -> nn.Module:
    """Softmax regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES))


class Block(nn.Module):
    """relu(shortcut(x) + F(x)), F of two convolutions 3 x 3, each with GroupNorm."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *normed(inputs, width, 3, stride), nn.ReLU(), *normed(width, width, 3, 1)
        )
        same = stride == 1 and inputs == width
        self.shortcut = nn.Sequential(*([] if same else normed(inputs, width, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.shortcut(x) + self.residual(x))


def normed(inputs: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    """A convolution and GroupNorm of 32 groups."""
    conv = nn.Conv2d(inputs, width, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.GroupNorm(32, width)]


# Inputs, outputs and stride of a ResNet-18's blocks.
BLOCKS = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
          (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1))  # fmt: skip


def resnet() -> nn.Module:
    """ResNet-18 with GroupNorm for images of 32 x 32."""
    blocks = [Block(*shape) for shape in BLOCKS]
    return nn.Sequential(
        *normed(3, 64, 3, 1), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Clients of equal size; `steps` local steps, or one epoch; `cohort` of them in each round."""

    name: str
    net: Callable[[], nn.Module]
    clients: int
    examples: int
    batch: int
    steps: int | None = None
    cohort: int | None = None
    shape: tuple[int, ...] = (1, 28, 28)

    @property
    def asked(self) -> int:
        """Clients of a round."""
        return self.cohort or self.clients

    @property
    def local_steps(self) -> int:
        """Steps of a client's round."""
        return self.steps or -(-self.examples // self.batch)

    def few(self, count: int) -> Workload:
        """With so many clients in each round: as long per client and step."""
        return replace(self, clients=count, cohort=None)

    def tiny(self) -> Workload:
        """To try a script out."""
        batch = min(self.batch, 16)
        size = batch * (self.steps or 1)
        cohort = 2 if self.cohort else None
        return replace(self, clients=4, examples=2 * size, batch=batch, cohort=cohort)


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", cnn, 10, 6000, 32),
        Workload("W2", mlp, 100, 600, 32, steps=10),
        Workload("W3", linear, 1000, 60, 20, steps=3, cohort=100),
        Workload("W4", resnet, 8, 1280, 128, steps=10, shape=(3, 32, 32)),
    )
}


def data(workload: Workload) -> list[Client]:
    """Random images: time does not depend on what they show."""
    source = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(workload.examples, *workload.shape, generator=source),
            torch.randint(CLASSES, (workload.examples,), generator=source),
        )
        for _ in range(workload.clients)
    ]


def plain_round(
    net: nn.Module, params: Params, clients: Sequence[Client], work: Workload
) -> Params:
    """A round of FedAvg as one writes it by hand."""
    total = sum(len(y) for _, y in clients)
    mixed: Params = {}
    for x, y in clients:
        with torch.no_grad():
            for k, p in net.named_parameters():
                p.copy_(params[k])
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        for rows in drawn(len(y), work):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
        for k, p in net.named_parameters():
            mixed[k] = mixed.get(k, 0.0) + len(y) / total * p.detach()
    return mixed


def drawn(n: int, work: Workload) -> list[Tensor]:
    """One epoch's batches, or a fixed number of steps."""
    batches: list[Tensor] = []
    while len(batches) < work.local_steps:
        batches += torch.randperm(n).split(work.batch)
    return batches[: work.local_steps]


class Turns:
    """Rounds of a peer and of the plain loop in turn. The peer calls `tick` after each of its own.

    The first round of either is left out: it holds whatever happens once.
    """

    def __init__(self, plain: Callable[[int], object]) -> None:
        self._plain, self._began = plain, float("nan")
        self.theirs: list[float] = []
        self.plain: list[float] = []
        self._played = 0

    def tick(self) -> None:
        """A round of the peer is over."""
        now = time.perf_counter()
        self._plain(self._played)
        after = time.perf_counter()
        if self._played:
            self.theirs.append(now - self._began)
            self.plain.append(after - now)
        self._played += 1
        self._began = time.perf_counter()


# Plays so many rounds of a workload over these clients, with a tick after each.
Play = Callable[[Workload, Sequence[Client], int, Callable[[], None]], object]


def compare(name: str, package: str, play: Play) -> None:
    """Time a peer and the plain loop in turn, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=f"{name} against the plain loop")
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--clients", type=int, help="the first so many, in each round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = WORKLOADS[options.workload]
    work = (
        whole.tiny() if options.tiny else whole.few(options.clients) if options.clients else whole
    )
    clients, net = data(work), work.net()
    params = {k: v.detach().clone() for k, v in net.named_parameters()}

    def plain(t: int) -> Params:
        first = t * work.asked % work.clients
        return plain_round(net, params, clients[first : first + work.asked], work)

    turns = Turns(plain)
    play(work, clients, options.rounds + 1, turns.tick)
    if len(turns.theirs) != options.rounds:
        raise SystemExit(f"{name} played {len(turns.theirs) + 1} rounds, not {options.rounds + 1}")
    result = {
        "peer": name, "version": version(package), "workload": work.name,
        "plain": statistics.median(turns.plain), "seconds": statistics.median(turns.theirs),
        "rounds": options.rounds, "tiny": options.tiny, "torch": torch.__version__,
        "clients": work.asked, "of": whole.asked,
        "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
