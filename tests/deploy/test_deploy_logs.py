"""The JSON log: a line for each event and each failure, and nothing else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.cli.app import app
from fedshift.cli.choices import LogFormat
from fedshift.cli.ending import perform
from fedshift.cli.log_lines import line_of, log_line
from fedshift.experiments.folder.run_folder import EventLog
from fedshift.record.folder import EVENTS
from fedshift_deploy.command import teller


def test_a_line_is_one_object_with_the_events_time() -> None:
    event = {"event": "round", "time": 1795721142.839, "run": "r", "round": 1, "clients": [0]}
    assert json.loads(line_of(event)) == {
        "time": "2026-11-26T19:25:42.839Z", "level": "info",
        "event": "round", "run": "r", "round": 1, "clients": [0],
    }  # fmt: skip
    lost = {"event": "dropped", "time": 0.25, "client": 1, "reason": "two\nlines \x1b[31m"}
    line = line_of(lost)
    assert line.isprintable()
    assert json.loads(line)["reason"] == lost["reason"]
    assert json.loads(line)["time"] == "1970-01-01T00:00:00.250Z"


@pytest.mark.parametrize(
    ("more", "level"),
    [
        ({}, "info"),
        ({"skipped": "nobody"}, "warning"),
        ({"dropped": [{"client": 1}]}, "warning"),
        ({"suspicions": []}, "info"),
        ({"suspicions": [{"client": 1}]}, "warning"),
    ],
)
def test_rounds_that_lack_something_are_warnings(more: dict[str, Any], level: str) -> None:
    assert json.loads(line_of({"event": "round", "round": 1, **more}))["level"] == level


def test_nan_does_not_end_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A skipped round has no loss: NaN, which is null in the events."""
    log, run = EventLog(tmp_path), {"run": "r"}
    one = {**run, "event": "round", "rounds": 4, "clients": [0], "train_loss": math.inf}
    scores = {"target_accuracy": 0.5, "estimated_accuracy": math.nan}
    log({**run, "event": "start", "rounds": 4})
    log({**one, "round": 1, "train_loss": math.nan, "skipped": "1 of 3 clients\x1b[2J sent"})
    log({**one, "round": 2})
    log({**run, "event": "evaluation", "round": 3, "train_loss": math.nan, **scores})
    log({**one, "round": 4, "train_loss": 0.5})
    events = [json.loads(text) for text in (tmp_path / EVENTS).open()]
    for event in events:
        teller(LogFormat.json)(event)
    assert [json.loads(line, parse_constant=pytest.fail)["event"] for line in lines(capsys)] == [
        "start", "round", "round", "evaluation", "round"
    ]  # fmt: skip
    tell = teller(LogFormat.text)
    for event in events:
        tell(event)
    assert lines(capsys) == [
        "r: 4 rounds", r"r: round 1/4  skipped: 1 of 3 clients\x1b[2J sent",
        "r: round 2/4  loss inf", "r: round 4/4  loss 0.500 (round 3: target 50.0% est. –%)",
    ]  # fmt: skip
    tell({**run, "event": "evaluation", "round": 4, "train_loss": None, **scores})
    assert lines(capsys) == ["r: done  loss – target 50.0% est. –%"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("given", [["--log-format", "json"], ["--log-format=json"]])
@pytest.mark.parametrize("command", ["server", "client"])
def test_failures_are_lines(
    command: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--server", "127.0.0.1:8000"] if command == "client" else []
    none = str(tmp_path / "none")
    assert perform(app, ["deploy", command, none, *where, *given]) == 2
    printed, errors = capsys.readouterr()
    (line,) = errors.splitlines()
    failure = json.loads(line)
    assert (printed, failure["level"], failure["event"]) == ("", "error", "failed")
    assert failure["exit_code"] == 2
    assert failure["error"].startswith(none)
    # Control: without the option it is a text.
    assert perform(app, ["deploy", command, none, *where]) == 2
    assert capsys.readouterr()[1].startswith(f"error: {none}")


@pytest.mark.parametrize(("signal", "code"), [((), 130), ((143,), 143)])
@pytest.mark.parametrize("command", ["server", "client"])
def test_a_stop_is_no_failure(
    command: str, signal: tuple[int, ...], code: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The units of systemd count its exit codes as success, too."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt(*signal)

    monkeypatch.setattr(f"fedshift_deploy.command.{command}", interrupted)
    given = ["deploy", command, "x", *(["--server", "h:1"] if command == "client" else [])]
    assert perform(app, [*given, "--log-format", "json"]) == code
    line = json.loads(capsys.readouterr()[1])
    assert {k: v for k, v in line.items() if k != "time"} == {
        "level": "info", "event": "stopped", "message": "interrupted", "exit_code": code,
    }  # fmt: skip
    # Control: without the option it is a text.
    assert perform(app, given) == code
    assert capsys.readouterr()[1] == "interrupted\n"
    for unit in (Path(__file__).parents[2] / "deploy" / "systemd").iterdir():
        (codes,) = re.findall(r"^SuccessExitStatus=(.*)$", unit.read_text(), re.M)
        assert str(code) in codes.split()


def test_usage_errors_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert perform(app, ["deploy", "server", "--log-format", "json", "--nothing"]) == 2
    assert "--nothing" in json.loads(capsys.readouterr()[1])["error"]


def test_a_log_line_has_the_time() -> None:
    first, second = (json.loads(log_line("a", level="error", n=1)) for _ in range(2))
    assert (first["event"], first["level"], first["n"]) == ("a", "error", 1)
    assert first["time"] <= second["time"]
