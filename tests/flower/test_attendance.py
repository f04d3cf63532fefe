"""The events of a deployed server that waits for clients, late ones, answers and scores."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Error, Message

from fedshift.experiments.on_flower import configured_site
from fedshift.flower import LocalGrid, client_app, waiting
from fedshift.record.folder import read_run
from fedshift.report.page import page
from fedshift_deploy.machines import awaited
from support.federation_grid import events_in, serve
from support.own_sites import deploy, joined, places, resolved
from support.small_runs import text_of


def brief() -> str:
    """Two rounds of three small clients, both evaluated."""
    text = text_of("fedavg").replace("rounds = 5", "rounds = 2")
    return text.replace("evaluate_every = 2", "evaluate_every = 1")


NODES = [1000 + 7 * i for i in range(3)]
Event = dict[str, Any]


class Named(LocalGrid):
    """Three clients, whose nodes have the names of their folders."""

    def __init__(self, text: str) -> None:
        super().__init__(client_app(partial(configured_site, text)), 3)

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=node, name=f"client-{(node - 1000) // 7}")
            for node in self.get_node_ids()
        ]


class Coming(Named):
    """The clients connect one after the other, with some polls between them."""

    looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return NODES[: 1 + self.looks // 8]


@pytest.mark.slow
def test_missing_clients_are_named_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SOON", 0.0)
    text = brief()
    waits = [e for e in serve(Coming(text), text, tmp_path / "run") if e["event"] == "waiting"]
    assert [(e["done"], e["of"], e["missing"]) for e in waits] == [
        (2, 3, ["client-2"]), (3, 3, []),
    ]  # fmt: skip
    # The control: with all clients present there is no event.
    assert not [e for e in serve(Named(text), text, tmp_path / "two") if e["event"] == "waiting"]


@pytest.mark.parametrize(
    ("of", "sees", "told"),
    [
        (3, [(float(t), {7}) for t in range(40)], [1]),  # once, without a change
        (50, [(n / 50, range(n)) for n in range(51)], [1, 50]),  # all within a second
    ],
)
def test_a_wait_is_few_events(
    of: int, sees: Any, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, now = list[Event](), [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    attendance = waiting.Attendance(of, events.append)
    for now[0], present in sees:
        attendance.see(present, list)
    assert [e["done"] for e in events] == told


class Late(Named):
    """After round 1 client 2 connects, and another node that claims to be client 0."""

    def __init__(self, text: str) -> None:
        LocalGrid.__init__(
            self, client_app(partial(configured_site, text)), 3,
            partitions={0: 0, 1: 1, 2: 2, 3: 0},
        )  # fmt: skip
        self.absent = {NODES[2], 1021}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        if sent[0].metadata.message_type == "evaluate":
            self.absent = set()
        return super().push_messages(sent)


@pytest.mark.slow
def test_late_joiners_and_refusals_are_reported(tmp_path: Path) -> None:
    """The audit of the clients' claims is renewed, too."""
    text = brief()
    events = serve(Late(text), text, tmp_path / "run", patience=0.1, min_clients=2)
    late = [e for e in events if e["event"] in ("joined", "refused")]
    assert [(e["event"], e.get("client"), e.get("round")) for e in late] == [
        ("refused", None, None), ("joined", 2, 2),
    ]  # fmt: skip
    order = [e["event"] for e in events if e["event"] in ("claims", "round", "evaluation")]
    assert order[:4] == ["claims", "round", "evaluation", "claims"]


class Silent(Named):
    """After round 1 client 0 fails to score and client 1 is silent; 2 is gone after round 2."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, timeout=timeout))
        kind, run = sent[0].metadata.message_type, sent[0].content.config_records.get("run")
        if kind == "train" and run is not None and run["round"] == 2:
            self.absent = {NODES[2]}
        if kind != "evaluate" or run is None or run["round"] != 1:
            return replies
        by_node = {m.metadata.dst_node_id: m for m in sent}
        failing = Message(Error(2, "the disk is on fire"), reply_to=by_node[NODES[0]])
        return [r for r in replies if r.metadata.src_node_id == NODES[2]] + [failing]


@pytest.mark.slow
def test_scores_that_are_missing(tmp_path: Path) -> None:
    """They cause an event with the reason, and are named in the report and by the estimate."""
    text = brief()
    events = serve(Silent(text), text, tmp_path / "run")
    missed = [e for e in events if e["event"] == "unscored"]
    assert [(e["round"], e["client"], e["kind"], e["reason"]) for e in missed] == [
        (1, 0, "error", "the disk is on fire"),
        (1, 1, "timeout", "no answer within 7 s"),
        (2, 2, "lost", "its node is not connected"),
    ]  # fmt: skip
    evaluations = [e for e in events if e["event"] == "evaluation"]
    assert [e.get("scored_by") for e in evaluations] == ["1 of 3 clients", "2 of 3 clients"]
    drawn = page([read_run(tmp_path / "run")])
    assert "no scores: no answer in time" in drawn
    assert not [e for e in events if e["event"] == "round" and e.get("dropped")]
    # The control: where all score, nothing of that.
    events = serve(Named(text), text, tmp_path / "two")
    assert not [e for e in events if e["event"] == "unscored" or "scored_by" in e]


@pytest.mark.slow
def test_answers_about_data_and_scores_of_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores may take as long as a round; a site without them is named, and ends no run."""
    monkeypatch.setattr(awaited, "LONG", 0.0)

    def failing(app: Any) -> Any:
        def handle(message: Message, context: Any) -> Message:
            question = message.content.config_records.get("site")
            if (
                question is not None
                and question["step"] == "scores"
                and context.node_id == NODES[1]
            ):
                raise RuntimeError("the disk is on fire")
            return app(message, context)  # type: ignore[no-any-return]

        return handle

    out = tmp_path / "run"
    deploy(monkeypatch, places(tmp_path / "c", joined()), out, resolved(tmp_path), failing)
    events = events_in(out)
    assert [e["what"] for e in events if e["event"] == "waiting"][:4] == [
        "have sent label counts and columns' ranges",
        "have sent columns' sums or texts",
        "have sent columns' sums of squares, to standardise them",
        "have encoded their rows",
    ]
    missed = {(e["round"], e["client"], e["kind"]) for e in events if e["event"] == "unscored"}
    assert missed == {(1, 1, "error"), (2, 1, "error")}
