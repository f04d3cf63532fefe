"""The progress of `fedshift reproduce`, in lines where there is no terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedshift.cli.many_runs import PlainRuns


@pytest.mark.parametrize(
    ("between", "output"),
    [
        (3600, "one: 9 rounds\none: goes on with round 5/9\n[1/2] one: done (4 s)\n"
               "two: 9 rounds\n[2/2] two: done (4 s)\n"),
        (-1, "one: 9 rounds\none: goes on with round 5/9\none: round 6/9\n[1/2] one: done (4 s)\n"
             "two: 9 rounds\ntwo: round 1/9\ntwo: round 2/9\n[2/2] two: done (4 s)\n"),
    ],
)  # fmt: skip
def test_progress_in_lines(
    between: float, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedshift.cli.many_runs.BETWEEN", between)
    with PlainRuns() as plain:
        plain({"event": "queue", "runs": 2, "complete": 1})
        for name, first in (("one", 5), ("two", 1)):
            plain({"event": "start", "run": name, "rounds": 9})
            plain({"event": "round", "run": name, "round": first})
            plain({"event": "round", "run": name, "round": first + 1})
            plain({"event": "over", "run": name, "error": None, "seconds": 4.0})
    assert capsys.readouterr().err == "2 runs to do, 1 complete\n" + output


def test_every_run_reports_progress_where_several_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of 31 seconds, a second apart."""
    now = iter([0.0, 1.0, 31.0, 32.0, 62.0, 63.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    plain = PlainRuns()
    for name in "ab":
        plain({"event": "start", "run": name, "rounds": 3})
    for t in (1, 2, 3):
        for name in "ab":
            plain({"event": "round", "run": name, "round": t})
    lines = capsys.readouterr().err.split("\n")
    assert lines[2:-1] == ["a: round 2/3", "b: round 2/3", "a: round 3/3", "b: round 3/3"]


TABLE1 = [
    "fedpals/table1", "--dataset", "fashion-mnist-mini", "--split", "C=3", "--rounds", "1",
    "-c", "model.name=linear", "--methods", "fedavg", "--seeds", "0",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("args", "code"), [(TABLE1, 0), (["fedpals/table3", "--no-train"], 3)])
def test_progress_without_a_reader(args: list[str], code: int, tmp_path: Path) -> None:
    """stderr has no reader any more: all else is as usual."""
    env = {**os.environ, "FEDSHIFT_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "fedshift", "reproduce", *args], cwd=tmp_path, env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stderr.close()
        output = process.stdout.read().decode()
        assert process.wait(120) == code
    assert "Page: reproduced/table" in output


LONG = ["data.name=fashion-mnist-mini", "model.name=linear", "training.rounds=60"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="opens a terminal of its own")
@pytest.mark.parametrize(
    ("args", "left"),
    [
        (["reproduce", *TABLE1, "--rounds", "60"], "reproduced/table1/table.md"),
        (["run", "f.toml", "--out", "o", *(f"-c{k}" for k in LONG)], "o/report.html"),
    ],
    ids=["reproduce", "run"],
)
def test_a_terminal_that_is_gone(args: list[str], left: str, tmp_path: Path) -> None:
    """It is closed when its first bars are drawn; the runs under way are finished."""
    (tmp_path / "f.toml").write_text("")
    env = {**os.environ, "FEDSHIFT_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fedshift", *args], cwd=tmp_path, env=env | {"TERM": "xterm"},
        stdout=subprocess.PIPE, stderr=theirs, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        seen = b""
        while b"\x1b[" not in seen:  # what moves bars
            seen += os.read(ours, 4096)
        os.close(ours)
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert (tmp_path / left).exists()
