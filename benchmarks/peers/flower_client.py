"""The client app of flower_.py, in a module that Flower's actors can import."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from plain import WORKLOADS, Client, Workload, data, plain_round


@cache
def made(name: str, tiny: bool) -> tuple[Workload, list[Client]]:
    """The workload and its clients, once per actor."""
    torch.set_num_threads(1)
    work = WORKLOADS[name].tiny() if tiny else WORKLOADS[name]
    return work, data(work)


def client_app(name: str, tiny: bool) -> ClientApp:
    """As in Flower's quick start with PyTorch."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        work, clients = made(name, tiny)
        client = clients[int(context.node_config["partition-id"])]
        params = dict(message.content["arrays"].to_torch_state_dict())
        after = plain_round(work.net(), params, [client], work)
        metrics = MetricRecord({"num-examples": len(client[1])})
        record = {"arrays": ArrayRecord(after), "metrics": metrics}
        return Message(RecordDict(record), reply_to=message)

    return app
