"""Federated learning under distribution shift.

The names below are the library's front door; everything else is imported from its module. Names
are loaded on first use, so that `fedshift diagnose` starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fedshift.errors import DataError, FedshiftError, InputError, NetworkError, TrainingError

if TYPE_CHECKING:
    from fedshift.algorithms.fedavg import FedAvg
    from fedshift.client.local import Local
    from fedshift.engine.run import Federation, run
    from fedshift.estimate import AccuracyEstimate, estimate_target_accuracy
    from fedshift.fitting.compare import compare
    from fedshift.fitting.fit import fit, load
    from fedshift.fitting.loggers import MLflow, TensorBoard, WandB
    from fedshift.fitting.methods import method
    from fedshift.fitting.result import Result
    from fedshift.model import Model
    from fedshift.router.route import Router
    from fedshift.server.pals import PalsWeights, ess_curve, pals_weights
    from fedshift.server.prior import Correction, prior_shift
    from fedshift.sweeps.table import Table
    from fedshift.tasks.task import Task

_LAZY = {
    "AccuracyEstimate": "fedshift.estimate",
    "Correction": "fedshift.server.prior",
    "PalsWeights": "fedshift.server.pals",
    "ess_curve": "fedshift.server.pals",
    "estimate_target_accuracy": "fedshift.estimate",
    "pals_weights": "fedshift.server.pals",
    "prior_shift": "fedshift.server.prior",
    "FedAvg": "fedshift.algorithms.fedavg",
    "Federation": "fedshift.engine.run",
    "Local": "fedshift.client.local",
    "Model": "fedshift.model",
    "Router": "fedshift.router.route",
    "Task": "fedshift.tasks.task",
    "MLflow": "fedshift.fitting.loggers",
    "Result": "fedshift.fitting.result",
    "TensorBoard": "fedshift.fitting.loggers",
    "WandB": "fedshift.fitting.loggers",
    "Table": "fedshift.sweeps.table",
    "compare": "fedshift.fitting.compare",
    "fit": "fedshift.fitting.fit",
    "load": "fedshift.fitting.fit",
    "method": "fedshift.fitting.methods",
    "run": "fedshift.engine.run",
}

__version__ = "0.1.0"
__all__ = [
    "AccuracyEstimate",
    "Correction",
    "DataError",
    "FedAvg",
    "Federation",
    "FedshiftError",
    "InputError",
    "Local",
    "MLflow",
    "Model",
    "NetworkError",
    "PalsWeights",
    "Result",
    "Router",
    "Table",
    "Task",
    "TensorBoard",
    "TrainingError",
    "WandB",
    "compare",
    "ess_curve",
    "estimate_target_accuracy",
    "fit",
    "load",
    "method",
    "pals_weights",
    "prior_shift",
    "run",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fedshift' has no attribute {name!r}")


def __dir__() -> list[str]:
    helpers = {"TYPE_CHECKING", "annotations", "import_module"}
    return sorted({*__all__, *globals()} - helpers)
