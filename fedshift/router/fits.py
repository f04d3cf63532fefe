"""The two ways to refit the client head, and how each chooses its strength."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedshift.errors import InputError
from fedshift.router.calibration import (
    TEMPERATURES,
    Calibration,
    Features,
    Fit,
    Part,
    before,
    choose,
    tempered,
)
from fedshift.router.head import ClientHead
from fedshift.router.moments import moments, pooled
from fedshift.router.refit import refit_locally

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
LOADINGS = (0.01, 0.1, 1.0)
LOADING = 0.01
# At this tolerance answers have long stopped changing; the search for a penalty needs no more.
ROUGH = 1e-4


@dataclass(frozen=True)
class Way:
    """A way to fit: quickly for a trial on some examples, exactly on all, and the grid to try."""

    rough: Fit
    exact: Fit
    strengths: Sequence[float]
    temperatures: Sequence[float]


def penalised(penalty: float | None, tolerance: float, rounds: int) -> Way:
    """`refit.refit` at one penalty, or at the one of least held-out loss."""
    if not 0.0 <= tolerance < math.inf or rounds < 1:
        raise InputError(
            f"tolerance={tolerance}, rounds={rounds}; give a finite tolerance of 0 or more, as "
            "1e-6, and 1 round or more"
        )

    def exact(h: Features, penalty: float, tolerance: float = tolerance) -> ClientHead:
        return refit_locally(h, penalty=penalty, tolerance=tolerance, rounds=rounds).head

    def rough(h: Features, penalty: float) -> ClientHead:
        return exact(h, penalty, max(tolerance, ROUGH))

    grid = (PENALTIES, TEMPERATURES) if penalty is None else ((penalty,), (1.0,))
    return Way(rough, exact, *grid)


def discriminant(loading: float | None) -> Way:
    """`Gaussians.head` at one loading, or at the one of least held-out loss."""

    def fit(h: Features, loading: float) -> ClientHead:
        return pooled([moments(features) for features in h], loading).head()

    grid = (LOADINGS, TEMPERATURES) if loading is None else ((loading,), (1.0,))
    return Way(fit, fit, *grid)


def fit_again(
    way: Way, features: Features, parts: Sequence[Part]
) -> tuple[ClientHead, Calibration | None]:
    """The head of all clients' features h [n, e] at what `parts` chose, and its held-out figures.

    Raises InputError where there is a choice to make and nothing was held out.
    """
    if not parts and len(way.strengths) > 1:
        raise InputError(
            "no client has two examples, so none can be held out to choose by; give fresh=, "
            f"inputs of each client, or a strength, as {way.strengths[0]:g}"
        )
    sizes = torch.tensor([float(len(h)) for h in features], dtype=torch.float64)
    if not parts:
        return way.exact(features, way.strengths[0]), None
    best = choose(way.rough, way.strengths, way.temperatures, parts)
    head = tempered(way.exact(features, best.strength), sizes, best.temperature)
    return head, Calibration(before(parts), best.figures, best.strength, best.temperature)
