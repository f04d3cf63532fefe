"""Callbacks, trackers, early stopping and the best round."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedshift as fs
from fedshift.experiments.folder import progress
from support.custom_tasks import Net, hospitals, rows

QUICK: dict[str, Any] = {"rounds": 3, "steps": 2, "evaluate_every": 2, "progress": False}


class Noting:
    """A logger that records its calls."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        self.lines.append((run, dict(config)))

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        self.lines.append((run, t, set(numbers)))

    def finish(self) -> None:
        self.lines.append("finished")


def test_every_round_is_reported_once() -> None:
    """With its measurements where it is evaluated."""
    rounds: list[Mapping[str, Any]] = []
    logger = Noting()
    result = fs.fit(hospitals(), Net, callbacks=[rounds.append], loggers=[logger], **QUICK)
    assert [r["round"] for r in rounds] == [1, 2, 3]
    assert ["target_accuracy" in r for r in rounds] == [False, True, True]
    assert rounds[-1]["target_accuracy"] == result.summary.final.target_accuracy
    start, *logs, end = logger.lines
    assert start[1]["training.rounds"] == 3
    assert start[1]["method.name"] == "fedavg"  # left out above: trackers sort runs by it
    assert {"training.lr": 0.1, "seeds.run": 0}.items() <= start[1].items()
    assert "shift.samples" not in start[1]
    assert [log[1] for log in logs] == [1, 2, 3]
    assert "target_accuracy" in logs[1][2]
    assert end == "finished"


def test_one_alone_needs_no_list() -> None:
    """Control: a single value of another kind is refused."""
    rounds: list[Mapping[str, Any]] = []
    logger = Noting()
    fs.fit(hospitals(), Net, callbacks=rounds.append, loggers=logger, **QUICK)
    assert len(rounds) == 3
    assert logger.lines[-1] == "finished"
    with pytest.raises(fs.InputError, match="callbacks has "):
        fs.fit(hospitals(), Net, callbacks=3, **QUICK)  # type: ignore[arg-type]
    with pytest.raises(fs.InputError, match="loggers has "):
        fs.fit(hospitals(), Net, loggers="logs", **QUICK)  # type: ignore[arg-type]


def test_loggers_finish_after_a_failure() -> None:
    logger = Noting()

    def fail(numbers: Any) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fs.fit(hospitals(), Net, callbacks=[fail], loggers=[logger], **QUICK)
    assert logger.lines[-1] == "finished"


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fs.fit(hospitals(), Net, loggers=[fs.TensorBoard(tmp_path)], **QUICK)
    events = EventAccumulator(str(tmp_path / "yours-fedavg-seed0"))
    events.Reload()
    scalars = events.Scalars("target_accuracy")
    assert [s.step for s in scalars] == [2, 3]
    assert scalars[-1].value == pytest.approx(result.summary.final.target_accuracy)
    assert len(events.Scalars("train_loss")) == 3
    for seed in (0, 1):  # a run of the same name has a folder of its own
        fs.fit(hospitals(), Net, seed=seed, loggers=[fs.TensorBoard(tmp_path)], **QUICK)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["yours-fedavg-seed0", "yours-fedavg-seed0-2", "yours-fedavg-seed1"]
    assert all(len(list(path.iterdir())) == 1 for path in tmp_path.iterdir())


