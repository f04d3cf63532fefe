"""The page of a huge run with hostile names is drawn in seconds and has some megabytes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fedshift.record.folder import read_any
from fedshift.report.page import page
from support.report_fixtures import HOSTILE, Outline, write_csv, write_run

SECONDS, BYTES = 10.0, 5_000_000
COLUMNS = (
    "round", "train_loss", "target_accuracy", "target_loss", "target_macro_f1",
    "estimated_accuracy", "estimated_se", "validation_accuracy", "validation_loss",
    "source_accuracy", "clients_trained", "ess", "ess_fraction", "gap",
)  # fmt: skip


def huge(folder: Path, rounds: int, clients: int, classes: int) -> Path:
    """A run of many rounds and clients, whose names are markup, long, or move the cursor."""
    odd = [f"{HOSTILE[i % 4]} {i} {'x' * 300}"[:300] for i in range(clients)]
    names = tuple(f"\x1b[31m{i}\u202e" if i % 3 == 0 else name for i, name in enumerate(odd))
    labels = tuple(f"<b>class {i}</b>" + "y" * 280 * (i % 2) for i in range(classes))
    method = "<script>alert(1)</script>" + "m" * 270
    write_run(folder, classes=labels, clients=names, seed=0, method=method)
    rows = [[t, *(1 / (t + k) for k in range(1, len(COLUMNS)))] for t in range(1, rounds + 1)]
    write_csv(folder / "metrics.csv", [list(COLUMNS), *rows])
    one = {"time": 1.0, "event": "round", "run": "trial", "rounds": rounds, "train_loss": 1.0}
    one |= {"clients": list(range(clients)), "seconds": 0.5}
    with (folder / "events.jsonl").open("w") as f:
        f.writelines(json.dumps(one | {"round": t}) + "\n" for t in range(1, rounds + 1))
    return folder


def checked(text: str) -> Outline:
    """The outline of a page, checked for markup from names."""
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    return Outline(text)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [10, 200])
def test_a_huge_run_is_drawn(tmp_path: Path, classes: int) -> None:
    folder = huge(tmp_path / "a", 10_000, 1_000, classes)
    # Of this process alone: other work on the machine is not the page's.
    start = time.process_time()
    text = page([read_any(folder)])
    assert time.process_time() - start < SECONDS
    assert len(text.encode()) < BYTES
    checked(text)


@pytest.mark.slow
def test_long_tables_are_cut_and_say_so(tmp_path: Path) -> None:
    """Control: a short run has all of its rounds, and no such words."""
    outline = checked(page([read_any(huge(tmp_path / "a", 3_000, 250, 90))]))
    words = "".join(outline.text)
    assert "every 3. row and the last one; all 3000 are in metrics.csv" in words
    assert "the 70 clients with the largest weights; all 250 are in clients.csv" in words
    rounds = [row[0] for row in outline.rows if len(row) == len(COLUMNS)][1:]
    assert (rounds[0], rounds[1], rounds[-1]) == ("1", "4", "3000")
    short = "".join(Outline(page([read_any(write_run(tmp_path / "b"))])).text)
    assert "and the last one; all" not in short
    assert "with the largest weights; all" not in short
