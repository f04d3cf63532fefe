"""`fedshift reproduce` for its users: exit codes, messages, JSON."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import TrainingError
from fedshift.experiments import experiment
from fedshift.fitting.many_bars import LiveRuns
from fedshift.sweeps import execute
from fedshift_papers.reproduce.catalogue import targets
from support.command_line import calling

FAST = ["--dataset", "fashion-mnist-mini", "--split", "C=3", "--rounds", "1",
        "-c", "model.name=linear"]  # fmt: skip


call = calling("reproduce")


@pytest.mark.slow
def test_a_run_does_not_go_on_through_a_link(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    args = ("fedpals/table1", *FAST, "--methods", "fedavg", "--seeds", "0", "--out", "r")
    assert call(*args)[0] == 0
    (run,) = (tmp_path / "r" / "runs").iterdir()
    (run / "summary.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    code, out, err = call(*args)
    assert code != 0
    assert "checkpoints: a link to another place" in " ".join((out + err).split())
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (run / "checkpoints").unlink()
    os.mkfifo(run / "checkpoints")
    code, out, err = call(*args)
    assert code != 0
    assert "checkpoints: neither a file nor a folder" in " ".join((out + err).split())
    (run / "checkpoints").unlink()
    assert call(*args)[0] == 0


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_others(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = experiment.run_experiment

    def fails(config: Any, **more: Any) -> Any:
        if config.method.name == "fedprox":
            raise TrainingError("client 3 sent\nnon-finite numbers")
        return real(config, **more)

    monkeypatch.setattr(experiment, "run_experiment", fails)
    args = ("fedpals/table1", *FAST, "--methods", "fedprox,fedavg", "--seeds", "0")
    code, out, err = call(*args, "--format", "json")
    answer = json.loads(out)
    assert code == 4
    assert re.search(r"failed: fashion-mnist-mini\S+: client 3 sent non-finite numbers\n", err)
    assert {c["row"]: c["note"] for c in answer["cells"]} == {
        "FedAvg": "not in the paper, 1 of 150 rounds, 1 of 8 seeds",
        "FedProx": "not in the paper, 1 of 150 rounds, 0 of 8 seeds, 1 failed",
    }
    events = next(Path("reproduced/runs").glob("*fedprox*")) / "events.jsonl"
    assert json.loads(events.read_text().splitlines()[-1])["event"] == "failed"
    monkeypatch.setattr(experiment, "run_experiment", real)
    code, out, _ = call(*args, "--format", "json")
    assert code == 0
    assert len(json.loads(out)["trained"]) == 1


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fedpals/tabel1"], 'unknown table or figure "fedpals/tabel1"; allowed: '
         f'{", ".join(sorted(targets()))}. Did you mean "fedpals/table1"?'),
        (["fedpals/fig9", "--methods", "fedpal"], 'unknown method of fedpals/fig9 "fedpal"; '
         'allowed: fedavg, fedpals. Did you mean "fedpals"?'),
        (["fedpals/table1", "--dataset", "cifar10"], 'unknown data set of fedpals/table1 "cifar10"'
         "; allowed: cifar-10, fashion-mnist, fashion-mnist-mini, pacs, pacs-96. Did you mean "
         '"cifar-10"?'),
        (["fedpals/table1", "--dataset", "cifar-10", "--split", "beta=.1"], "unknown split of "
         'fedpals/table1 "beta=.1"; allowed: C=2, C=3, beta=0.1. Did you mean "beta=0.1"?'),
        (["fedpals/table1", "--seeds", "0:7"],
         '--seeds "0:7": write numbers and ascending ranges of at most 1,000, as in 0-7'),
        (["fedpals/table1", "--rounds", "0"], "--rounds 0; give 1 or more"),
        (["fedpals/table1", "--jobs", "0"], "--jobs 0; give 1 or more"),
        (["fedpals/table1", "-c", "training.rounds=3"],
         "-c training.rounds: reproduce sets it itself; use --rounds"),
        (["fedpals/table1", "-c", "model.name=linaer"], "-c model.name = "
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


@pytest.mark.slow
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
    answer = json.loads(out)
    pacs = next(c for c in answer["cells"] if c["dataset"] == "pacs")
    assert '"pacs"' in pacs["note"]
    assert pacs["paper"] == {"mean": 73.4, "sd": 1.6}
    assert sorted(len(c["seeds"]) for c in answer["cells"]) == [0, 1, 1]
    code, _, err = call("fedpals/table3", "--methods", "fedavg")
    assert code == 3
    assert '"iwildcam"' in err
    assert "0.20 ± 0.01" in Path("reproduced/table3/table.md").read_text()


@pytest.mark.slow
def test_tables_are_listed(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = call()
    assert code == 0
    assert "fedpals/fig9: Two clients" in out
    assert {s["name"] for s in json.loads(call("--format", "json")[1])} == set(targets())


def test_interrupting_keeps_the_table_and_is_code_130(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run_experiment", stop)
    code, out, err = call("fedpals/table1", *FAST, "--methods", "fedavg", "--seeds", "0-1")
    assert code == 130
    assert err.endswith("interrupted; the same command goes on from here\n")
    assert "2 runs to do, 0 complete\n" in err
    assert "1 round\n" in err
    assert "0 runs trained now" in out
    assert "0 of 8 seeds" in Path("reproduced/table1/table.md").read_text()


@pytest.mark.slow
def test_terminating_is_code_143_as_for_other_commands(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Any, **more: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(config, **more)

    plain = experiment.run_experiment
    monkeypatch.setattr(experiment, "run_experiment", stop)
    args = ("fedpals/table1", *FAST, "--methods", "fedavg", "--seeds", "0-1", "--format", "json")
    code, out, err = call(*args)
    assert code == 143
    assert json.loads(err.splitlines()[-1]) == {
        "error": "interrupted; the same command goes on from here", "exit_code": 143,
    }  # fmt: skip
    # A run's last round is its end: the first is complete, and the second was not begun.
    assert len(json.loads(out)["trained"]) == 1


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveRuns() as live:
        live({"event": "queue", "runs": 2, "complete": 1})
        for name, error in (("one", None), ("two", "out of [memory]")):
            live({"event": "start", "run": name, "rounds": 3})
            live({"event": "round", "run": name, "round": 2})
            live({"event": "over", "run": name, "error": error, "seconds": 4.0})
    errors = capsys.readouterr().err
    assert "one: done (4 s)" in errors
    assert "two: failed: out of [memory] (4 s)" in errors
    assert "2/2" in errors


# --------------------------------------------------------------------------- before the first run


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that would be trained, each of which fails."""
    begun: list[str] = []

    def fails(run: Any, store: Any, tell: Any, asked: Any, means: Any) -> None:
        begun.append(run.name)
        raise TrainingError("not trained here")

    monkeypatch.setattr(execute, "perform", fails)
    return begun


