"""README's picture: what the demo's clients have, what weight each gets, what the target gains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plain_bars import EMPTY, LEFT, LINE, SIZE, WIDTH, Bar, bars

from fedshift.report.looks import look_of
from fedshift.report.shapes import document, rect, text

CELL = 19.0
METHODS = {"fedavg": "FedAvg", "fedpals": "FedPALS", "oracle": "oracle"}


def demo_runs() -> dict[str, Any]:
    """summary.json of each run of `fedshift demo`."""
    with TemporaryDirectory() as place:
        command = [sys.executable, "-m", "fedshift", "demo", "--out", place, "--format", "json"]
        subprocess.run(command, check=True, capture_output=True)
        return {m: json.loads((Path(place) / m / "summary.json").read_text()) for m in METHODS}


def readme() -> str:
    """The drawing of a real run of the demo."""
    return drawing(demo_runs())


def drawing(runs: dict[str, Any]) -> str:
    """The drawing of these runs, by method what their summary.json says."""
    accuracies = {m: runs[m]["final"]["target_accuracy"] for m in METHODS}
    rows = [Bar(METHODS[m], a, f"{a:.1%}", look_of(m).ink) for m, a in accuracies.items()]
    grid, below = _grid(runs["fedavg"], runs["fedpals"])
    drawn, height = bars("accuracy at the target", rows, below + 24)
    title = "What nine clients and the target have, and each method's accuracy at the target"
    return document(title, WIDTH, height, [grid, drawn])


def _grid(plain: dict[str, Any], aware: dict[str, Any]) -> tuple[str, float]:
    """A row per client and one of the target; the weights of both methods beside."""
    count = len(plain["classes"])
    ends = LEFT + CELL * count + 70, LEFT + CELL * count + 142
    parts = [text(LEFT, 18, f"{count} kinds of clothing", "start", SIZE)]
    for x, name in zip(ends, ("FedAvg", "FedPALS"), strict=True):
        parts.append(text(x, 18, name, "end", SIZE))
    weights = zip(plain["weights"], aware["weights"], strict=True)
    y = 26.0
    for i, (row, both) in enumerate(zip(plain["label_counts"], weights, strict=True)):
        parts.append(_row(y, f"client {i}", row, "var(--heat)"))
        for x, weight in zip(ends, both, strict=True):
            parts.append(text(x, y + 15, f"{weight:.0%}", "end", SIZE, bold=weight > 0.2))
        y += LINE
    parts.append(_row(y + 5, "target", plain["target"], look_of("oracle").ink))
    parts.append(text(ends[1], y + 20, "weights", "end", SIZE))
    return "".join(parts), y + 5 + LINE


def _row(y: float, name: str, shares: list[float], colour: str) -> str:
    """A filled cell for each label that there is."""
    parts = [text(LEFT - 8, y + 15, name, "end", SIZE)]
    for j, share in enumerate(shares):
        fill = colour if share else EMPTY
        parts.append(rect(LEFT + CELL * j, y + 1, CELL - 2, LINE - 3, fill))
    return "".join(parts)
