"""The run folder: what one experiment leaves on disk. Each file appears whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedshift.errors import InputError
from fedshift.experiments.experiment import Experiment
from fedshift.experiments.load import dumps
from fedshift.experiments.summary import lock, summary
from fedshift.experiments.training import Metrics, Outcome
from fedshift.files import clean, write
from fedshift.tree import flatten


@contextmanager
def reserved(out: Path | None, name: str) -> Iterator[Path]:
    """A new folder for results: `out`, which must be empty, or runs/NAME, runs/NAME-2, ...

    If nothing was written when the work fails, the folder is removed; otherwise what is there is
    kept and the failure is the last event.
    """
    folder = _numbered(Path("runs"), name) if out is None else _empty(out)
    try:
        yield folder
    except BaseException as e:
        if not any(folder.iterdir()):
            folder.rmdir()
        elif (folder / EVENTS).exists():
            said = str(e) or type(e).__name__
            EventLog(folder)({"event": "failed", "error": said})
        raise


def _numbered(parent: Path, name: str) -> Path:
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise InputError(f"{folder}: cannot be created: {e.strerror}") from None
        return folder
    raise InputError(f"{parent / name}: ten thousand runs of this name exist; give --out")


def _empty(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: exists and is not an empty folder; give another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{path}: cannot be created: {e.strerror}") from None
    return path


EVENTS = "events.jsonl"


class EventLog:
    """events.jsonl: one line per event, with the time, flushed as it comes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), **clean(event)})
        with self.path.open("a", encoding="utf-8") as f:
            f.write(line + "\n")


def write_run(folder: Path, experiment: Experiment) -> None:
    """All files of a run but events.jsonl (written on the way) and report.html (drawn later)."""
    outcome = experiment.outcome
    write(folder / "config.resolved.toml", dumps(experiment.config))
    write(folder / "lock.json", _json(lock(experiment)))
    write(folder / "metrics.csv", metrics_csv(outcome.metrics))
    write(folder / "clients.csv", _clients_csv(experiment))
    tensors = {k: v.contiguous() for k, v in flatten(_model(outcome)).items()}
    write(folder / "model.safetensors", save(tensors))
    if experiment.choice is not None:
        (folder / "candidates").mkdir()
        for c in experiment.choice.candidates:
            name = c.label.replace("=", "-").replace("%", "")
            write(folder / "candidates" / f"{name}.csv", metrics_csv(c.outcome.metrics))
    # Last: a folder with a summary is complete.
    write(folder / "summary.json", _json(summary(experiment)))


def metrics_csv(metrics: Sequence[Metrics]) -> str:
    """One row per evaluated round; empty where a value does not exist."""
    names = [f.name for f in fields(Metrics)]
    return _csv([names, *([getattr(m, n) for n in names] for m in metrics)])


def _clients_csv(experiment: Experiment) -> str:
    task, outcome = experiment.prepared.task, experiment.outcome
    table = outcome.federation.table
    share = table["n"] / table["n"].sum()
    names = [f"label_{c}" for c in task.classes]
    header = ["client", "n", "weight", "fedavg_weight", "accuracy", "n_validation", *names]
    rows = [
        [i, int(table["n"][i]), outcome.weights[i], float(share[i]), s.accuracy, s.n]
        + [int(c) for c in table["labels"][i]]
        for i, s in enumerate(outcome.clients)
    ]
    return _csv([header, *rows])


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow(["" if isinstance(v, float) and math.isnan(v) else v for v in row])
    return out.getvalue()


def _model(outcome: Outcome) -> dict[str, dict[str, torch.Tensor]]:
    return {"params": outcome.params, "buffers": outcome.buffers}


def _json(value: Any) -> str:
    return json.dumps(clean(value), indent=1) + "\n"
