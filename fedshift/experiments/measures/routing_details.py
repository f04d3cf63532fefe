"""Details of the last round for charts: accuracy per client and class, and routing confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.evaluation.serving import Served, by_client_and_class
from fedshift.router.quality import brier, calibration_error, pairwise_auc, risk_coverage
from fedshift.router.score import posterior

POINTS = 50


def details(served: Served, sizes: Tensor, classes: int) -> dict[str, Any]:
    """The details as one JSON object; sizes n [M], 0 for clients to which nothing is routed.

    client_accuracy [M]: every client's model on its own test examples, None without any
    class_accuracy  [M][K]: the same by class
    router          None, or how the router does on all test examples:
        sent          [M][M]: the share of client i's queries that are sent to client j
        auc           [M][M]: how well i's queries can be told from j's, 1/2 not at all; from
                      client logits, since neither sizes nor priors change it
        coverage, risk, aurc   errors among the share of queries with the largest posteriors
        ece, brier    calibration of the posterior
    """
    correct, total = by_client_and_class(served, classes)
    z = served.client_logits
    return {
        "client_accuracy": _shares(correct.sum(1)[None], total.sum(1)[None])[0],
        "class_accuracy": _shares(correct, total),
        "router": None if z is None else _router(served, z, posterior(z, sizes)),
    }


def _router(served: Served, z: Tensor, belief: Tensor) -> dict[str, Any]:
    confidence, chosen = belief.max(1)
    clients = belief.shape[1]
    # A number for each pair (origin, chosen): one bincount counts all pairs.
    pairs = torch.bincount(served.origin * clients + chosen, minlength=clients * clients)
    queries = pairs.reshape(clients, clients)
    curve = risk_coverage(confidence, served.routed(chosen) != served.y)
    # The curve has a point for each query; POINTS of them are enough for a drawing.
    at = np.unique(np.linspace(0, len(curve.coverage) - 1, POINTS).round().astype(int))
    return {
        "sent": _shares(queries, queries.sum(1, keepdim=True).expand_as(queries)),
        "auc": pairwise_auc(z, served.origin).tolist(),
        "coverage": curve.coverage[at].tolist(),
        "risk": curve.risk[at].tolist(),
        "aurc": curve.area,
        "ece": calibration_error(belief, served.origin),
        "brier": brier(belief, served.origin),
    }


def _shares(part: Tensor, whole: Tensor) -> list[list[float | None]]:
    rows = zip(part.tolist(), whole.tolist(), strict=True)
    return [[p / w if w else None for p, w in zip(*row, strict=True)] for row in rows]
