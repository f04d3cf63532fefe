"""Stopped or killed runs go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli.console import PlainProgress
from fedshift.cli.running import Asked, run_asked
from fedshift.cli.stopping import asked_to_stop
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.engine.traffic import Traffic
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.engines import InProcess, processes
from fedshift.experiments.experiment import record, run_experiment
from fedshift.experiments.folder.progress import Missed, Progress, progress_of
from fedshift.experiments.folder.run_folder import kept_in
from fedshift.experiments.resume import configured, reopened
from fedshift.experiments.task.preparing import prepare
from fedshift.record.folder import CHECKPOINTS
from fedshift.record.rounds import Metrics
from fedshift.record.summary import SetRound
from support.broken_inputs import GOOD
from support.federations import hears_ctrl_c
from support.small_runs import (
    METHODS,
    ROUNDS,
    config_of,
    record_until,
    results,
)

SCRIPT = Path(sys.executable).with_name("fedshift")
ENV = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"OMP_NUM_THREADS": "1"}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_killed_in_any_round_and_resumed(name: str, tmp_path: Path) -> None:
    """Killed twice: the files equal those of an uninterrupted run, and one round is repeated."""
    config = config_of(name)
    whole = record_until(tmp_path / "whole", config, None)
    first = record_until(tmp_path / "cut", config, 2)
    second = record_until(tmp_path / "cut", config, len(whole) - 3)
    third = record_until(tmp_path / "cut", config, None)
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    assert len(first + second + third) == len(whole) + 2
    other = config_of(name, seeds={"run": 1})
    record_until(tmp_path / "other", other, None)
    assert results(tmp_path / "other")["metrics.csv"] != results(tmp_path / "whole")["metrics.csv"]


@pytest.mark.slow
def test_killed_after_the_last_round(tmp_path: Path) -> None:
    """Nothing is trained again; the last evaluation is repeated."""
    config = config_of("fedavg")
    record_until(tmp_path / "whole", config, None)
    folder, prepared = tmp_path / "cut", prepare(config)
    keeper = kept_in(folder, config, prepared, 1)
    folder.mkdir()
    train_all = run_experiment(config, prepared=prepared, keeper=keeper)
    assert (folder / CHECKPOINTS).exists()
    assert record_until(folder, config, None) == []
    assert results(folder) == results(tmp_path / "whole")
    assert train_all.outcome.final.round == ROUNDS


@pytest.mark.slow
def test_rounds_between_checkpoints_are_played_again(tmp_path: Path) -> None:
    config = config_of("fedavg")
    assert record_until(tmp_path / "cut", config, 6, every=4) == [1, 2, 3, 4, 5, 6]
    assert record_until(tmp_path / "cut", config, None, every=4) == [5, 6]


def test_another_configurations_checkpoints_are_refused(tmp_path: Path) -> None:
    record_until(tmp_path / "cut", config_of("fedavg"), 3)
    other = config_of("fedavg", seeds={"run": 1})
    with pytest.raises(DataError, match="checkpoints of another configuration, or of other data"):
        record(
            tmp_path / "cut", other, prepare(other), lambda event: None,
            keeper=kept_in(tmp_path / "cut", other, prepare(other)),
        )  # fmt: skip


@pytest.mark.slow
def test_measurements_of_another_version_are_refused(tmp_path: Path) -> None:
    """The checksums are right, but its columns are not this version's."""
    config = config_of("fedavg")
    record_until(tmp_path / "cut", config, 3)
    keeper = kept_in(tmp_path / "cut", config, prepare(config))
    saved = read_checkpoint(tmp_path / "cut" / CHECKPOINTS / "run")
    assert saved is not None
    facts = saved.facts | {"metrics": [{"round": 2, "accuracy": 0.5}]}
    write_checkpoint(tmp_path / "cut" / CHECKPOINTS / "run", saved.round._replace(t=4), facts)
    with pytest.raises(DataError, match="checkpoints: measured by another version of fedshift"):
        keeper.progress("run")


