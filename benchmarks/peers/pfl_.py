"""pfl: `FederatedAveraging` on its simulated backend, one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from plain import RATE, Client, Workload, compare
from torch import Tensor, nn

MANY = 1_000_000


class Net(nn.Module):
    """The workload's network with the loss that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor, **_: Any) -> dict[str, Any]:
        return {}


class Tick(TrainingProcessCallback):
    """Says when a round is over."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.tick()
        return False, Metrics()


def play(work: Workload, clients: Sequence[Client], rounds: int, tick: Callable[[], None]) -> None:
    """Rounds in one call."""
    users = {str(i): i for i in range(len(clients))}
    users_data = FederatedDataset(
        lambda user: Dataset(raw_data=clients[users[user]], user_id=user),
        get_user_sampler("minimize_reuse", list(users)),
    )
    net = Net(work.net())
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    epoch = work.local_steps * work.batch >= work.examples
    local = NNTrainHyperParams(
        local_num_epochs=1 if epoch else None,
        local_num_steps=None if epoch else work.local_steps,
        local_learning_rate=RATE,
        local_batch_size=work.batch,
    )
    params = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=MANY, train_cohort_size=work.asked,
        val_cohort_size=0,
    )  # fmt: skip
    np.random.seed(0)  # pfl's sampler draws from numpy's global generator
    backend = SimulatedBackend(
        training_data=users_data, val_data=users_data, postprocessors=[WeightByDatapoints()]
    )
    FederatedAveraging().run(params, backend, model, local, callbacks=[Tick(tick)])


if __name__ == "__main__":
    compare("pfl", "pfl", play)
