"""The profile of a run: each second is counted once, by name, and only when asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli.results import run_json, show_profile
from fedshift.cli.running import Asked, run_asked
from fedshift.engine.profile import PHASES, Idle, Stopwatch
from fedshift.errors import InputError
from fedshift.experiments.experiment import record
from fedshift.experiments.task.preparing import prepare
from fedshift.record.folder import PROFILE
from support.small_runs import config_of


class Ticks:
    """A clock that moves only when `now` is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_the_innermost_counts() -> None:
    """As in a run: a round begins with planning, until its clients are asked."""
    ticks = Ticks()
    watch = Stopwatch(ticks)

    def jobs() -> Iterator[int]:
        for i in range(2):
            ticks.now += 1
            yield i

    def replies() -> Iterator[int]:
        for i in watch.each("planning", jobs()):
            ticks.now += 10
            yield i

    def rounds() -> Iterator[None]:
        for _ in range(3):
            ticks.now += 100
            watch.turn("aggregation")
            for _ in watch.each("client compute", replies()):
                ticks.now += 1000
            yield

    with watch.of("other"):
        for _ in watch.each("planning", rounds()):
            ticks.now += 10000
    ticks.now += 5000  # in no phase
    assert watch.seconds == {
        "client compute": 60.0, "planning": 306.0, "aggregation": 6000.0, "evaluation": 0.0,
        "checkpointing": 0.0, "other": 30000.0,
    }  # fmt: skip
    shares = watch.profile()["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["aggregation"] == pytest.approx(6000 / 36366)
    assert Stopwatch(ticks).profile()["shares"] == {}


def test_an_error_closes_what_was_open() -> None:
    ticks = Ticks()
    watch = Stopwatch(ticks)

    def fails() -> None:
        with watch.of("evaluation"):
            ticks.now += 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fails()
    ticks.now += 1
    assert watch.seconds["evaluation"] == 1.0


def test_idle_measures_nothing() -> None:
    items = iter([1, 2])
    assert Idle().each("planning", items) is items
    with Idle().of("planning"):
        Idle().turn("other")


def test_a_runs_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("fedavg")
    record(tmp_path / "on", config, prepare(config), lambda event: None, clock=Stopwatch())
    profile = json.loads((tmp_path / "on" / PROFILE).read_text())
    assert tuple(profile["seconds"]) == PHASES
    assert all(profile["seconds"][k] > 0 for k in PHASES)
    assert sum(profile["shares"].values()) == pytest.approx(1.0)
    show_profile(tmp_path / "on")
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*PHASES, "seconds"))
    assert run_json(tmp_path / "on", tmp_path)["profile"] == profile


def test_nothing_is_left_unless_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of("fedavg")
    record(tmp_path / "off", config, prepare(config), lambda event: None)
    assert not (tmp_path / "off" / PROFILE).exists()
    show_profile(tmp_path / "off")
    assert capsys.readouterr().out == ""
    assert "profile" not in run_json(tmp_path / "off", tmp_path)


@pytest.mark.parametrize("given", [{"profile": True}, {"state_memory": 1.0}])
def test_flower_has_neither(given: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("[training]\nrounds = 1\n")
    options = Asked(file, None, tmp_path / "x", [], "flower-sim", None, None, None, **given)
    with pytest.raises(InputError, match="--state-memory and --profile are for the engine"):
        run_asked(options, as_json=False)
