"""Randomly damaged files: some seconds of the benchmark, and a control that it detects faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedshift.errors import DataError
from fedshift.files import read_object
from support.damage import Reader, fuzz_file

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_seconds_of_damaged_files() -> None:
    """Files of every reader, for ten seconds; `benchmarks/decoders.py` goes on for ten minutes."""
    pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "decoders.py", "--seconds", "10", "--seed", "1000"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[:3000] + done.stderr[-2000:]
    assert "Broken, nothing" in done.stdout


def test_readers_that_are_not(tmp_path: Path) -> None:
    """One that leaks errors, one that names no file, one that is slow: all are reported."""
    path = tmp_path / "lock.json"
    path.write_text('{"a": 1}')

    def mute() -> None:
        try:
            read_object(path)
        except DataError:
            raise DataError("something is wrong") from None

    raw = fuzz_file(Reader("raw", path, lambda: json.loads(path.read_bytes())), 50, seed=0)
    assert any("JSONDecodeError" in one for one in raw.broken)
    assert any("unclear" in one for one in fuzz_file(Reader("mute", path, mute), 50, 0).broken)
    slow = fuzz_file(Reader("slow", path, lambda: None, most=-1.0), 3, seed=0)
    assert [one.partition(": ")[2][:4] for one in slow.broken] == ["took"] * 3
