"""A small experiment with private label sets and central tuning."""

from __future__ import annotations

from typing import Any


def tables(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "data": {"name": "fashion-mnist-mini", "validation": 0.0},
        "shift": {
            "kind": "label-sets", "clients": 6, "labels_per_client": 4, "samples": 80,
            "target": "union",
        },
        "server": {"unlabeled": 100, "validation": 50},
        "model": {"name": "mlp", "hidden": (8,)},
        "method": {"name": "labelset_fedavg", "tune": "mse", "tune_steps": 2},
        "training": {"rounds": 2, "batch": 16, "evaluate_every": 1},
    }  # fmt: skip
    return {k: v | changes.get(k, {}) for k, v in base.items()}
