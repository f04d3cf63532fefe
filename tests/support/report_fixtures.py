"""A small complete run folder, and readers of the HTML and SVG of reports."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.record.folder import RunResult, read_run

HOSTILE = ('<script>alert("1")</script>', "a & b", "it's | _x_ \\ 100%", "naïve £ ☃")
CURVE = [("inf", 1.0, 0.6), (50.0, 0.5, 0.3), (0.0, 0.2, 0.125)]


def summary(classes: tuple[str, ...], counts: list[list[int]], method: str) -> dict[str, Any]:
    M, K, n = len(counts), len(classes), [sum(row) for row in counts]
    return {
        "fedshift": "0.0.9",
        "name": "trial",
        "method": method,
        "dataset": "toy",
        "classes": list(classes),
        "target": [1.0] + [0.0] * (K - 1),
        "label_counts": counts,
        "weights": [0.7] + [0.3 / (M - 1)] * (M - 1),
        "fedavg_weights": [v / sum(n) for v in n],
        "lam": 50.0,
        "ess": 123.0,
        "ess_fraction": 0.5,
        "distance": 0.3,
        "l1_distance": 0.3125,
        "hull_distance": 0.125,
        "certified": True,
        "curve": [{"lam": a, "ess_fraction": b, "distance": c, "l1": c} for a, b, c in CURVE],
        "final": {
            "round": 2,
            "target_accuracy": 0.8125,
            "target_loss": 0.5,
            "target_recall": [0.8125] + [None] * (K - 1),
            "recall_estimate": [0.75] * (K - 1) + [None],
            "estimated_accuracy": 0.75,
            "estimated_se": 0.0625,
            "client_accuracy": [0.9, *[0.6] * (M - 2), None],
        },
        "selection": {
            "rule": "estimate",
            "chosen": "50 %",
            "candidates": [candidate("λ=0", 0.2, 0.7, 0.84), candidate("50 %", 0.5, 0.75, 0.81)],
        },
        "why": ["FedAvg under-weights <b>owl</b>."],
    }


def candidate(label: str, ess: float, estimated: float, target: float) -> dict[str, Any]:
    return {
        "label": label,
        "ess_fraction": ess,
        "estimated_accuracy": estimated,
        "estimated_se": 0.01,
        "validation_accuracy": None,
        "target_accuracy": target,
    }


Edit = Callable[[dict[str, Any]], None]


def write_run(
    folder: Path,
    *,
    classes: tuple[str, ...] = ("cat", "dog", "owl"),
    clients: tuple[str, ...] = ("0", "1", "2", "3"),
    method: str = "FedPALS",
    edit: Edit | None = None,
    seed: int | None = None,
) -> Path:
    """A complete run folder; `edit` changes its summary before it is written.

    seed: written into its configuration; without one the run is of no line of several seeds.
    """
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 50, (len(clients), len(classes)))
    counts[:, 0] += 1
    data = summary(classes, counts.tolist(), method)
    if edit:
        edit(data)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(data))
    final = data["final"]["client_accuracy"]
    head = ["client", "n", "weight", "fedavg_weight", "accuracy", "n_validation"]
    rows: list[list[Any]] = [[*head, *(f"label_{c}" for c in classes)]]
    for i, name in enumerate(clients):
        w, f = data["weights"][i], data["fedavg_weights"][i]
        accuracy = "" if final[i] is None else final[i]
        rows.append([name, counts[i].sum(), w, f, accuracy, 20, *counts[i]])
    write_csv(folder / "clients.csv", rows)
    head = ["round", "train_loss", "target_accuracy", "target_loss", "estimated_accuracy"]
    head += ["estimated_se", "clients_trained", "ess", "seconds"]
    one = [1, 1.5, 0.4375, 1.25, "", "", 4, 123.0, 0.5]
    write_csv(
        folder / "metrics.csv", [head, one, [2, 0.5, 0.8125, 0.5, 0.75, 0.0625, 4, 123.0, 0.5]]
    )
    lock = {"format": 1, "packages": {"torch": "8.7.6"}, "threads": 2}
    (folder / "lock.json").write_text(json.dumps(lock))
    config = '[run]\nname = "<trial>"\n' if seed is None else configuration(method, seed)
    (folder / "config.resolved.toml").write_text(config)
    return folder


def configuration(method: str, seed: int) -> str:
    return (
        f'name = "trial"\n[data]\nname = "toy"\n[method]\nname = "{method}"\n'
        f"[training]\nlr = 0.1\n[seeds]\nrun = {seed}\n"
    )


def write_begun(folder: Path, rounds: int, *, of: int = 9, end: str = "", seed: int = 0) -> Path:
    """The folder of a run that is not complete, evaluated every second round; end: last line."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.resolved.toml").write_text(configuration("FedPALS", seed))
    events: list[dict[str, Any]] = [{"event": "start", "run": "trial", "rounds": of}]
    for t in range(1, rounds + 1):
        about = {"time": 1.0, "run": "trial", "round": t}
        events.append(
            {"event": "round", **about, "rounds": of, "train_loss": 2.0 / t, "clients": [0, 1],
             "seconds": 0.25}
        )  # fmt: skip
        if t % 2 == 0:
            numbers = {"train_loss": 2.0 / t, "target_accuracy": 0.5, "target_loss": None}
            events.append({"event": "evaluation", **about, **numbers})
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text + end)
    return folder


def write_csv(path: Path, rows: list[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def made(folder: Path, **options: Any) -> RunResult:
    return read_run(write_run(folder, **options))


class Outline(HTMLParser):
    """Fails on unbalanced tags; collects sections, table cells, attributes and visible text."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def row(self, *start: str) -> list[str]:
        return next(r for r in self.rows if r[: len(start)] == list(start))


def drawings(text: str) -> list[ET.Element]:
    """The drawings of a page at its full width; each is there again for a telephone."""
    text = re.sub(r'<div class="phone">.*?</div>', "", text, flags=re.S)
    return [ET.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", text, re.S)]