@pytest.mark.slow
def test_tensorboard_folders_name_the_method(tmp_path: Path) -> None:
    """Control: not where the user names the run."""
    pytest.importorskip("tensorboard")

    def mine(setting: fs.recipes.Setting) -> Any:
        return fs.recipes.fedavg(setting)

    for method, name in (("fedprox", None), (mine, None), ("fedprox", "north")):
        logger = fs.TensorBoard(tmp_path)
        fs.fit(hospitals(), Net, method=method, name=name, loggers=[logger], **QUICK)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["north-seed0", "yours-fedprox-seed0", "yours-mine-seed0"]


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'm.db'}"
    try:
        logger = fs.MLflow(uri, "hospitals")
    except Exception:
        logger = fs.MLflow(tmp_path.as_uri(), "hospitals")
        uri = tmp_path.as_uri()
    result = fs.fit(hospitals(), Net, loggers=[logger], **QUICK)
    client = mlflow.MlflowClient(tracking_uri=uri)
    before = client.get_experiment_by_name("hospitals")
    (run,) = client.search_runs([before.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.rounds"] == "3"
    assert run.data.metrics["target_accuracy"] == pytest.approx(
        result.summary.final.target_accuracy
    )
    assert len(client.get_metric_history(run.info.run_id, "train_loss")) == 3


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    logger = fs.WandB("hospitals", mode="offline", dir=str(tmp_path))
    fs.fit(hospitals(), Net, loggers=[logger], **QUICK)
    assert list(tmp_path.rglob("*.wandb"))


def test_trackers_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("fedshift.fitting.loggers.importlib.import_module", gone)
    for make in (lambda: fs.TensorBoard(tmp_path), fs.MLflow, fs.WandB):
        with pytest.raises(fs.InputError, match=r"pip install \"fedshift\[trackers\]\""):
            make()


@pytest.mark.slow
def test_early_stopping_and_the_best_round() -> None:
    """By the estimate: the kept model is that of a shorter run; target rows play no part."""
    keys: dict[str, Any] = {"steps": 3, "lr": 1.5, "evaluate_every": 1, "progress": False}
    whole = fs.fit(hospitals(), Net, rounds=12, **keys)
    estimates = [r["estimated_accuracy"] for r in whole.rounds]
    best = estimates.index(max(estimates)) + 1
    assert best < 12  # else there is nothing to show
    best_kept = fs.fit(hospitals(), Net, rounds=12, keep="best", **keys)
    assert best_kept.summary.final.round == best
    assert best_kept.summary.final.target_accuracy == whole.rounds[best - 1]["target_accuracy"]
    short = fs.fit(hospitals(), Net, rounds=best, **keys)
    a, b = best_kept.module().state_dict(), short.module().state_dict()
    assert all(torch.equal(v, b[k]) for k, v in a.items())
    assert len(best_kept.rounds) == 12
    stopped = fs.fit(hospitals(), Net, rounds=12, patience=2, **keys)
    ends = next(t for t in range(2, 13) if t - 1 - estimates.index(max(estimates[:t])) >= 2)
    assert len(stopped.rounds) == ends < 12
    assert stopped.summary.final.round == ends
    reason = f"Training ended after round {ends} of 12: the estimate has not become better for 2 "
    assert any(note.startswith(reason) for note in stopped.summary.why)
    which = f"The model is that of round {best}, whose estimate is the best."
    assert which in best_kept.summary.why
    assert not {which} & {*whole.summary.why, *stopped.summary.why, *short.summary.why}
    assert not any(
        "ended after" in note
        for note in (*whole.summary.why, *best_kept.summary.why, *short.summary.why)
    )


def test_stopping_needs_validation_examples() -> None:
    x, y, site = rows()
    task = fs.Task.from_arrays(x, y, client=site, target="north", validation=0.0)
    with pytest.raises(fs.InputError, match="^patience compares rounds"):
        fs.fit(task, Net, patience=2, **QUICK)


def test_ctrl_c_keeps_the_round_under_way(tmp_path: Path) -> None:
    """Control: before the first Ctrl-C, and without a folder, Python's own handler is there."""

    def press(numbers: Any) -> None:
        if numbers["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    for folder in (tmp_path / "a", None):
        with pytest.raises(KeyboardInterrupt) as caught:
            fs.fit(hospitals(), Net, folder=folder, callbacks=[press], **QUICK | {"rounds": 4})
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert (caught.value.args == (130,)) == (folder is not None)
    assert list((tmp_path / "a" / "checkpoints").iterdir())
    seen: list[int] = []
    again = [lambda numbers: seen.append(numbers["round"])]
    fs.fit(
        hospitals(),
        Net,
        folder=tmp_path / "a",
        resume=True,
        callbacks=again,
        **QUICK | {"rounds": 4},
    )
    assert seen == [3, 4]


def test_the_best_round_survives_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {
        "steps": 3, "lr": 1.5, "evaluate_every": 1, "progress": False, "rounds": 12, "keep": "best",
    }  # fmt: skip
    whole = fs.fit(hospitals(), Net, **keys)
    best = int(whole.summary.final.round)

    def stop(numbers: Any) -> None:
        if numbers["round"] == best + 2:
            raise KeyboardInterrupt

    place = tmp_path / "a"
    monkeypatch.setattr(progress, "SECONDS", 0.0)  # a checkpoint after every round
    with pytest.raises(KeyboardInterrupt):
        fs.fit(hospitals(), Net, folder=place, callbacks=[stop], **keys)
    again = fs.fit(hospitals(), Net, folder=place, resume=True, **keys)
    assert again.summary.final.round == best
    a, b = whole.module().state_dict(), again.module().state_dict()
    assert all(torch.equal(v, b[k]) for k, v in a.items())
