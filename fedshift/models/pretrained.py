"""ImageNet weights for our ResNets: through torchvision, or from a file of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedshift.errors import DataError, InputError, NetworkError, nearest
from fedshift.models.resnet import STAGES, ResNet

SAFE, TORCH = (".safetensors",), (".pth", ".pt", ".bin")
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_COUNTER, _HEAD = "num_batches_tracked", ("fc.weight", "fc.bias")
# What is copied into float32 as it is; other kinds would be rounded or cut without a word.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def imagenet(net: ResNet, depth: int) -> ResNet:
    """`net` with torchvision's IMAGENET1K_V1 weights up to the classifier; returns it.

    Raises InputError where torchvision cannot be imported or the network is not made for such
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
    return load(net, depth, source.state_dict())


def torchvision_models() -> ModuleType:
    """The module torchvision.models. Raises InputError where it cannot be imported."""
    try:
        return import_module("torchvision.models")
    # Beside a torch of another build, torchvision fails with a RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"ImageNet weights come through torchvision, which cannot be imported ({error}). "
            "Install the version that belongs to your torch, give the file of the weights "
            "as model.weights, or set model.pretrained = false."
        ) from error


def from_file(net: ResNet, depth: int, path: Path) -> ResNet:
    """`net` with the weights of `path` up to the classifier; returns it.

    The file has the tensors of torchvision's resnet18 or resnet50 under their names there, as
    resnet50-0676ba61.pth does. Files from before counters of batches existed lack these alone.

    Raises InputError for a file of another network, DataError for a damaged one.
    """
    return load(net, depth, read_weights(path), f"{path}: ")


def load(net: ResNet, depth: int, weights: Mapping[str, Tensor], where: str = "") -> ResNet:
    """Copy torchvision's tensors into `net`, all or none; its classifier and counters are left out.

    where: the beginning of messages. Raises InputError for weights of another network, DataError
    for tensors that cannot be copied as they are.
    """
    names = torchvision_names(depth)
    ours = list(net.body.state_dict(keep_vars=True).values())[: len(names)]
    pairs = [(n, v) for n, v in zip(names, ours, strict=False) if not n.endswith(_COUNTER)]
    needed = [name for name, _ in pairs]
    whose = f"{where}not the weights of torchvision's resnet{depth}"
    if missing := [n for n in needed if n not in weights]:
        raise InputError(
            f"{whose}: {missing[0]} is missing ({len(missing)} of {len(needed)} are)."
            f"{nearest(missing[0], weights.keys() - {*names})}"
        )
    if others := sorted(weights.keys() - {*names, *_HEAD}):
        raise InputError(f"{whose}: it has {others[0]}, which that network lacks")
    for name, target in pairs:
        if weights[name].shape != target.shape or len(ours) < len(names):
            raise InputError(
                f"{where}these weights are for another network: {name} is "
                f"{list(weights[name].shape)}, ours {list(target.shape)}. They fit a ResNet of the "
                'same depth with norm="batch" and stem="imagenet".'
            )
        if fault := _fault(name, weights[name]):
            raise DataError(f"{where}{name} {fault}")
    with torch.no_grad():
        for name, target in pairs:
            target.copy_(weights[name])
    return net


def _fault(name: str, value: Tensor) -> str | None:
    """Why a tensor cannot be copied into float32 as it is; None where it can."""
    if value.dtype not in _FLOATS or value.layout != torch.strided or value.is_meta:
        kind = "meta" if value.is_meta else f"{value.layout} {value.dtype}".replace("torch.", "")
        return f"is of kind {kind}; save the weights as strided tensors of 16, 32 or 64 bits"
    if not bool(torch.isfinite(value.float()).all()):
        return "holds numbers that are not finite in float32; get the file anew"
    if name.endswith("running_var") and bool((value < 0).any()):
        return "holds variances below 0; get the file anew"
    return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; nothing that the file holds is executed.

    Raises InputError for a file that is not there or of another kind, DataError for one that is
    damaged or holds other things than tensors.
    """
    if not os.path.isfile(path):
        raise InputError(f'model.weights: there is no file "{path}"; name one that is there')
    ending = path.suffix.lower()
    if ending not in (*SAFE, *TORCH):
        kinds = ", ".join((*SAFE, *TORCH))
        raise InputError(f"model.weights: {path} ends in {ending or 'nothing'}; allowed: {kinds}")
    try:
        # torch's restricted reader makes tensors and containers alone.
        read: Any = (
            load_file(path) if ending in SAFE
            else torch.load(path, map_location="cpu", weights_only=True)
        )  # fmt: skip
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read as weights ({error}); get the file anew") from None
    except Exception:  # of many kinds, an unpickler's own among them, whose text is no advice
        raise DataError(
            f"{path}: is damaged, or holds more than tensors, which is never executed; save "
            "net.state_dict() with torch.save, or get the file anew"
        ) from None
    inner = read.get("state_dict") if isinstance(read, Mapping) else None
    named = inner if isinstance(inner, Mapping) else read
    if not isinstance(named, Mapping) or not named:
        raise DataError(f"{path}: holds no tensors by name; save a state_dict")
    tensors: dict[str, Tensor] = {}
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise DataError(f"{path}: {name!r} is a {kind} and no tensor; save a state_dict")
        bare = name.removeprefix("module.")  # of a network that was trained on several devices
        if bare in tensors:
            raise DataError(f'{path}: has {bare} twice, with and without "module."; save one')
        tensors[bare] = value
    return tensors


def torchvision_names(depth: int) -> list[str]:
    """torchvision's names of a ResNet's tensors without its classifier, in its order.

    Raises InputError for a depth that `ResNet` does not have.
    """
    if depth not in STAGES:
        raise InputError(f"depth={depth!r}; allowed: {', '.join(map(str, STAGES))}")
    blocks, _ = STAGES[depth]
    places = ["conv1", "bn1"]
    for stage, count in enumerate(blocks, 1):
        for k in range(count):
            block = f"layer{stage}.{k}"
            for c in range(1, {18: 2, 50: 3}[depth] + 1):
                places += [f"{block}.conv{c}", f"{block}.bn{c}"]
            # The first block of a stage changes the width or the size, but for ResNet-18's first.
            if k == 0 and (stage > 1 or depth == 50):
                places += [f"{block}.downsample.0", f"{block}.downsample.1"]
    norms = ("bn1", "bn2", "bn3", "downsample.1")
    return [f"{p}.{n}" for p in places for n in (_NORM if p.endswith(norms) else ("weight",))]
