"""From the user's own data, which are cut and encoded already, to a prepared experiment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fedshift.experiments.config.custom import Custom
from fedshift.experiments.config.schema import Config
from fedshift.experiments.config.training_objects import gate_of
from fedshift.experiments.measures.custom_metrics import check_metrics
from fedshift.experiments.task.custom_loss import check_loss, loss_of
from fedshift.experiments.task.first_model import first_model
from fedshift.experiments.task.prepared import Prepared
from fedshift.model import Model
from fedshift.outputs import check_classes
from fedshift.record.folder import ENCODING
from fedshift.tasks.building import Built


def facts_on(
    built: Built, notes: Sequence[str], net: str | None = None, call: str | None = None
) -> str:
    """JSON with what a run folder says on the data beside the encoding, for `fedshift.load`.

    net: "module:Name" of the function that makes the network, if a program gave it. call: the
    arguments of the program's call, which reports show.
    """
    facts: dict[str, Any] = {
        "notes": list(notes),
        "target": built.target,
        "net": net,
        "x": list(built.task.clients[0].x.shape[1:]),
        "input_shape": list(built.input_shape),
        **({} if call is None else {"call": call}),
    }
    if built.task.kind != "regression":  # its classes are quantiles, which differ in each cut
        # Counts over all rows show whether two runs are on the same table: the split seed cuts
        # their data differently, so that checksums of the data do not show it.
        facts["labels"] = torch.cat([built.data.train.y, built.data.test.y]).bincount().tolist()
    return json.dumps(facts, indent=1) + "\n"


def prepare_built(
    config: Config, built: Built, model: Model | None = None, custom: Custom = Custom()
) -> Prepared:
    """The prepared experiment on these data; model: the first model, by default that of [model].

    The encoding of the rows will be written to the run folder. Raises InputError for a network that
    does not fit the data.
    """
    task, seeds = built.task, config.seeds.resolved()
    x = task.clients[0].x[:2]
    if model is None:
        model = first_model(
            config.model, config.method, custom, task, seeds.init,
            augment=config.data.augment, layout=built.encoding.layout,
        )  # fmt: skip
    if task.outputs:
        model = replace(model, outputs=len(task.outputs))
    if built.augment is not None:
        built.augment(x, 0)  # raises if it changes shapes
        model = replace(model, augment=built.augment)
    check_classes(model, x, len(task.classes))
    check_loss(loss_of(task, custom.loss), model, x, task.clients[0].y[:2])
    check_metrics(custom.metrics, task.kind)
    texts = {ENCODING: built.encoding.to_json(), **custom.texts}
    custom = replace(custom, clients=custom.clients or built.clients, texts=texts)
    target = tuple(task.target.tolist())
    gate = gate_of(config.training, target)
    return Prepared(
        task, model, seeds, built.data, built.pool, built.digest, target, gate=gate, custom=custom,
        server_examples=task.target_validation if config.server.validation else None,
        at_sites=config.data.at_sites,
    )  # fmt: skip