def test_a_run_goes_on_without_a_reader_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr has no reader: neither progress lines nor a signal's message end the run."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as gone, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", gone)
        with pytest.raises(BrokenPipeError):  # the control
            os.write(writes, b"x")
        tell = PlainProgress()
        for name in ("one", "two"):
            tell({"event": "start", "run": name, "rounds": 3})

    def deaf(handle: int, data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("os.write", deaf)
    with asked_to_stop() as stop:
        assert stop() is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() == 143
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_facts_come_back() -> None:
    nan, inf = float("nan"), float("inf")
    metrics = Metrics(
        round=1, train_loss=0.1, target_accuracy=0.2, target_loss=inf, target_macro_f1=0.3,
        estimated_accuracy=0.4, estimated_se=nan, validation_accuracy=nan, validation_loss=nan,
        source_accuracy=0.1 + 0.2, clients_trained=3, ess=17.0,
    )  # fmt: skip
    sets, missed = [SetRound(1, 2, None, 0.5)], Missed(4, 5, 2, 1)
    done = Progress(None, [metrics], [], sets, Traffic(1, 2, 3), missed)
    facts = json.loads(json.dumps(done.facts(), allow_nan=False))
    again = progress_of(None, facts)  # type: ignore[arg-type]
    assert repr(again) == repr(done)
    assert again.metrics[0].source_accuracy == 0.1 + 0.2


def start_run(folder: Path, *options: str, wait_for: str = CHECKPOINTS) -> subprocess.Popen[bytes]:
    """Start `fedshift run` with a checkpoint each round, and wait until it has begun."""
    (folder / "f.toml").write_text(GOOD)
    args = ["run", "f.toml", "--out", "o", "--checkpoint-every", "1", *options]
    job = subprocess.Popen(
        [SCRIPT, *args], cwd=folder, env=ENV, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c
    )
    for _ in range(6000):
        if (folder / "o" / wait_for).exists() or job.poll() is not None:
            break
        time.sleep(0.02)
    return job


LONG = ("-c", "training.rounds=100000", "-c", "model.name=linear")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_round(number: int, code: int, tmp_path: Path) -> None:
    with start_run(tmp_path, *LONG) as job:
        job.send_signal(number)
        err = job.communicate(timeout=60)[1].decode().splitlines()
    assert job.returncode == code
    assert "stopping after this round; once more stops at once" in err
    assert err[-1] == "interrupted; `fedshift run --resume o` goes on from here"
    events = [json.loads(e) for e in (tmp_path / "o" / "events.jsonl").read_text().splitlines()]
    t = max(e["round"] for e in events if e["event"] == "round")
    assert (tmp_path / "o" / CHECKPOINTS / "good" / f"round-{t:08d}").is_dir()
    assert (events[-1]["event"], events[-1]["error"]) == ("failed", "interrupted")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_kill_9_at_random_points(tmp_path: Path) -> None:
    """Twenty points of the benchmark: in rounds, at steps of checkpoints, in worker processes."""
    script = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    done = subprocess.run(
        [sys.executable, script, "--points", "20", "--seed", "7", "--folder", tmp_path],
        env=ENV, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Which points come before a run's end depends on the machine's speed, and so do the sums.
    sums = re.search(r"^\| all \|((?: \d+ \|){4}) 20 of 20 \|", done.stdout, re.MULTILINE)
    assert sums, done.stdout[-3000:]
    kinds = [int(n) for n in sums[1].strip(" |").split(" | ")]
    assert sum(kinds) == 20
    assert min(kinds) >= 1, "a kind of point was not hit at all"


def test_what_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"o: not a run folder \(no config.resolved.toml\)"):
        configured(tmp_path / "o")
    config = config_of("fedavg")
    record_until(tmp_path / "o", config, None)
    (tmp_path / "o" / CHECKPOINTS / "run").mkdir(parents=True)  # killed at its very end
    with pytest.raises(InputError, match="this run is complete; `fedshift report .*o` draws it"):
        configured(tmp_path / "o")
    assert not (tmp_path / "o" / CHECKPOINTS).exists()
    (tmp_path / "o" / "summary.json").unlink()
    assert (
        configured(tmp_path / "o") == config == load_config(tmp_path / "o" / "config.resolved.toml")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lock: lock | {"data_sha256": "0"}, "the data are not those with which the run"),
        (lambda lock: lock | {"split_sha256": "0"}, "the clients' examples are not those"),
        (
            lambda lock: lock | {"format": 2},
            '"format" is 2, .* reads 1: run',
        ),
        (lambda lock: "{", "lock.json: damaged"),
        (lambda lock: None, "lock.json: cannot be read: No such file"),
    ],
)
def test_other_data_are_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    config = config_of("fedavg")
    record_until(tmp_path / "o", config, 3)
    lock = tmp_path / "o" / "lock.json"
    given = spoil(json.loads(lock.read_text()))
    if given is None:
        lock.unlink()
    else:
        lock.write_text(given if isinstance(given, str) else json.dumps(given))
    with (
        pytest.raises(DataError, match=message),
        reopened(tmp_path / "o", config, prepare(config)),
    ):
        pass


