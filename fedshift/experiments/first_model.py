"""The first model of an experiment."""

from __future__ import annotations

from dataclasses import replace

from fedshift.data import Task
from fedshift.datasets.augment import photos
from fedshift.experiments.config import Config, Network
from fedshift.experiments.custom import Custom, recipe_of
from fedshift.experiments.custom_network import Shape, custom_network, packed, placing
from fedshift.experiments.networks import network
from fedshift.experiments.python_names import is_python
from fedshift.model import Model
from fedshift.outputs import check_classes
from fedshift.tasks.layout import Layout, Part


def first_model(
    config: Config, custom: Custom, task: Task, seed: int, layout: Layout | None = None
) -> Model:
    """The network of [model] with its first weights, as the method needs it for these clients.

    layout: how the rows pack several inputs, or what is to be predicted.
    """
    x, classes = task.clients[0].x[:2], len(task.classes)
    shape = tuple(x.shape[1:])
    if is_python(config.model.name):
        made_for, freeze = custom.task or Shape(shape, task.classes), config.model.freeze_norm
        model = custom_network(config.model.name, made_for, seed, layout, freeze_norm=freeze)
    else:
        routed = len(task.clients) if recipe_of(config, custom).traits.router else None
        model = named_network(config.model, shape, classes, seed, routed, layout)
    if task.outputs:
        model = replace(model, outputs=len(task.outputs))
    with placing(config.model.name):
        check_classes(model, x, classes)
    if config.data.augment == "photos":
        photos(x, 0)  # raises for images that it cannot change
        model = replace(model, augment=photos)
    return model


def named_network(
    config: Network, shape: tuple[int, ...], classes: int, seed: int, routed: int | None,
    layout: Layout | None,
) -> Model:  # fmt: skip
    """`network`, which does not see what is to be predicted where rows hold that, too."""
    if layout is None or not layout.targets:
        return network(config, shape, classes, seed, routed)
    due = layout.parts[-1]
    if layout.form != "one":  # several inputs as one vector, as where classes are predicted
        layout = Layout((Part("x", (layout.width - due.size,)), due), targets=True)
    plain = network(config, layout.inputs[0].shape, due.size, seed, routed)
    return Model(packed(plain.net, layout), plain.freeze_norm)
