"""From data of one's own, which are cut and encoded already, to what an experiment runs on."""

from __future__ import annotations

import json
from dataclasses import replace

from fedshift.experiments.config import Config
from fedshift.experiments.networks import network
from fedshift.experiments.own import Own, recipe_of
from fedshift.experiments.own_layout import packed
from fedshift.experiments.own_loss import check_loss
from fedshift.experiments.prepared import Prepared
from fedshift.experiments.settings import gate_of
from fedshift.model import Model
from fedshift.outputs import check_classes
from fedshift.record.folder import ENCODING, FIT
from fedshift.tasks.building import Built


def prepare_built(
    config: Config, built: Built, model: Model | None = None, own: Own = Own()
) -> Prepared:
    """The experiment on these data; model: the first one, else the network of [model].

    The encoding of the rows goes to the run folder, with what `fedshift.load` has to know, and the
    clients have their names. Raises InputError for a network that does not fit the data.
    """
    task, seeds = built.task, config.seeds.resolved()
    x, classes = task.clients[0].x[:2], len(task.classes)
    if model is None:
        routed = len(task.clients) if recipe_of(config, own).traits.router else None
        model = network(config.model, built.input_shape, classes, seeds.init, routed)
    model = packed(model, built.encoding.layout)
    check_classes(model, x, classes)
    check_loss(own.loss, model, x, task.clients[0].y[:2])
    about = {"target": built.target, "notes": built.notes, "input_shape": built.input_shape}
    texts = {
        ENCODING: built.encoding.to_json(),
        FIT: json.dumps({**about, "x": tuple(x.shape[1:]), **own.about}, indent=1) + "\n",
    }
    own = replace(own, clients=own.clients or built.clients, texts=texts)
    target = tuple(task.target.tolist())
    gate = gate_of(config.training, target)
    return Prepared(
        task, model, seeds, built.data, built.pool, built.digest, target, gate=gate, own=own
    )
