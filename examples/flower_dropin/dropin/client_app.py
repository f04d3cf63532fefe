"""The clients. For FedPALS, their metrics have one entry more: "label-counts"."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from dropin.task import CLASSES, accuracy, client_data, network, train

app = ClientApp()


def mine(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """This client's examples."""
    node = context.node_config
    return client_data(int(node["partition-id"]), int(node["num-partitions"]))


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Local training from the model received."""
    net, (x, y) = network(), mine(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    epochs, lr = context.run_config["local-epochs"], context.run_config["learning-rate"]
    loss = train(net, x, y, int(epochs), float(lr))
    metrics = {
        "train_loss": loss,
        "num-examples": len(y),
        "label-counts": torch.bincount(y, minlength=CLASSES).tolist(),  # for FedPALS
    }
    records = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


@app.evaluate()
def test(message: Message, context: Context) -> Message:
    """The model received, on this client's examples."""
    net, (x, y) = network(), mine(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = {"accuracy": accuracy(net, x, y), "num-examples": len(y)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
