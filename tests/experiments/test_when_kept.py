"""When checkpoints are written, and the order of a run folder's files, which a kill may cut."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedshift.engine.run import start
from fedshift.errors import DataError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import Config, Training
from fedshift.experiments.experiment import federation_of, method_of, record
from fedshift.experiments.folder.progress import SECONDS, Keeper, Progress, Saver
from fedshift.experiments.folder.run_folder import kept_in
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.task.preparing import prepare
from support.small_runs import config_of

ROUNDS = 9


def written_after(
    monkeypatch: pytest.MonkeyPatch, every: int | None, times: list[float], stop: int | None = None
) -> list[int]:
    """The rounds after which a checkpoint is written; round t ends at times[t - 1]."""
    now, written = [0.0], list[int]()
    monkeypatch.setattr("fedshift.experiments.folder.progress.time.monotonic", lambda: now[0])

    class Noting(Keeper):
        """Records the round in place of writing its checkpoint."""

        def keep(self, label: str, progress: Progress) -> None:
            if progress.after is not None:
                written.append(progress.after.t)

    asks = lambda: 130 if now[0] == times[(stop or 0) - 1] and stop else None  # noqa: E731
    saver = Saver(Noting(Path("o"), "x", every, asks), "run")
    for t, now[0] in enumerate(times, 1):
        after: Any = SimpleNamespace(t=t)
        saver.after_round(Progress(after), last=t == ROUNDS)
    return written


def test_when_checkpoints_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock unless a number is given; also after the last round and at a requested stop."""
    fast, slow = [float(t) for t in range(1, 10)], [25.0 * t for t in range(1, 10)]
    assert written_after(monkeypatch, None, fast) == [ROUNDS]
    assert written_after(monkeypatch, None, slow) == [3, 6, 9]  # 75, 150 and 225 seconds
    assert written_after(monkeypatch, None, [SECONDS * t for t in range(1, 10)]) == list(
        range(1, 10)
    )
    assert written_after(monkeypatch, 4, fast) == [4, 8, 9]
    assert written_after(monkeypatch, 4, slow) == [4, 8, 9]
    assert written_after(monkeypatch, None, fast, stop=ROUNDS) == [
        ROUNDS
    ]  # there is nothing left to stop
    with pytest.raises(KeyboardInterrupt) as stopped:
        written_after(monkeypatch, None, fast, stop=5)
    assert stopped.value.args == (130,)


@pytest.mark.slow
def test_the_order_of_a_run_folders_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its configuration on, a folder can be resumed; from its summary on, it is complete."""
    from fedshift.experiments.folder import run_folder as module

    done, real = list[str](), module.write

    def write(path: Path, content: Any) -> None:
        done.append(path.name)
        real(path, content)

    monkeypatch.setattr(module, "write", write)
    config = config_of("fedavg", training={"rounds": 1, "steps": 1, "lr": 0.05})
    record(tmp_path, config, prepare(config), ignore_event)
    assert done[:2] == ["lock.json", "config.resolved.toml"]
    assert done[-1] == "summary.json"
    assert done.count("summary.json") == 1
    assert set(done) > {"model.safetensors", "metrics.csv", "clients.csv"}


class LaterTraining(Training):
    hurry: int = 3


class Later(Config):
    """The configuration of a later version, with one more key."""

    training: LaterTraining = LaterTraining()


def test_a_new_key_makes_no_other_run_while_it_has_its_default() -> None:
    config = config_of("fedavg", training={"rounds": 4, "steps": 1})
    later = Later.model_validate(config.model_dump())
    assert later.identity == config.identity
    more = later.training.model_copy(update={"hurry": 4})
    assert later.model_copy(update={"training": more}).identity != config.identity
    assert config.model_copy(update={"name": "other"}).identity == config.identity
    assert config_of("fedavg", training={"rounds": 5, "steps": 1}).identity != config.identity


@pytest.mark.slow
def test_checkpoints_of_another_configuration_are_refused(tmp_path: Path) -> None:
    config = validate(
        {
            "data": {"name": "fashion-mnist-mini"},
            "shift": {"kind": "iid", "clients": 4},
            "model": {"name": "linear"},
            "training": {"rounds": 4, "steps": 1},
        }
    )
    keeper = kept_in(tmp_path, config, prepare(config), 1)
    ready = prepare(config)
    after = start(
        method_of(config.method, config.training, ready)(), federation_of(config.method, ready)
    )
    keeper.keep("run", Progress(after))
    assert keeper.progress("run").after is not None
    other = config.model_copy(update={"training": Training(rounds=5, steps=1)})
    with pytest.raises(DataError, match="checkpoints of another configuration"):
        kept_in(tmp_path, other, prepare(config), 1).progress("run")
