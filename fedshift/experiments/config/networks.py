"""Building the network that [model] describes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from fedshift.errors import InputError
from fedshift.experiments.config.schema import PYTHON, Network
from fedshift.model import Model, build
from fedshift.models.dense import Mlp, routed_mlp
from fedshift.models.etf import TEMPERATURE, with_etf
from fedshift.models.lenet import LeNet
from fedshift.models.lenet_gn import SMALL, lenet_gn
from fedshift.models.pretrained import from_file, imagenet
from fedshift.models.projected import WIDTH, projected_lenet, projected_mlp
from fedshift.models.resnet import Norm, ResNet, stem_for
from fedshift.models.resnet_routed import resnet18_routed

# Networks that take images as bytes, too: large data sets need not be converted in memory.
BYTES = ("resnet18-gn", "resnet18", "resnet50")
# Networks that can have a router.
ROUTED = ("lenet-gn", "lenet-gn-small", "resnet18-projected", "mlp-projected")


def network(
    config: Network, shape: tuple[int, ...], classes: int, seed: int, clients: int | None = None
) -> Model:
    """The configured network for inputs of `shape`, with first weights from `seed`.

    clients: how many clients its router tells apart; None for a network without a router.
    """
    if config.name == PYTHON:
        raise InputError(
            'model.name = "python": a program gave this network, and no file holds it; give it '
            "again in Python, as fs.load(folder, net=...)"
        )
    out = config.projection or WIDTH
    # Functions, so that only the chosen network is built.
    makers: dict[str, Callable[[], nn.Module]] = {
        "lenet": lambda: LeNet(shape[0], shape[-1], classes),
        "mlp": lambda: Mlp(shape, config.hidden, classes),
        "mlp-projected": lambda: routed_mlp(shape, config.hidden, classes, clients),
        "mlp-moon": lambda: projected_mlp(shape, config.hidden, classes, out),
        "linear": lambda: Mlp(shape, (), classes),
        "lenet-moon": lambda: projected_lenet(shape[0], shape[-1], classes, out),
        "lenet-gn": lambda: lenet_gn(
            shape[0], shape[-1], classes, clients, sharing=config.branches or "deep"
        ),
        "lenet-gn-small": lambda: lenet_gn(shape[0], shape[-1], classes, clients, widths=SMALL),
        "resnet18-projected": lambda: resnet18_routed(classes, clients, channels=shape[0]),
        "resnet18-gn": lambda: _resnet(18, "group", config, shape, classes),
        "resnet18": lambda: _resnet(18, "batch", config, shape, classes),
        "resnet50": lambda: _resnet(50, "batch", config, shape, classes),
    }
    if clients is not None and config.name not in ROUTED:
        raise InputError(unrouted(config.name))
    vectors = config.name in ("mlp", "mlp-projected", "mlp-moon", "linear")
    if not vectors and (len(shape) != 3 or shape[1] != shape[2]):
        raise InputError(_not_square(config.name, shape, clients))
    make = makers[config.name]
    if config.classifier == "etf":
        make = partial(_with_etf, make, config.temperature or TEMPERATURE)
    return build(make, seed, freeze_norm=config.freeze_norm)


def _with_etf(make: Callable[[], nn.Module], temperature: float) -> nn.Module:
    return with_etf(make(), temperature)


def _not_square(name: str, shape: tuple[int, ...], clients: int | None) -> str:
    """The message for a network that needs images of another shape, with those that would do."""
    data = "rows of numbers" if len(shape) == 1 else str(shape)
    others = '"mlp" or "linear"' if clients is None else '"mlp-projected"'
    # A user who has no [model] in the file has never seen the default's name.
    unnamed = f' as name of [model], which is "{name}" where the file names none'
    return (
        f'model.name "{name}" needs square images [channels, size, size], the data are {data}; '
        f"use {others}{unnamed * (name == Network().name)}"
    )


def unrouted(name: str) -> str:
    """The message for a network without a router, under a method that trains one."""
    return (
        f'model.name "{name}" has no branch that tells clients apart, which this method trains; '
        f"use one of {', '.join(ROUTED)}"
    )


def _resnet(
    depth: int, norm: Norm, config: Network, shape: tuple[int, ...], classes: int
) -> ResNet:
    """A ResNet with a stem for the images' size; with ImageNet weights, with ImageNet's stem."""
    if not config.pretrained and config.weights is None:
        stem = stem_for(shape[-1])
        return ResNet(
            depth, classes, norm=norm, stem=stem, channels=shape[0], projection=config.projection
        )
    net = ResNet(
        depth, classes, norm=norm, channels=shape[0], projection=config.projection,
        colours="imagenet",
    )  # fmt: skip
    if config.weights is not None:
        return from_file(net, depth, Path(config.weights))
    return imagenet(net, depth)
