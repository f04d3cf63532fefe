"""What the benchmarks of the engine train, and how one would write a round of it by hand.

Inputs are random numbers of the right shape: time does not depend on what they show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedshift import Federation, recipes
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.data import ClientData, client_data, register
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.models.resnet import ResNet
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.tree import Params

CLASSES = 10


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
    method: Callable[[Setting], Method] = recipes.fedavg

    def federation(self, quick: bool) -> tuple[Federation, Method]:
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
SPARSE = lambda s: recipes.fedpals(s, lam=0.0)  # noqa: E731
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
             method=SPARSE),
    Workload("W5c", "the same with W1's CNN, 1 epoch of batch 32", (1, 28, 28), Cnn, 100, 600,
             Local(lr=0.05, epochs=1, batch=32), labels=2, method=SPARSE),
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
    batches: list[Tensor] = []
    while len(batches) < local.steps:
        batches += torch.randperm(n).split(local.batch)
    return batches[: local.steps]
