"""Progress lines, and the command line as a module."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest

import fedshift
from fedshift.cli.console import LiveProgress, PlainProgress

EVENT: dict[str, Any] = {
    "event": "evaluation", "run": "a", "round": 1, "train_loss": 0.5, "target_accuracy": 0.279,
    "estimated_accuracy": float("nan"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "scores"),
    [
        ({"estimated_accuracy": 0.25}, "loss 0.500 target 27.9% est. 25.0%"),
        (
            {"system_accuracy": 0.279, "average_accuracy": 0.8},
            "loss 0.500 system 27.9% own 80.0%",
        ),
    ],
)
def test_scores_are_named_by_what_they_are(
    more: dict[str, float], scores: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, live = PlainProgress(), LiveProgress()
    plain({"event": "start", "run": "a", "rounds": 1})
    plain(EVENT | more)
    assert capsys.readouterr().err == f"a: 1 round\na: done  {scores}\n"
    with live.bars:
        live({"event": "start", "run": "a", "rounds": 1})
        live(EVENT | more)
        assert live.bars.tasks[0].fields["scores"] == scores


def test_lines_carry_the_numbers_of_their_own_round(capsys: pytest.CaptureFixture[str]) -> None:
    """Round 2, which was not evaluated, has its loss; the accuracies are labelled as round 1's."""
    plain, live = PlainProgress(), LiveProgress()
    second = {"event": "round", "run": "a", "round": 2, "rounds": 4, "train_loss": 0.25}
    lost = {
        "event": "dropped", "run": "a", "round": 2, "client": 1, "kind": "error",
        "reason": "the disk\x1b[31m is on fire",
    }  # fmt: skip
    scores = "loss 0.250 (round 1: target 27.9% est. 25.0%)"
    with live.bars:
        for listen in (plain, live):
            listen({"event": "start", "run": "a", "rounds": 4})
            listen(EVENT | {"estimated_accuracy": 0.25})
            plain.last = -100.0  # it is long since the last line
            listen(lost)
            listen(second)
        assert live.bars.tasks[0].fields["scores"] == scores
    lines = capsys.readouterr().err.splitlines()
    dropped = "a: round 2: client 1 dropped out (error): the disk\\x1b[31m is on fire"
    assert lines[:3] == ["a: 4 rounds", dropped, f"a: round 2/4  {scores}"]


def test_each_round_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As on a federation's server; the control: by default quick rounds have no line."""
    rounds = [
        {"event": "round", "run": "a", "round": t, "rounds": 2, "train_loss": 1 / t} for t in (1, 2)
    ]
    for each in (True, False):
        plain = PlainProgress(each=each)
        for event in ({"event": "start", "run": "a", "rounds": 2}, *rounds, EVENT | {"round": 2}):
            plain(event)
        lines = capsys.readouterr().err.splitlines()
        assert lines[1:-1] == ["a: round 1/2  loss 1.000", "a: round 2/2  loss 0.500"] * each
        assert lines[-1].startswith("a: done")


def test_the_package_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedshift", "--version"])
    runpy.run_module("fedshift", run_name="__main__")
    assert capsys.readouterr().out == f"fedshift {fedshift.__version__}\n"
