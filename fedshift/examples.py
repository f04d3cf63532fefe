"""Checks of examples: finite inputs, labels that are class numbers, valid importances."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError


def first_not_finite(x: Tensor) -> int | None:
    """The first row of x [n, ...] with NaN or infinity; None if all are finite.

    Integers are not read at all: images as bytes may be mapped from disk, and need not be loaded.
    """
    # One sum is several times faster than a test of each entry, and is finite only if all entries
    # are. If finite entries overflow it, the test below finds nothing.
    if not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.sum())):
        return None
    # Only now test each entry, since the mask is as large as x.
    bad = ~torch.isfinite(x.reshape(len(x), -1)).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def check_finite(x: Tensor, what: str, until: str) -> None:
    """Raise InputError, with the first such row, if x [n, ...] has NaN or infinity."""
    bad = first_not_finite(x)
    if bad is not None:
        raise InputError(
            f"{what}[{bad}] holds NaN or infinity; leave such examples out, or fill them in, "
            f"before {until}"
        )


def check_plain(v: object, name: str, client: int) -> None:
    """Raise InputError unless v is a dense tensor with numbers in it and of one shape."""
    if name == "y":
        check_numbered(v, f"client {client}")
    if not isinstance(v, Tensor):
        raise InputError(
            f"client {client}: {name} is a {type(v).__name__}; give torch.as_tensor({name})"
        )
    if v.is_nested or v.is_meta:
        odd = "nested" if v.is_nested else "on the device meta, and holds no numbers"
        raise InputError(f"client {client}: {name} is {odd}; give a tensor [n, ...] of one shape")
    if v.layout != torch.strided:
        raise InputError(f"client {client}: {name} is sparse; give {name}.to_dense()")


def check_numbered(y: object, whose: str) -> None:
    """Raise InputError for labels that are text, with how to number them: torch has no text."""
    if not isinstance(y, Tensor) and _has_text(y):
        raise InputError(
            f"{whose}: labels are text; number those of all clients together, names, numbers = "
            "numpy.unique(y, return_inverse=True), and give torch.as_tensor(numbers)"
        )


def _has_text(y: object) -> bool:
    entries = y.tolist() if hasattr(y, "tolist") else y
    return isinstance(entries, list | tuple) and any(isinstance(label, str) for label in entries)


def check_labels(y: Tensor, whose: str) -> None:
    """Raise InputError unless y [n] are whole numbers of at least 0, as int64 holds them."""
    if y.ndim != 1:
        raise InputError(f"{whose}: labels of shape {tuple(y.shape)}; give one per example")
    if y.is_floating_point() or y.is_complex():
        raise InputError(
            f"{whose}: labels are {y.dtype}; they are class numbers 0, 1, ...: "
            "give whole numbers, as y.long() makes them"
        )
    least = int(y.long().min()) if len(y) else 0  # long: torch has no `min` for unsigned integers
    if least < 0:
        # As int64 a large uint64 is negative: the message must name the label that was given.
        label = least + 2**64 if y.dtype == torch.uint64 else least
        raise InputError(f"{whose} has label {label}; labels are 0, 1, ..., K-1")


def check_importance(w: object, n: int, client: int) -> None:
    """Raise InputError unless w [n] are floating numbers, finite and of at least 0."""
    if not isinstance(w, Tensor) or w.is_complex() or w.shape != (n,):
        what = f"of shape {tuple(w.shape)}" if isinstance(w, Tensor) else f"a {type(w).__name__}"
        raise InputError(
            f"client {client}: w is {what}; give a tensor of one number per example, {n} of them"
        )
    if not w.is_floating_point():  # such as True and False, which count to 1
        raise InputError(f"client {client}: w is {w.dtype}; give floating numbers: w.float()")
    if bool((w == 1).all()):  # the usual case, without the temporaries of the checks below
        return
    odd = ~(torch.isfinite(w) & (w >= 0))
    if bool(odd.any()):
        row = int(odd.nonzero()[0])
        raise InputError(
            f"client {client}: w[{row}] is {w[row].item()}; importances are finite and 0 or more, "
            "and 0 leaves the example out"
        )
