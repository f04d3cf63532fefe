"""When checkpoints are written, and the order of a run folder's files: what a kill can leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedshift.experiments.experiment import record
from fedshift.experiments.progress import SECONDS, Keeper, Progress, Saver
from fedshift.experiments.task import prepare
from fedshift.experiments.training import silent
from support.small_runs import config_of

ROUNDS = 9


def kept(
    monkeypatch: pytest.MonkeyPatch, every: int | None, times: list[float], stop: int | None = None
) -> list[int]:
    """The rounds after which a checkpoint is written; round t ends at times[t - 1]."""
    now, written = [0.0], list[int]()
    monkeypatch.setattr("fedshift.experiments.progress.time.monotonic", lambda: now[0])

    class Noting(Keeper):
        """Notes the round in place of writing its checkpoint."""

        def keep(self, label: str, progress: Progress) -> None:
            written.append(progress.after.t)

    asks = lambda: 130 if now[0] == times[(stop or 0) - 1] and stop else None  # noqa: E731
    saver = Saver(Noting(Path("o"), "x", every, asks), "run", ROUNDS)
    for t, now[0] in enumerate(times, 1):
        after: Any = SimpleNamespace(t=t)
        saver.played(Progress(after))
    return written


def test_when_checkpoints_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock unless a number is given; after the last round, and when a stop is asked for."""
    fast, slow = [float(t) for t in range(1, 10)], [25.0 * t for t in range(1, 10)]
    assert kept(monkeypatch, None, fast) == [ROUNDS]
    assert kept(monkeypatch, None, slow) == [3, 6, 9]  # 75, 150 and 225 seconds
    assert kept(monkeypatch, None, [SECONDS * t for t in range(1, 10)]) == list(range(1, 10))
    assert kept(monkeypatch, 4, fast) == [4, 8, 9]
    assert kept(monkeypatch, 4, slow) == [4, 8, 9]
    assert kept(monkeypatch, None, fast, stop=ROUNDS) == [ROUNDS]  # there is nothing left to stop
    with pytest.raises(KeyboardInterrupt) as stopped:
        kept(monkeypatch, None, fast, stop=5)
    assert stopped.value.args == (130,)


def test_the_order_of_a_run_folders_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its configuration a folder can be resumed, with its summary it is complete."""
    from fedshift.experiments import folder as module

    done, real = list[str](), module.write

    def write(path: Path, content: Any) -> None:
        done.append(path.name)
        real(path, content)

    monkeypatch.setattr(module, "write", write)
    config = config_of("fedavg", training={"rounds": 1, "steps": 1, "lr": 0.05})
    record(tmp_path, config, prepare(config), silent)
    assert done[:2] == ["lock.json", "config.resolved.toml"]
    assert done[-1] == "summary.json"
    assert done.count("summary.json") == 1
    assert set(done) > {"model.safetensors", "metrics.csv", "clients.csv"}
