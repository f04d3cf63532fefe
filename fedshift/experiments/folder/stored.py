"""model.safetensors of a run folder, read back as parts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedshift.engine.checks.replies import finite
from fedshift.errors import DataError
from fedshift.model import Model
from fedshift.tree import Params, Parts, flatten, unflatten


def read_parts(path: Path) -> Parts:
    """All parts in the file, "params" and "buffers" among them.

    Raises DataError for a file that is missing, damaged, or holds numbers that are not finite.
    """
    try:
        # safetensors checks that the header fits the file and is below 100 MB.
        # Copies, because kernels may round differently on unaligned memory of a mapped file.
        flat = {name: v.clone() for name, v in load_file(path).items()}
        parts = unflatten(flat, ("params", "buffers"))
    except FileNotFoundError:
        raise DataError(f"{path}: missing; train again") from None
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror or e}") from None
    except (SafetensorError, ValueError, LookupError, RuntimeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from None
    for name, v in flatten(parts).items():
        # Counters are int64; other whole numbers come from a damaged or foreign file.
        if not (v.dtype.is_floating_point or v.dtype.itemsize == 8) or not finite(_biases(name, v)):
            raise DataError(f'{path}: "{name}" holds numbers that no training leaves ({v.dtype})')
    return parts


def _biases(name: str, v: Tensor) -> Tensor:
    """A client's own numbers, but for minus infinity: the bias of a label that it rules out."""
    of_client = name.startswith("client") and v.is_floating_point()
    return v.masked_fill(v == -torch.inf, 0.0) if of_client else v


def misfit(trees: Iterable[Params], model: Model) -> str:
    """The first mismatch between these trees and the network, in words; empty if they match."""
    given = {k: tuple(v.shape) for tree in trees for k, v in tree.items()}
    expected = {k: tuple(v.shape) for tree in model.init() for k, v in tree.items()}
    odd = sorted(k for k in expected.keys() | given.keys() if given.get(k) != expected.get(k))
    if not odd:
        return ""
    there, here = given.get(odd[0], "missing"), expected.get(odd[0], "missing")
    return f'"{odd[0]}" is {there} and in the network of config.resolved.toml {here}'
