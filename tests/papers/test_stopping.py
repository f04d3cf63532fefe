"""Ctrl-C and SIGTERM while a table is made: rounds are finished and saved, no run begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.record.folder import CHECKPOINTS
from fedshift_papers.reproduce.reproduce import Request, reproduce
from support.federations import hears_ctrl_c
from support.small_runs import results

ROUNDS = 40
REQUEST = Request(
    "fedpals/table1",
    Path("unset"),
    datasets=("fashion-mnist-mini",),
    splits=("C=3",),
    methods=("fedavg",),
    seeds=(0, 1, 2),
    rounds=ROUNDS,
    overrides=("model.name=linear", "training.epochs=1"),
)


def rounds_told(folder: Path) -> list[int]:
    events = [json.loads(e) for e in (folder / "events.jsonl").read_text().splitlines()]
    return [e["round"] for e in events if e["event"] == "round"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of uninterrupted runs."""
    out = tmp_path_factory.mktemp("whole")
    reproduce(replace(REQUEST, out=out))
    return {p.name: results(p) for p in (out / "runs").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_table_that_was_asked_to_stop_goes_on(
    jobs: int, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    names: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            names.append(event["run"])

    request = replace(REQUEST, out=tmp_path, jobs=jobs)
    # Once each process trains, however much later than the other it begins.
    under_way = lambda: len(names) >= 5 and len(set(names)) == jobs  # noqa: E731
    first = reproduce(request, listen, lambda: 143 if under_way() else None)
    assert first.report.interrupted is not None
    assert first.report.interrupted.args == (143,)
    assert (first.report.trained, dict(first.report.failures)) == ((), {})
    begun = sorted((tmp_path / "runs").iterdir())
    assert len(begun) == jobs
    for folder in begun:
        checkpoints = [p.name for p in (folder / CHECKPOINTS / folder.name).iterdir()]
        assert checkpoints == [f"round-{rounds_told(folder)[-1]:08d}"]
        assert rounds_told(folder)[-1] < ROUNDS
        assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["error"] == (
            "interrupted"
        )
    names.clear()
    second = reproduce(request, listen)
    assert len(second.report.trained) == 3
    assert len(names) < 3 * ROUNDS
    assert {p.name: results(p) for p in (tmp_path / "runs").iterdir()} == whole


def test_asked_before_it_began_nothing_is_begun(tmp_path: Path) -> None:
    done = reproduce(replace(REQUEST, out=tmp_path), asked=lambda: 130)
    assert done.report.interrupted is not None
    assert list((tmp_path / "runs").iterdir()) == []
    assert done.page.is_file()


@pytest.mark.slow
def test_a_process_that_was_stopped_from_outside_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table was not asked to stop: the other runs go on."""
    monkeypatch.setattr("fedshift.sweeps.starting.work", stopped)
    done = reproduce(replace(REQUEST, out=tmp_path, jobs=2, seeds=(0,)))
    assert list(done.report.failures.values()) == ["stopped from outside (SIGTERM)"]
    assert done.report.interrupted is None


def stopped(run: Any, store: Any, channel: Any, means: Any) -> None:
    channel.send({"event": "over", "error": None, "stopped": True})


@pytest.mark.slow
def test_asked_while_the_table_is_written(whole: Any, tmp_path: Path) -> None:
    """The table is complete, and the exit code is that of the signal."""
    request = replace(REQUEST, out=tmp_path, seeds=(0,), rounds=1)
    reproduce(request)
    calls: list[int] = []
    done = reproduce(replace(request, train=False), asked=lambda: (calls.append(1), 143)[1])
    assert calls
    assert done.report.interrupted is not None
    assert done.page.is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "jobs", "group"),
    [(signal.SIGINT, 130, "1", False), (signal.SIGTERM, 143, "2", False),
     (signal.SIGINT, 130, "2", True)],
)  # fmt: skip
def test_the_command_finishes_its_rounds(
    number: int, code: int, jobs: str, group: bool, tmp_path: Path
) -> None:
    args = ["reproduce", "fedpals/table1", "--dataset", "fashion-mnist-mini", "--split", "C=3",
            "--methods", "fedavg", "--seeds", "0-1", "--rounds", "100000", "--jobs", jobs,
            "-c", "model.name=linear", "-c", "training.epochs=1", "--out", "o"]  # fmt: skip
    job = subprocess.Popen(
        [Path(sys.executable).with_name("fedshift"), *args],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c,
        start_new_session=True,
    )  # fmt: skip
    with job:
        begun: list[Path] = []
        while len(begun) < int(jobs) and job.poll() is None:
            time.sleep(0.05)
            logs = list(tmp_path.glob("o/runs/*/events.jsonl"))
            begun = [log.parent for log in logs if '"round"' in log.read_text()]
        # A terminal sends Ctrl-C to all processes.
        (os.killpg if group else os.kill)(job.pid, number)
        err = job.communicate(timeout=60)[1].decode().splitlines()
    assert job.returncode == code
    assert "stopping after this round; once more stops at once" in err
    assert err[-1] == "interrupted; the same command goes on from here"
    assert not [line for line in err if "failed" in line or "Traceback" in line]
    for folder in begun:
        last = f"round-{rounds_told(folder)[-1]:08d}"
        assert [p.name for p in (folder / CHECKPOINTS / folder.name).iterdir()] == [last]
