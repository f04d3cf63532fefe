"""ImageNet weights of a ResNet from a file, without torchvision: safetensors, or torch's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedshift.errors import DataError, InputError, nearest
from fedshift.models.pretrained import load
from fedshift.models.resnet import STAGES, ResNet

SAFE, TORCH = (".safetensors",), (".pth", ".pt", ".bin")
# How many convolutions a block has, by depth.
_CONVOLUTIONS = {18: 2, 50: 3}
_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_COUNTER = "num_batches_tracked"
_HEAD = ("fc.weight", "fc.bias")
# Of a network that was trained on several devices.
_PREFIX = "module."
# What is copied into float32 as it is; other kinds would be rounded or cut without a word.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def from_file(net: ResNet, depth: int, path: Path) -> ResNet:
    """`net` with the weights of `path` up to the classifier; returns it.

    The file has the tensors of torchvision's resnet18 or resnet50 under their names there, as
    resnet50-0676ba61.pth does. Files from before counters of batches existed lack these alone.

    Raises InputError for a file of another network, DataError for a damaged one.
    """
    given = read_weights(path)
    names = [*torchvision_names(depth), *_HEAD]
    # The classifier is left out, and may be missing; counters are no weights.
    needed = [n for n in names if n not in _HEAD and not n.endswith(_COUNTER)]
    where = f"{path}: not the weights of torchvision's resnet{depth}"
    if missing := [n for n in needed if n not in given]:
        raise InputError(
            f"{where}: {missing[0]} is missing ({len(missing)} of {len(needed)} are)."
            f"{nearest(missing[0], given.keys() - set(names))}"
        )
    if others := sorted(given.keys() - set(names)):
        raise InputError(f"{where}: it has {others[0]}, which that network lacks")
    for name in needed:
        if fault := _fault(name, given[name]):
            raise DataError(f"{path}: {name} {fault}")
    # Counters are not used; the file's kind of these does not matter.
    blank = torch.zeros((), dtype=torch.int64)
    return load(net, {n: given[n] if n in needed else blank for n in names})


def _fault(name: str, value: Tensor) -> str | None:
    """Why a tensor of a file cannot be copied into float32 as it is; None where it can."""
    if value.dtype not in _FLOATS or value.layout != torch.strided or value.is_meta:
        kind = "meta" if value.is_meta else f"{value.layout} {value.dtype}".replace("torch.", "")
        return (
            f"is of kind {kind}; allowed: strided float16, bfloat16, float32 or float64. Save the "
            "weights as such"
        )
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
        raise InputError(
            f"model.weights: {path} ends in {ending or 'nothing'}; allowed: "
            f"{', '.join((*SAFE, *TORCH))}"
        )
    try:
        read: Any = load_file(path) if ending in SAFE else _from_torch(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    tensors: dict[str, Tensor] = {}
    for name, value in _tensors(read, path):
        if name in tensors:
            raise DataError(f"{path}: has {name} twice, with and without {_PREFIX!r}; save one")
        tensors[name] = value
    return tensors


def _from_torch(path: Path) -> Any:
    """A checkpoint of torch by its restricted reader, which makes tensors and containers alone."""
    try:
        read = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, an unpickler's own among them
        if type(error).__name__ != "UnpicklingError":
            raise _damaged(path, error) from error
        # Its own text says how to execute the file.
        raise DataError(
            f"{path}: is damaged, or holds more than tensors, which is never executed; save "
            "net.state_dict() with torch.save, or get the file anew"
        ) from error
    inner = read.get("state_dict") if isinstance(read, Mapping) else None
    return inner if isinstance(inner, Mapping) else read


def _tensors(read: Any, path: Path) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(read, Mapping) or not read:
        raise DataError(f"{path}: holds no tensors by name; save a state_dict")
    for name, value in read.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise DataError(f"{path}: {name!r} is a {kind} and no tensor; save a state_dict")
        yield name.removeprefix(_PREFIX), value


def _damaged(path: Path, error: Exception) -> DataError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(f"{path}: cannot be read as weights ({first}); get the file anew")


def torchvision_names(depth: int) -> list[str]:
    """torchvision's names of a ResNet's tensors without its classifier, in its order.

    Raises InputError for a depth that `ResNet` does not have.
    """
    if depth not in STAGES:
        raise InputError(f"depth={depth!r}; allowed: {', '.join(map(str, STAGES))}")
    blocks, _ = STAGES[depth]
    names = ["conv1.weight", *_norm("bn1")]
    for stage, count in enumerate(blocks, 1):
        for k in range(count):
            block = f"layer{stage}.{k}"
            for c in range(1, _CONVOLUTIONS[depth] + 1):
                names += [f"{block}.conv{c}.weight", *_norm(f"{block}.bn{c}")]
            # The first block of a stage changes the width or the size, but for ResNet-18's first.
            if k == 0 and (stage > 1 or depth == 50):
                names += [f"{block}.downsample.0.weight", *_norm(f"{block}.downsample.1")]
    return names


def _norm(place: str) -> list[str]:
    return [f"{place}.{name}" for name in _NORM]
