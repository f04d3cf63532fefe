"""Flower: `FedAvg` and a plain PyTorch client app in `run_simulation`, an actor per core."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from flower_client import client_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain import WORKLOADS, Client, Workload, compare


class Ticking(FedAvg):
    """Flower's FedAvg, which says when a round is over."""

    def __init__(self, tick: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self.tick = tick

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        aggregated = super().aggregate_train(server_round, replies)
        if aggregated[0] is None:
            raise RuntimeError("clients failed, see above")
        self.tick()
        return aggregated


def play(work: Workload, clients: Sequence[Client], rounds: int, tick: Callable[[], None]) -> None:
    """All rounds in one simulation; every actor has one core and makes the data once."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    server, first = ServerApp(), ArrayRecord(work.net().state_dict())

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Ticking(
            tick,
            fraction_train=work.asked / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.asked,
            min_available_nodes=work.clients,
        )
        strategy.start(grid, first, num_rounds=rounds, train_config=ConfigRecord())

    tiny = work == WORKLOADS[work.name].tiny()
    run_simulation(
        server_app=server,
        client_app=client_app(work.name, tiny),
        num_supernodes=work.clients,
        backend_config={
            "init_args": {"num_cpus": os.cpu_count() or 1, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    compare("Flower simulation", "flwr", play)
