"""The first model of an experiment, as its method needs it."""

from __future__ import annotations

from dataclasses import replace

from fedshift.data import Task
from fedshift.datasets.augment import photos
from fedshift.errors import InputError
from fedshift.experiments.config.custom import Custom, recipe_of
from fedshift.experiments.config.custom_network import Shape, custom_network, packed, placing
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.python_names import is_python
from fedshift.experiments.config.schema import Method, Network
from fedshift.model import Model
from fedshift.outputs import check_classes
from fedshift.recipes import Traits
from fedshift.tasks.layout import Layout, Part


def first_model(
    section: Network, method: Method, custom: Custom, task: Task, seed: int, *,
    augment: str = "none", layout: Layout | None = None,
) -> Model:  # fmt: skip
    """The network of [model] with its first weights, built as the method and the clients need it.

    augment: `data.augment`. layout: how a row packs several inputs, or the numbers to predict.
    """
    x, classes = task.clients[0].x[:2], len(task.classes)
    shape = tuple(x.shape[1:])
    if is_python(section.name):
        made_for, freeze = custom.task or Shape(shape, task.classes), section.freeze_norm
        model = custom_network(section.name, made_for, seed, layout, freeze_norm=freeze)
    else:
        traits, clients = recipe_of(method, custom).traits, len(task.clients)
        model = named_network(section, traits, shape, classes, seed, clients, layout)
    if task.outputs:
        model = replace(model, outputs=len(task.outputs))
    with placing(section.name):
        check_classes(model, x, classes)
    if augment == "photos":
        photos(x, 0)  # raises for inputs that it cannot change
        model = replace(model, augment=photos)
    return model


def named_network(
    section: Network, traits: Traits, shape: tuple[int, ...], classes: int, seed: int, clients: int,
    layout: Layout | None,
) -> Model:  # fmt: skip
    """`network` for a method: with the router's branch or the fixed classifier that it needs.

    If rows also hold the numbers to predict, the network gets the inputs without these.
    """
    routed = clients if traits.router else None
    if traits.fixed_head:
        section = section.model_copy(update={"classifier": "etf"})
    if layout is None or not layout.targets:
        return network(section, shape, classes, seed, routed)
    if section.classifier == "etf":
        raise InputError(
            "an ETF is a direction for each class, and this task predicts numbers or several "
            'labels; take model.classifier = "linear", and a method such as fedavg'
        )
    due = layout.parts[-1]
    if layout.form != "one":  # several inputs as one vector, as where classes are predicted
        layout = Layout((Part("x", (layout.width - due.size,)), due), targets=True)
    plain = network(section, layout.inputs[0].shape, due.size, seed, routed)
    return Model(packed(plain.net, layout), plain.freeze_norm)
