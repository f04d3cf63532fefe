"""Texts from other machines reach no terminal, log or result with control characters."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Gate
from fedshift.engine.checks.replies import Limits, fault_in
from fedshift.errors import InputError, from_elsewhere
from fedshift.experiments.folder.run_folder import EventLog
from fedshift.flower import LocalGrid
from fedshift.flower.arriving import arrived
from fedshift.flower.nodes import Expected, meet
from fedshift.flower.records import failed
from fedshift_deploy.log_records import show_controls

ODD = "oh\x1b[2J\x1b]0;mine\x07\r\nerror: none\u202e\x9b31m\u200b"
SEEN = r"oh\x1b[2J\x1b]0;mine\x07 error: none\u202e\x9b31m\u200b"


def harmless(text: str) -> bool:
    return text.isprintable()


def test_the_function_that_makes_text_harmless() -> None:
    assert from_elsewhere(ODD) == SEEN
    assert not harmless(ODD)
    assert from_elsewhere("a  b\n\n c", 5) == "a b c"
    assert len(from_elsewhere("a" * 900)) == 500
    assert from_elsewhere("Zürich 北京") == "Zürich 北京"


def reply(content: RecordDict | Error) -> Message:
    # Which makes this process one of Flower's, where messages can be made.
    LocalGrid(ClientApp(), 1)
    question = Message(RecordDict(), message_type="train", dst_node_id=7)
    question.metadata.__dict__["_message_id"] = "1"
    if isinstance(content, Error):
        return Message(content, reply_to=question)
    return Message(content, reply_to=question)


def odd_array() -> RecordDict:
    record = RecordDict({"params": ArrayRecord({"w": Array(np.zeros(2))})})
    record["params"]["w"].stype = ODD
    return record


def test_reasons_of_failures() -> None:
    for content in (
        failed(ODD),
        Error(0, reason=f"Message: {ODD}'>"),
        Error(0, reason=f"<class 'X'>:<'{ODD}'>"),
        odd_array(),
        RecordDict({"run": ConfigRecord({"round": ODD})}),
    ):
        ((client, why, _),) = arrived([reply(content)], lambda _: 3, 10**6).unread
        assert client == 3
        assert "oh" in why
        assert harmless(why)


def test_names_of_parts_and_tensors() -> None:
    w = {"w": torch.zeros(2)}
    limits = Limits(1, Gate(), lambda _: {"params": w}, {})
    for tree in ({"params": w, ODD: {"w": torch.tensor([torch.nan])}}, {ODD: {ODD: ODD}}):
        bad = fault_in(Reply(0, tree, {}, 1), None, limits)  # type: ignore[arg-type]
        assert bad is not None
        assert "oh" in bad.reason
        assert harmless(bad.reason)


def test_registrations() -> None:
    class Grid:
        def get_node_ids(self) -> list[int]:
            return [7]

        def get_nodes(self) -> list[Any]:
            return []

        def send_and_receive(self, messages: Any, timeout: float) -> list[Message]:
            return [self.answer]

        answer: Message

    grid, expected = Grid(), Expected(1, 2, ("n",), {"w": torch.zeros(2)}, {})
    row = ArrayRecord({"n": Array(np.array(3.0))})
    who = ConfigRecord({"client": 0, "form": [ODD], "digest": ODD})
    for content in (failed(ODD), RecordDict({"who": who, "table": row})):
        grid.answer = reply(content)
        with pytest.raises(InputError, match="oh") as error:
            meet(grid, expected, patience=0.1)  # type: ignore[arg-type]
        assert harmless(str(error.value))


def test_events_hold_no_such_character(tmp_path: Path) -> None:
    EventLog(tmp_path)({"event": "dropped", "reason": ODD})
    (line,) = (tmp_path / "events.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert line.isprintable()
    assert json.loads(line)["reason"] == ODD


def test_logs_of_flowers_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = logging.getLogRecordFactory()
    stream = io.StringIO()
    log = logging.Logger("of a test")
    log.addHandler(logging.StreamHandler(stream))

    def written() -> str:
        stream.seek(0)
        stream.truncate()
        log.warning("round %d: %s", 3, ODD)
        log.warning(f"two\nlines {ODD}")
        try:
            raise ValueError(ODD)
        except ValueError as e:
            log.exception("failed: %s", e)
        return stream.getvalue()

    # The control: as they come.
    assert "\x1b" in written()
    try:
        show_controls()
        text = written()
    finally:
        logging.setLogRecordFactory(made)
    assert f"round 3: {SEEN[:20]}" in text
    assert "two\nlines" in text
    assert "Traceback" in text
    assert all(harmless(line) for line in text.split("\n"))
