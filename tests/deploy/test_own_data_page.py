"""The output of a server is what docs/how-to/deploy-own-data.md shows, line by line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.cli.choices import LogFormat
from fedshift.flower.waiting import waiting_event
from fedshift_deploy.command import init, teller
from fedshift_deploy.federation import Link
from fedshift_deploy.machines import awaited
from support.command_line import code_of
from support.own_sites import deploy
from support.shown import alike

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "deploy-own-data.md").read_text()
SITES = ("east", "south", "west")
WAITING = re.compile(r"own-data: \d of 3 clients (.*?)(; waiting for .*)?")
Lines = list[str]


def shown() -> Lines:
    """The lines of the server on the page."""
    block = PAGE.split("The server says")[1].split("\n\n")[1]
    assert block.startswith("    listening on ")
    return [line.removeprefix("    ") for line in block.splitlines()]


def parted(lines: Lines) -> tuple[Lines, Lines]:
    """The lines about waiting for clients, once each, and the other lines."""
    matches = {line: WAITING.fullmatch(line) for line in lines}
    waits = [match[1] for match in matches.values() if match]
    return list(dict.fromkeys(waits)), [line for line in lines if not matches[line]]


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Lines:
    """The stderr of the page's command, with its clients in this process."""
    folder = tmp_path / "federation"
    init(ROOT / "examples" / "own_data" / "experiment.toml", folder, [], [])
    clients = [folder / "clients" / f"client-{i}" for i in range(3)]
    for name, place in zip(SITES, clients, strict=True):
        shutil.copy(ROOT / "examples" / "own_data" / f"{name}.csv", place / "data.csv")
    shutil.copy(ROOT / "examples" / "own_data" / "west.site.toml", clients[2] / "site.toml")
    monkeypatch.setattr(awaited, "LONG", 0.0)  # else nothing takes long enough here

    def serve(
        _: Path, out: Path, *, listen: Callable[[Any], None], experiment: str,
        beside: Callable[[Link], Any], **__: object,
    ) -> None:  # fmt: skip
        with beside(Link(folder, {}, folder / "log", names=dict.fromkeys(SITES, ""))):
            deploy(monkeypatch, clients, out, experiment)
        for line in (out / "events.jsonl").read_text().splitlines():
            listen(json.loads(line))

    monkeypatch.setattr("fedshift_deploy.federation.serve", serve)
    capsys.readouterr()
    assert code_of(monkeypatch, "deploy", "server", str(folder)) == 0
    return capsys.readouterr().err.splitlines()


def test_what_a_site_reads_of_its_folder_is_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line; the control is another client's folder with the same files."""
    init(ROOT / "examples" / "own_data" / "experiment.toml", tmp_path / "federation", [], [])
    block = PAGE.split("fedshift deploy check federation/clients/client-2\n")[1]
    page = block.split("```console\n")[1].split("```")[0]
    for number in (2, 1):
        place = tmp_path / "federation" / "clients" / f"client-{number}"
        shutil.copy(ROOT / "examples" / "own_data" / "west.csv", place / "data.csv")
        shutil.copy(ROOT / "examples" / "own_data" / "west.site.toml", place / "site.toml")
        capsys.readouterr()
        assert code_of(monkeypatch, "deploy", "check", str(place)) == 0
        printed = capsys.readouterr().out
        assert (printed == page) is (number == 2), printed
        assert printed.replace('client-1 ("south")', 'client-2 ("west")') == page


EVENTS: tuple[dict[str, Any], ...] = (
    {"event": "start", "rounds": 5},
    {
        "event": "claims", "cap": 0.5, "one_could_take": 0.5, "without_cap": 1.0,
        "largest": {"client": 0, "name": "east", "weight": 0.776, "capped": 0.5},
        "audit": "not made: the server has no examples of the clients", "suspicions": [],
    },
    {"event": "round", "round": 4, "rounds": 5, "train_loss": 0.641},
    {"event": "round", "round": 5, "rounds": 5, "train_loss": 0.619},
    {
        "event": "evaluation", "round": 5, "train_loss": 0.619, "target_accuracy": 0.625,
        "estimated_accuracy": 0.576,
    },
)  # fmt: skip


def test_lines_of_single_events_are_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    waits = [
        waiting_event(what, 0, 3, SITES) for what in (*awaited.SENT.values(), "have registered")
    ]
    tell = teller(LogFormat.text)
    for event in (*EVENTS, *waits):
        tell({"run": "own-data", **event})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7 + len(waits)
    assert [line for line in lines if line not in shown()] == []


@pytest.mark.slow
def test_the_servers_lines_are_the_pages(printed: Lines) -> None:
    (waits, lines), (waits_shown, lines_shown) = parted(printed), parted(shown())
    # Clients that are not there yet; here they always are.
    assert waits_shown[0] == "are connected"
    assert waits_shown[1:] == waits
    text = "".join(f"{line}\n" for line in lines)
    assert alike("\n".join(lines_shown), text), text
    assert sum(": round " in line for line in lines) == 5
    # The control: a line less is another text.
    assert not alike("\n".join(lines_shown[:-1]), text)