@pytest.mark.slow
def test_other_versions_are_noted(tmp_path: Path) -> None:
    config = config_of("fedavg")
    record_until(tmp_path / "o", config, 3)
    lock = tmp_path / "o" / "lock.json"
    lock_file = json.loads(lock.read_text())
    with reopened(tmp_path / "o", config, prepare(config)) as (_, moved):
        assert moved == ""
    lock.write_text(json.dumps(lock_file | {"packages": lock_file["packages"] | {"torch": "1.0"}}))
    with reopened(tmp_path / "o", config, prepare(config)) as (_, moved):
        assert moved.startswith("the last digits of results may differ: torch 1.0 then, 2")
    lock.write_text(json.dumps(lock_file | {"platform": "Plan9 mips", "python": "3.0"}))
    with reopened(tmp_path / "o", config, prepare(config)) as (_, moved):
        assert "python 3.0 then, 3." in moved
        assert "platform Plan9 mips then, " in moved


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"file": "f.toml"}, "leave out FILE.toml, --out and -c"),
        ({"out": "x"}, "leave out FILE.toml, --out and -c"),
        ({"overrides": ("training.rounds=2",)}, "leave out FILE.toml, --out and -c"),
        ({"resume": None}, "give FILE.toml, or --resume FOLDER of a run that was interrupted"),
        ({"actors": 2}, "--actors is for --engine flower-sim"),
        ({"workers": 0}, "--workers 0: give 1 or more"),
    ],
)
def test_options_that_do_not_go_together(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    record_until(tmp_path / "o", config_of("fedavg"), 1)
    plain = {"file": None, "resume": tmp_path / "o", "out": None, "overrides": (),
             "engine": "in-process", "actors": None, "workers": None, "every": None}  # fmt: skip
    with pytest.raises(InputError, match=message):
        run_asked(Asked(**{**plain, **given}), as_json=False)


@pytest.mark.slow
def test_workers_leave_the_same_files(tmp_path: Path) -> None:
    config = config_of("scaffold")
    prepared = prepare(config)
    for name, engine in (("one", InProcess()), ("two", processes(2))):
        (tmp_path / name).mkdir()
        record(tmp_path / name, config, prepared, lambda event: None, engine)
    assert results(tmp_path / "one") == results(tmp_path / "two")
    threads = config_of("scaffold", training={"rounds": 1, "threads": 2})
    with pytest.raises(InputError, match=r"training.threads = 2, and workers have one thread each"):
        record(tmp_path / "one", threads, prepared, lambda event: None, processes(2))
