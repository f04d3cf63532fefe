"""FedLab: its standalone pipeline with the SGD serial trainer and the synchronous server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from plain import RATE, Client, Workload, compare
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Held:
    """What the trainer asks for a client's batches."""

    def __init__(self, clients: Sequence[Client], work: Workload) -> None:
        self.sets = [TensorDataset(x, y) for x, y in clients]
        self.seen = min(work.local_steps * work.batch, work.examples)

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        """As many rows as the steps take, without replacement."""
        data = self.sets[client]
        return DataLoader(data, batch_size, sampler=RandomSampler(data, num_samples=self.seen))


class Ticking(StandalonePipeline):
    """The pipeline, which says when a round is over."""

    def __init__(
        self, handler: SyncServerHandler, trainer: SGDSerialClientTrainer, tick: Callable[[], None]
    ) -> None:
        super().__init__(handler, trainer)
        self.tick = tick

    def evaluate(self) -> None:
        self.tick()


def play(work: Workload, clients: Sequence[Client], rounds: int, tick: Callable[[], None]) -> None:
    """Rounds in one process."""
    logging.disable(logging.WARNING)
    trainer = SGDSerialClientTrainer(work.net(), work.clients)
    trainer.setup_dataset(Held(clients, work))
    trainer.setup_optim(epochs=1, batch_size=work.batch, lr=RATE)
    handler = SyncServerHandler(work.net(), rounds, work.asked / work.clients)
    Ticking(handler, trainer, tick).main()


if __name__ == "__main__":
    compare("FedLab", "fedlab", play)
