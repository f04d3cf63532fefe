"""`fedshift compare` for its users: the table, exit codes, a sweep that was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.command_line import code_of
from support.federations import hears_ctrl_c
from support.small_runs import results, text_of

Call = Callable[..., tuple[int, str, str]]
TWO = ("compare", "f.toml", "--methods", "fedavg,fedprox", "-c", "method.mu=0.5")


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """`fedshift ARGS` in this process, in a folder with a file: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("f.toml").write_text(text_of("fedavg"))

    def run(*args: str) -> tuple[int, str, str]:
        code = code_of(monkeypatch, *args)
        return code, *capsys.readouterr()

    return run


def test_a_table_and_its_report(call: Call) -> None:
    code, out, err = call(*TWO, "--seeds", "0-2", "--jobs", "1")
    assert code == 0
    assert "Minus fedavg" in out
    assert "Seeds 0 to 2: first weights, cohorts and batches differ" in out
    assert "Report: runs/run-compare/compare.html" in out
    assert "6 runs to do, 0 complete" in err
    assert "[6/6] fedprox, seed 2: done" in err
    code, _, err = call(*TWO, "--seeds", "0-2")
    assert code == 2
    assert err == (
        "error: runs/run-compare: exists and is not an empty folder; go on with it by --resume, or "
        "give another --out\n"
    )
    code, out, err = call(
        *TWO, "--seeds", "0-3", "--resume", "--format", "json", "--base", "fedprox"
    )
    assert "2 runs to do, 6 complete" in err
    printed = json.loads(out)
    assert printed["base"] == "fedprox"
    assert [m["seeds"] for m in printed["methods"]] == [4, 4]
    assert len(printed["runs"]) == 8


@pytest.mark.slow
def test_what_is_refused_leaves_nothing(call: Call, tmp_path: Path) -> None:
    for args, why in [
        (
            ("--resume",),
            "runs/run-compare: no comparison is there to go on with; leave out --resume",
        ),
        (("--seeds", "0:2"), '--seeds "0:2": write numbers and ascending ranges'),
        (("--jobs", "0"), "jobs = 0; give 1 or more"),
        (("--workers", "2", "-c", "training.threads=2"), "training.threads = 2"),
        (("--backend", "stacked", "--workers", "2"), "--workers 2 is for the backends"),
        (("--base", "fedpals"), 'unknown method to compare with "fedpals"'),
        (("-c", "model.name=lenet", "-c", "model.branches=deep"), "branches is for"),
    ]:
        code, out, err = call(*TWO, *args)
        assert (code, out) == (2, ""), args
        assert why in err
        assert [p.name for p in tmp_path.iterdir()] == ["f.toml"]


def test_a_network_that_does_not_fit_a_method_is_met_first(call: Call, tmp_path: Path) -> None:
    code, _, err = call("compare", "f.toml", "--methods", "fedavg,fedrep")
    assert code == 2
    assert 'model.name = "linear" has no body, only a last layer, and method.name "fedrep"' in err
    assert [p.name for p in tmp_path.iterdir()] == ["f.toml"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            "fedavg,local_only",
            "local_only: this method leaves every client with a model of its own, and",
        ),
        ("fedavg,multikrum", "multikrum: 3 clients' changes are too few for method.byzantine = 1"),
        ("fedprox:mu=0.1", "give fedprox, and its options by -c, as in -c method.mu=0.1"),
        ("fedavg,fedpax", 'Did you mean "fedpac"?'),
    ],
)
def test_a_method_that_cannot_do_the_task_is_met_first(
    call: Call, methods: str, message: str
) -> None:
    """Control: without it the comparison runs."""
    code, _, err = call("compare", "f.toml", "--methods", methods, "--seeds", "0,1")
    assert code == 2
    assert message in err
    assert not Path("runs").exists()
    assert call("compare", "f.toml", "--methods", "fedavg", "--seeds", "0")[0] == 0


@pytest.mark.slow
def test_a_run_that_fails_is_a_line_and_the_others_go_on(call: Call) -> None:
    """Seeds that failed for one reason are named together; their curves are not needed."""
    Path("m.py").write_text(
        "from fedshift import recipes\n"
        "def odd(setting):\n"
        "    if setting.seed in (1, 2):\n"
        "        raise ValueError('no such seed')\n"
        "    return recipes.fedavg(setting)\n"
    )
    code, out, _ = call("compare", "f.toml", "--methods", "fedavg,m.py:odd", "--seeds", "0-2")
    assert code == 4
    assert "seeds 1 and 2 failed: method.name" in " ".join(out.replace("│", " ").split())
    rows = [line.split("│") for line in out.splitlines() if "│" in line]
    assert [[row[1].strip(), row[2].strip()] for row in rows if row[1].strip()] == [
        ["fedavg", "3"], ["odd", "1"]
    ]  # fmt: skip


@pytest.mark.slow
def test_training_that_diverges_has_its_exit_code(call: Call) -> None:
    code, out, _ = call("compare", "f.toml", "--seeds", "0", "-c", "training.lr=3e38,0.05")
    assert code == 4
    assert "lr=0.05" in out


SWEEP = (*TWO, "--seeds", "0,1", "--jobs", "2", "-c", "training.rounds=60")


def begin(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a sweep of two methods and two seeds in a process group of its own."""
    (folder / "f.toml").write_text(text_of("fedavg"))
    return subprocess.Popen(
        [Path(sys.executable).with_name("fedshift"), *SWEEP, *more], cwd=folder,
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=hears_ctrl_c,
        start_new_session=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of an uninterrupted sweep."""
    folder = tmp_path_factory.mktemp("whole")
    with begin(folder, "--out", "whole") as job:
        assert job.wait(120) == 0
    return runs(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_was_stopped_goes_on(
    number: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """The files equal those of an uninterrupted sweep; its processes end with it."""
    with begin(tmp_path, "--out", "o") as job:
        while not (logs := list(tmp_path.glob("o/runs/*/events.jsonl"))) and job.poll() is None:
            time.sleep(0.02)
        assert logs
        os.kill(job.pid, number)
        job.communicate(timeout=60)
    assert job.returncode == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 20
    while group_is_alive(job.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(list(tmp_path.glob("o/runs/*/summary.json"))) < 4
    with begin(tmp_path, "--out", "o", "--resume") as again:
        assert again.wait(120) == 0
    assert runs(tmp_path / "o") == whole


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def runs(folder: Path) -> dict[str, Any]:
    return {p.name: results(p) for p in (folder / "runs").iterdir()}