def test_a_place_that_cannot_be_written_to_is_met_first(
    call: Callable[..., tuple[int, str, str]], untrained: list[str]
) -> None:
    Path("file").write_text("mine")
    args = ("fedpals/table1", *FAST, "--methods", "fedavg", "--seeds", "0")
    for place in (("--out", "file"), ("--out", "file/deep"), ("--publish", "file")):
        code, out, err = call(*args, *place)
        assert (code, out) == (2, "")
        assert err == (
            f"error: {place[1]}/table1: cannot be written to: Not a directory; give another place\n"
        )
    Path("table1").write_text("mine")
    assert call(*args, "--out", ".")[2] == ("error: table1: is not a folder; give another place\n")
    assert not untrained
    assert Path("file").read_text() == "mine"


@pytest.mark.slow
def test_options_that_some_run_cannot_take_are_met_first(
    call: Callable[..., tuple[int, str, str]], untrained: list[str]
) -> None:
    code, out, err = call("feddrm/small", "-c", "model.name=mlp", "--methods", "fedavg,feddrm")
    assert (code, out) == (2, "")
    assert err == (
        'error: feddrm: -c model.name "mlp" has no branch that tells clients apart, '
        "which this method trains; use one of lenet-gn, lenet-gn-small, resnet18-projected, "
        "mlp-projected\n"
    )
    code, _, err = call("feddrm/small", "-c", "model.name=linear", "--methods", "fedavg,fedrep")
    assert code == 2
    assert err.startswith('error: fedrep: -c model.name = "linear" has no body')
    # What only the network itself refuses.
    code, _, err = call("feddrm/small", "-c", "model.name=mlp-projected", "-c", "model.hidden=[]")
    assert code == 2
    assert err.startswith("error: fedavg, feddrm, fedavgft, fedbabu, ditto, fedrep, local_only: ")
    assert err.endswith("hidden must name one width or more, each at least 1, got []\n")
    err = call("feddrm/small", "-c", "data.limit=10001", "--methods", "ditto")[2]
    assert err == "error: ditto: -c data.limit = 10001, but fashion-mnist-mini has 10000 examples\n"
    assert not untrained
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_too_few_rounds_for_tuning_is_one_message(
    call: Callable[..., tuple[int, str, str]], untrained: list[str]
) -> None:
    code, out, err = call("feddrm/small", "--rounds", "1")
    assert (code, out) == (2, "")
    assert err == (
        "error: --rounds 1 is too few for fedavgft, fedbabu, whose last round at least is for "
        "tuning, after one together; give --rounds 2 or more, or leave these methods out with "
        "--methods\n"
    )
    assert not untrained
    code, _, err = call("feddrm/small", "--rounds", "1", "--methods", "fedavg", "--seeds", "0")
    assert code == 4
    assert len(untrained) == 1


@pytest.mark.slow
def test_shares_of_tuning_that_rounding_changes_are_noted(
    call: Callable[..., tuple[int, str, str]],
) -> None:
    args = ("--methods", "fedavgft", "--no-train", "--format", "json")

    def notes(rounds: str) -> dict[str, str]:
        code, out, _ = call("feddrm/small", "--rounds", rounds, *args)
        assert code == 0
        return {c["row"]: c["note"] for c in json.loads(out)["cells"]}

    three = notes("3")
    assert three["FedAvgFT, 12.5 % tuning, vote"] == (
        "3 of 80 rounds, 0 of 3 seeds, tune_rounds = 1 of 3: 33.3 % in place of 12.5 %, the same "
        'runs as "FedAvgFT, 50 % tuning, vote"'
    )
    assert "33.3 % in place of 50 %" in three["FedAvgFT, 50 % tuning, average accuracy"]
    assert notes("8")["FedAvgFT, 12.5 % tuning, vote"] == "8 of 80 rounds, 0 of 3 seeds"


@pytest.mark.slow
def test_tuning_without_a_grid_is_refused(
    call: Callable[..., tuple[int, str, str]], untrained: list[str]
) -> None:
    code, out, err = call("feddrm/small", "--tune")
    assert (code, out) == (2, "")
    assert err == (
        "error: --tune: feddrm/small has no grid of hyper-parameters to choose from. Leave out "
        "--tune\n"
    )
    err = call("fedpals/table1", "--tune", "--methods", "fedavg")[2]
    assert err.endswith("in these rows; of this target, only fedprox, afl, fedrs have one. Leave "
                        "out --tune\n")  # fmt: skip
    assert not untrained
    assert not list(Path().iterdir())
