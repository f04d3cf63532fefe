"""Runs of a few seconds on the shipped data, and the contents of their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.run_folder import CHECKPOINTS, kept_in
from fedshift.experiments.task.preparing import prepare

ROUNDS = 6
CLIENTS = {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 4}
UNION = {"target": "union", "kind": "label-sets", "clients": 5, "samples": 80}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "fedpals, one of three": {"method": {"name": "fedpals", "ess": "auto"}},
    "ditto": {"shift": CLIENTS},
    "feddrm": {"shift": CLIENTS, "model": {"name": "mlp-projected", "hidden": [8]}},
    "feddisk": {
        "method": {"name": "feddisk", "density_rounds": 2, "hidden": [6], "estimator": "direct"}
    },
    "labelset_fedavg": {"shift": UNION},
}


def config_of(name: str, **more: Any) -> Any:
    """Six rounds over two thirds of small clients, measured every second round."""
    tables = {
        "name": "run",
        "data": {"name": "fashion-mnist-mini"},
        "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 6},
        "model": {"name": "linear"},
        "method": {"name": name.partition(",")[0]},
        "training": {"rounds": ROUNDS, "steps": 2, "cohort": 3, "evaluate_every": 2, "lr": 0.05},
    }
    return validate(tables | METHODS.get(name, {}) | more)


class Killed(BaseException):
    """An exception that nothing catches."""


def record_until(folder: Path, config: Any, at: int | None, every: int = 1) -> list[int]:
    """Record a run that dies when round `at` is reported; return the rounds that were played."""
    played: list[int] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            played.append(event["round"])
            if len(played) == at:
                raise Killed

    prepared = prepare(config)
    keeper = kept_in(folder, config, prepared, every)
    folder.mkdir(exist_ok=True)
    if at is None:
        record(folder, config, prepared, listen, keeper=keeper)
    else:
        with pytest.raises(Killed):
            record(folder, config, prepared, listen, keeper=keeper)
    return played


def results(folder: Path) -> dict[str, bytes]:
    """The files of a run's folder, without the times in its events."""
    assert not (folder / CHECKPOINTS).exists()
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "events.jsonl")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def recorded(folder: Path, config: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, the events of its rounds) of a run."""
    record_until(folder, config, None)
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return json.loads((folder / "summary.json").read_text()), [
        e for e in events if e["event"] == "round"
    ]


def text_of(method: str) -> str:
    """The experiment file of five rounds of three small clients."""
    options = {"ess": 0.9} if method == "fedpals" else {}
    # Private label sets: no client may score the whole model.
    unscored = {"validation": 0} if method.startswith("labelset") else {}
    config = validate({
        "name": "run", "data": {"name": "fashion-mnist-mini", **unscored},
        "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 3},
        "model": {"name": "linear"}, "method": {"name": method, **options},
        "training": {"rounds": 5, "steps": 2, "evaluate_every": 2, "lr": 0.05},
    })  # fmt: skip
    return dumps(config)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files that a run on machines has in common with one in a single process."""
    # corrected.csv counts validation examples, which stay at the clients there.
    odd = ("events.jsonl", "deployment.json", "corrected.csv")
    written = (p for p in folder.iterdir() if p.is_file() and p.name not in odd)
    return {p.name: p.read_bytes() for p in written}
