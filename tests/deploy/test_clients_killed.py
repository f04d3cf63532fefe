"""Sixteen rounds of a federation whose clients are killed; one joins late. Minutes, so slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from support.loopback import environ, gone

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "flower_drops.py"


def test_the_model_is_that_of_one_process_with_the_same_drop_outs(tmp_path: Path) -> None:
    """SuperNodes are killed after rounds 5, 10 and 15; every deploy client joins again by itself.

    A hundred rounds of ten clients: `results/flower_drops.md`.
    """
    given = ["--clients", "3", "--rounds", "16", "--every", "5", "--late"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *given, "--folder", str(tmp_path)],
        capture_output=True, text=True, env=environ(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits in every tensor" in done.stdout
    # On a slow machine a client may not be back for the next kill.
    assert 1 <= len(json.loads((tmp_path / "kills.json").read_text())) <= 3
    lines = (tmp_path / "fed" / "run" / "events.jsonl").read_text().splitlines()
    rounds = [e for line in lines if (e := json.loads(line))["event"] == "round"]
    late = [e["round"] for e in rounds if any(d["client"] == 2 for d in e.get("dropped", []))]
    assert late[0] == 1
    assert 2 in rounds[-1]["clients"]
    assert gone(str(tmp_path))
