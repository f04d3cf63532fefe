"""`fedshift reproduce` as a user meets it: exit codes, messages, JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli.app import main
from fedshift.cli.reproduce import LiveRuns
from fedshift.errors import TrainingError
from fedshift.experiments.reproduce import worker
from fedshift.experiments.reproduce.catalogue import studies

FAST = ["--dataset", "fashion-mnist-mini", "--split", "C=3", "--rounds", "1",
        "-c", "model.name=linear"]  # fmt: skip


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`fedshift reproduce ARGS` in this process, in an empty folder: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedshift", "reproduce", *args])
        code = 0
        try:
            main()
        except SystemExit as e:
            code = int(e.code or 0)
        return code, *capsys.readouterr()

    return run


def test_a_failed_run_does_not_stop_the_others(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = worker.run_experiment

    def fails(config: Any, **more: Any) -> Any:
        if config.method.name == "fedprox":
            raise TrainingError("client 3 sent\nnon-finite numbers")
        return real(config, **more)

    monkeypatch.setattr(worker, "run_experiment", fails)
    args = ("fedpals/table1", *FAST, "--methods", "fedprox,fedavg", "--seeds", "0")
    code, out, err = call(*args, "--format", "json")
    told = json.loads(out)
    assert code == 4
    assert re.search(r"failed: fashion-mnist-mini\S+: client 3 sent non-finite numbers\n", err)
    assert {c["row"]: c["note"] for c in told["cells"]} == {
        "FedAvg": "not in the paper, 1 of 150 rounds, 1 of 8 seeds",
        "FedProx": "not in the paper, 1 of 150 rounds, 0 of 8 seeds, 1 failed",
    }
    events = next(Path("reproduced/runs").glob("*fedprox*")) / "events.jsonl"
    assert json.loads(events.read_text().splitlines()[-1])["event"] == "failed"
    monkeypatch.setattr(worker, "run_experiment", real)
    code, out, _ = call(*args, "--format", "json")
    assert code == 0
    assert len(json.loads(out)["trained"]) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fedpals/tabel1"], 'unknown table or figure "fedpals/tabel1"; allowed: feddrm/fig3, '
         "feddrm/fig4, feddrm/fig5, feddrm/fig6, feddrm/fig7, feddrm/heart, feddrm/lenet, "
         "feddrm/small, feddrm/table1, feddrm/table2, feddrm/table3, feddrm/table4, fedpals/fig2, "
         "fedpals/fig5, fedpals/fig6, fedpals/fig7, fedpals/fig8, fedpals/fig9, fedpals/table1, "
         'fedpals/table2, fedpals/table3, fedpals/table4. Did you mean "fedpals/table1"?'),
        (["fedpals/fig9", "--methods", "fedpal"], 'unknown method of fedpals/fig9 "fedpal"; '
         'allowed: fedavg, fedpals. Did you mean "fedpals"?'),
        (["fedpals/table1", "--dataset", "cifar10"], 'unknown data set of fedpals/table1 "cifar10"'
         "; allowed: cifar-10, fashion-mnist, fashion-mnist-mini, pacs, pacs-96. Did you mean "
         '"cifar-10"?'),
        (["fedpals/table1", "--dataset", "cifar-10", "--split", "beta=.1"], "unknown split of "
         'fedpals/table1 "beta=.1"; allowed: C=2, C=3, beta=0.1. Did you mean "beta=0.1"?'),
        (["fedpals/table1", "--seeds", "0:7"],
         '--seeds "0:7": write numbers and ascending ranges, as in 0-7 or 0,2,5'),
        (["fedpals/table1", "--rounds", "0"], "--rounds 0; give 1 or more"),
        (["fedpals/table1", "--jobs", "0"], "--jobs 0; give 1 or more"),
        (["fedpals/table1", "-c", "training.rounds=3"],
         "-c training.rounds: reproduce sets it itself; use --rounds"),
        (["fedpals/table1", "-c", "model.name=linaer"], "-c model.name: model.name = "
         '"linaer": allowed are lenet, mlp, '),
    ],
    ids=lambda v: v[-1] if isinstance(v, list) else "",
)  # fmt: skip
def test_wrong_names_are_refused_before_anything(
    args: list[str], message: str, call: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert not list(Path().iterdir())


def test_missing_data_are_named_and_the_rest_is_done(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    args = ("--methods", "fedavg", "--seeds", "0", "--rounds", "1", "-c", "model.name=linear")
    code, out, err = call(
        "fedpals/table1", "--dataset", "fashion-mnist-mini", "--dataset", "pacs",
        "--format", "json", *args,
    )  # fmt: skip
    assert code == 3
    assert re.search(r'not run: .*data set "pacs"', err)
    told = json.loads(out)
    pacs = next(c for c in told["cells"] if c["dataset"] == "pacs")
    assert '"pacs"' in pacs["note"]
    assert pacs["paper"] == {"mean": 73.4, "sd": 1.6}
    assert sorted(len(c["seeds"]) for c in told["cells"]) == [0, 1, 1]
    code, _, err = call("fedpals/table3", "--methods", "fedavg")
    assert code == 3
    assert '"iwildcam"' in err
    assert "0.20 ± 0.01" in Path("reproduced/table3/table.md").read_text()


def test_tables_are_listed(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = call()
    assert code == 0
    assert "fedpals/fig9: Two clients" in out
    assert {s["name"] for s in json.loads(call("--format", "json")[1])} == set(studies())


def test_interrupting_keeps_the_table_and_is_code_130(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "run_experiment", stop)
    code, out, err = call("fedpals/table1", *FAST, "--methods", "fedavg", "--seeds", "0-1")
    assert code == 130
    assert err.endswith("interrupted; the same command goes on from here\n")
    assert "2 runs to do, 0 complete\n" in err
    assert "1 round\n" in err
    assert "0 runs trained now" in out
    assert "0 of 8 seeds" in Path("reproduced/table1/table.md").read_text()


def test_terminating_is_code_143_as_for_other_commands(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the signal arrives here

    monkeypatch.setattr(worker, "run_experiment", stop)
    args = ("fedpals/table1", *FAST, "--methods", "fedavg", "--seeds", "0", "--format", "json")
    code, out, err = call(*args)
    assert code == 143
    assert json.loads(err.splitlines()[-1]) == {
        "error": "interrupted; the same command goes on from here", "exit_code": 143,
    }  # fmt: skip
    assert json.loads(out)["trained"] == []


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveRuns() as live:
        live({"event": "queue", "runs": 2, "complete": 1})
        for name, error in (("one", None), ("two", "out of [memory]")):
            live({"event": "start", "run": name, "rounds": 3})
            live({"event": "round", "run": name, "round": 2})
            live({"event": "over", "run": name, "error": error, "seconds": 4.0})
    said = capsys.readouterr().err
    assert "one: done (4 s)" in said
    assert "two: failed: out of [memory] (4 s)" in said
    assert "2/2" in said
