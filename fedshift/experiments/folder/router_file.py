"""router.safetensors of a run folder: the refits of its router, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedshift.errors import DataError, InputError
from fedshift.router.calibration import Calibration, HeldOut
from fedshift.router.moments import Moments, pooled
from fedshift.router.route import Router
from fedshift.router.score import ClientHead
from fedshift.tree import Params, Parts, unflatten


def fits_of(routers: Mapping[str, Router]) -> Parts:
    """The parts of the file: of each fit its head, sizes, figures and moments."""
    return {name: _part(router) for name, router in routers.items()}


def _part(router: Router) -> Params:
    assert router.head is not None  # a refit has one
    part = {"gamma": router.head.gamma, "xi": router.head.xi, "sizes": router.sizes}
    if (figures := router.calibration) is not None:
        part |= {"chosen": _numbers(figures.strength, figures.temperature)}
        part |= {"after": _numbers(*figures.after)}
        part |= {} if figures.before is None else {"before": _numbers(*figures.before)}
    if (gaussians := router.gaussians) is not None:
        columns = zip(*gaussians.sent, strict=True)
        part |= {k: torch.stack(v) for k, v in zip(Moments._fields, columns, strict=True)}
        part |= {"loading": _numbers(gaussians.loading)}
    return part


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def with_fit(router: Router, path: Path, fit: str) -> Router:
    """The router with a refit of the file.

    Raises InputError for a fit that is not in it, and DataError for a file that is missing or
    damaged.
    """
    try:
        parts = unflatten({name: v.clone() for name, v in load_file(path).items()})
    except FileNotFoundError:
        raise DataError(f"{path}: missing: this run has no refit of its router") from None
    except (OSError, SafetensorError, ValueError, LookupError, RuntimeError) as e:
        raise DataError(f"{path}: cannot be read: {e}") from None
    if fit not in parts:
        raise InputError(f'{path}: no fit "{fit}"; there is {" and ".join(sorted(parts))}')
    try:
        return _with(router, parts[fit])
    except (LookupError, RuntimeError, ValueError, TypeError) as e:
        raise DataError(f"{path}: damaged ({type(e).__name__}: {e})") from None


def _with(router: Router, part: Params) -> Router:
    clients, sizes = len(router.sizes), part["sizes"]
    if part["gamma"].shape != (clients,) or sizes.shape != (clients,):
        raise ValueError(f"a head of {len(part['gamma'])} clients, and the run has {clients}")
    figures, gaussians = None, None
    if "after" in part:
        before = _figures(part["before"]) if "before" in part else None
        figures = Calibration(before, _figures(part["after"]), *part["chosen"].tolist())
    if "loading" in part:
        rows = zip(*(part[name] for name in Moments._fields), strict=True)
        gaussians = pooled([Moments(*row) for row in rows], float(part["loading"]))
    head = ClientHead(part["gamma"], part["xi"])
    return replace(router, head=head, sizes=sizes, calibration=figures, gaussians=gaussians)


def _figures(numbers: Tensor) -> HeldOut:
    examples, *others = numbers.tolist()
    return HeldOut(int(examples), *others)
