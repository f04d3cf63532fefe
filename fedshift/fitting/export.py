"""Writing a trained network for other programs: as weights, TorchScript or ONNX."""

from __future__ import annotations

import importlib.util
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.errors import InputError
from fedshift.files import write

SUFFIXES = (".pt", ".ts", ".onnx")


class Logits(nn.Module):
    """A network's logits, without the other outputs that it may have."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *x: Tensor) -> Tensor:
        """The logits [n, K]."""
        out: Any = self.net(*x)
        logits: Tensor = out["logits"] if isinstance(out, dict) else out
        return logits


def export(net: nn.Module, example: Any, path: Path) -> Path:
    """Write the network, in evaluation mode, in the format that the path's ending names.

    .pt    its state_dict, for `torch.load` and `load_state_dict`
    .ts    TorchScript, traced on `example`, for `torch.jit.load`
    .onnx  ONNX for any number of rows; needs `pip install "fedshift[onnx]"`

    Raises InputError for another ending, and for a network that this format cannot express.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path}: give a name that ends in {', '.join(SUFFIXES)}")
    given = example if isinstance(example, tuple) else (example,)
    file = io.BytesIO()  # in memory, so that a failure leaves no partial file
    if path.suffix == ".pt":
        torch.save(net.state_dict(), file)
    elif path.suffix == ".ts":
        script: Any = torch.jit
        script.save(_tried(path, lambda: script.trace(Logits(net), given)), file)
    else:
        _write_onnx(net, given, file, path)
    write(path, file.getvalue())
    return path


def _write_onnx(net: nn.Module, given: tuple[Any, ...], file: io.BytesIO, path: Path) -> None:
    if importlib.util.find_spec("onnx") is None:
        raise InputError(f'{path}: needs onnx; pip install "fedshift[onnx]"')
    names = [f"x{i}" if i else "x" for i in range(len(given))]
    rows = {name: {0: "rows"} for name in [*names, "logits"]}
    writer: Any = torch.onnx.export  # which takes a file, too
    _tried(
        path,
        lambda: writer(
            Logits(net), given, file, input_names=names, output_names=["logits"],
            dynamic_axes=rows, dynamo=False,
        ),
    )  # fmt: skip


def _tried(path: Path, work: Any) -> Any:
    """The exporter's result. Exporters raise many types; all mean that the network does not fit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as e:
        first = str(e).strip().split("\n")[0]
        raise InputError(
            f"{path}: this network cannot be written so: {first}; export a .pt and load it into "
            "the network's class"
        ) from e
