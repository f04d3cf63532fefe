"""ImageNet weights for our ResNets, through torchvision where it can be imported."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from fedshift.errors import InputError, NetworkError
from fedshift.models.resnet import ResNet

# The two operators that torchvision's compiled part declares and its import needs.
_SCHEMAS = ("nms", "qnms")
_HEAD = 2


def imagenet(net: ResNet, depth: int) -> ResNet:
    """`net` with torchvision's IMAGENET1K_V1 weights up to the classifier; returns it.

    Raises InputError where torchvision is not installed or the network is not made for such
    weights, NetworkError where they cannot be downloaded (torch keeps them in its hub folder).
    """
    models = torchvision_models()
    try:
        source = getattr(models, f"resnet{depth}")(weights="IMAGENET1K_V1")
    except OSError as error:
        raise NetworkError(
            f"the ImageNet weights of ResNet-{depth} could not be downloaded: {error}. Try again "
            f"later, put the file into {torch.hub.get_dir()}/checkpoints, or set "
            "model.pretrained = false."
        ) from error
    return load(net, source.state_dict())


def load(net: ResNet, weights: Mapping[str, Tensor]) -> ResNet:
    """Copy a torchvision ResNet's weights and statistics into `net`; returns it.

    Both hold their tensors in the same order, so they are matched by place and shape; the last
    two, torchvision's classifier over 1,000 classes, and our projection and head are left out.

    Raises InputError at the first tensor that does not fit (another depth, norm or stem).
    """
    values = list(weights.items())[:-_HEAD]
    # keep_vars: the tensors themselves, which are copied into below.
    targets = list(net.body.state_dict(keep_vars=True).items())
    if net.projection is not None:
        targets = targets[:-_HEAD]
    for (name, source), (key, target) in zip(values, targets, strict=False):
        if source.shape != target.shape:
            raise _unfit(f"{name} has shape {list(source.shape)}, {key} {list(target.shape)}")
    # After the shapes, whose message says more.
    if len(values) != len(targets):
        raise _unfit(f"they are {len(values)} tensors, the network has {len(targets)}")
    with torch.no_grad():
        for (_, source), (_, target) in zip(values, targets, strict=True):
            target.copy_(source)
    return net


def torchvision_models() -> ModuleType:
    """The module torchvision.models.

    torchvision's usual wheels are built with CUDA. Beside a torch without it their compiled part
    cannot be loaded, and `import torchvision` fails because the operator torchvision::nms, which it
    wants to describe, has not been declared. Only then, the two operators are declared without any
    code behind them and the import is tried again: models work, torchvision.ops.nms does not.
    Where the plain import works nothing is declared, since that would clash with the real ones.

    Raises InputError where torchvision is not installed.
    """
    try:
        return import_module("torchvision.models")
    except ImportError as error:
        raise InputError(
            "ImageNet weights come through torchvision, which cannot be imported "
            f'({error}). Run `pip install --no-deps "torchvision==0.28.*"` (the version that '
            "belongs to the installed torch; without --no-deps pip may exchange torch), or set "
            "model.pretrained = false."
        ) from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare()
    return import_module("torchvision.models")


@cache
def _declare() -> torch.library.Library:
    # Cached because the declarations vanish with the last reference to their library.
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in _SCHEMAS:
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


def _unfit(what: str) -> InputError:
    return InputError(
        f"these weights are for another network: {what}. ImageNet weights fit a ResNet of the same "
        'depth with norm="batch" and stem="imagenet".'
    )
