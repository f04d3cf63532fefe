"""The first model of an experiment."""

from __future__ import annotations

from dataclasses import replace

from fedshift.data import Task
from fedshift.datasets.augment import photos
from fedshift.experiments.config import Config
from fedshift.experiments.networks import network
from fedshift.experiments.own import Own, recipe_of
from fedshift.experiments.own_network import Shape, own_network
from fedshift.experiments.python_names import is_python
from fedshift.model import Model
from fedshift.outputs import check_classes


def first_model(config: Config, own: Own, task: Task, seed: int) -> Model:
    """The network of [model] with its first weights, as the method needs it for these clients."""
    x, classes = task.clients[0].x[:2], len(task.classes)
    shape = tuple(x.shape[1:])
    if is_python(config.model.name):
        layout = None if own.task is None else own.task.build().encoding.layout
        model = own_network(config.model.name, own.task or Shape(shape, task.classes), seed, layout)
    else:
        routed = len(task.clients) if recipe_of(config, own).traits.router else None
        model = network(config.model, shape, classes, seed, routed)
    check_classes(model, x, classes)
    if config.data.augment == "photos":
        photos(x, 0)  # raises for images that it cannot change
        model = replace(model, augment=photos)
    return model
