"""README's picture: what the demo's clients have, what weight each gets, what the target gains.

Narrow, with large letters: it is read on a phone, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedshift.report.shapes import document, rect, text
from fedshift.report.svg import FAINT, PALETTE

WIDTH, LEFT, CELL, LINE = 420.0, 66.0, 19.0, 21.0
METHODS = {"fedavg": "FedAvg", "fedpals": "FedPALS", "oracle": "oracle"}
BLUE, ORANGE = PALETTE[1], PALETTE[2]


def demo_runs() -> dict[str, Any]:
    """summary.json of each run of `fedshift demo`."""
    with TemporaryDirectory() as place:
        command = [sys.executable, "-m", "fedshift", "demo", "--out", place, "--format", "json"]
        subprocess.run(command, check=True, capture_output=True)
        return {m: json.loads((Path(place) / m / "summary.json").read_text()) for m in METHODS}


def readme() -> str:
    """The drawing of a real run of the demo."""
    runs = demo_runs()
    grid, below = _grid(runs["fedavg"], runs["fedpals"])
    bars, height = _bars(runs, below + 24)
    title = "What nine clients and the target have, and each method's accuracy at the target"
    return document(title, WIDTH, height, [grid, bars])


def _grid(plain: dict[str, Any], aware: dict[str, Any]) -> tuple[str, float]:
    """A row per client and one of the target; the weights of both methods beside."""
    count = len(plain["classes"])
    ends = LEFT + CELL * count + 70, LEFT + CELL * count + 142
    parts = [text(LEFT, 18, f"{count} kinds of clothing", "start", 13)]
    for x, name in zip(ends, ("FedAvg", "FedPALS"), strict=True):
        parts.append(text(x, 18, name, "end", 13))
    weights = zip(plain["weights"], aware["weights"], strict=True)
    y = 26.0
    for i, (row, both) in enumerate(zip(plain["label_counts"], weights, strict=True)):
        parts.append(_row(y, f"client {i}", row, BLUE))
        for x, weight in zip(ends, both, strict=True):
            parts.append(text(x, y + 15, f"{weight:.0%}", "end", 13, bold=weight > 0.2))
        y += LINE
    parts.append(_row(y + 5, "target", plain["target"], ORANGE))
    parts.append(text(ends[1], y + 20, "weights", "end", 13))
    return "".join(parts), y + 5 + LINE


def _row(y: float, name: str, shares: list[float], colour: str) -> str:
    """A filled cell for each label that there is."""
    parts = [text(LEFT - 8, y + 15, name, "end", 13)]
    for j, share in enumerate(shares):
        fill = colour if share else FAINT
        parts.append(rect(LEFT + CELL * j, y + 1, CELL - 2, LINE - 3, fill))
    return "".join(parts)


def _bars(runs: dict[str, Any], y: float) -> tuple[str, float]:
    """The accuracies at the target, from 0 to 100 %."""
    parts = [text(LEFT, y, "accuracy at the target", "start", 13)]
    long = WIDTH - LEFT - 70
    for i, (method, name) in enumerate(METHODS.items()):
        accuracy = runs[method]["final"]["target_accuracy"]
        top = y + 8 + LINE * i
        parts.append(text(LEFT - 8, top + 15, name, "end", 13))
        parts.append(rect(LEFT, top + 1, long, LINE - 3, FAINT))
        parts.append(rect(LEFT, top + 1, long * accuracy, LINE - 3, PALETTE[i]))
        parts.append(text(WIDTH - 12, top + 15, f"{accuracy:.1%}", "end", 13, bold=True))
    return "".join(parts), y + 8 + LINE * len(METHODS) + 10
