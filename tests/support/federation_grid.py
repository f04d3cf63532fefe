"""A deployed federation on a grid without processes, and the same run in one process."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message

from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import record
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.on_flower import configured_site
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid, client_app
from fedshift.flower.client import app_of, partition
from fedshift_deploy.chosen import KEEP
from fedshift_deploy.machines import deployed

CLIENTS = 3


def here(text: str, out: Path) -> Path:
    """Run the experiment in one process."""
    config = validate(tomllib.loads(text), text=text)
    out.mkdir()
    record(out, config, prepare(config), ignore_event)
    return out


def serve(grid: LocalGrid, text: str, out: Path, **more: Any) -> list[dict[str, Any]]:
    """Run the deployed app's server over a grid; its events."""
    given = {"experiment": text, "out": str(out), "patience": 5.0, "timeout": 7.0, **more}
    deployed.server_app(grid, SimpleNamespace(run_config=given))  # type: ignore[arg-type]
    return events_in(out)


def dealt(text: str, clients: int = CLIENTS) -> LocalGrid:
    """A grid whose clients have what the experiment deals them."""
    return LocalGrid(client_app(partial(configured_site, text)), clients)


def events_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def summary_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


class Watched(LocalGrid):
    """A grid that records all answers; its server dies at the n-th message about routers."""

    def __init__(self, text: str, out: Path, keep: Path, dies: int = 0, **given: Any) -> None:
        self.config = {
            "experiment": text, "out": str(out), "patience": 0.3, "timeout": 60.0, "refit": True,
            "site": "fedshift.experiments.on_flower:configured_site", **given,
        }  # fmt: skip

        def answer(message: Message, context: Context) -> Message:
            """Answer a message as one client's process does; its folder is in the environment."""
            place = keep / str(partition(context)) / "kept"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(KEEP, str(place))
                leave = deployed.leave_model
                return app_of(deployed.site_of, 1, False, place, leave=leave)(message, context)

        super().__init__(answer, CLIENTS)  # type: ignore[arg-type]
        for context in self.contexts.values():
            context.run_config, context.run_id = self.config, hash(out) % 1000 + dies
        self.keep = keep
        self.dies, self.about_routers, self.replies = dies, 0, list[Message]()

    def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
        sent = list(messages)
        self.about_routers += sent[0].metadata.message_type == "query.router" if sent else 0
        if self.dies and self.about_routers == self.dies:
            raise Dies
        replies = list(super().send_and_receive(sent, **given))
        self.replies += replies
        return replies

    def serve(self) -> Path:
        deployed.server_app(self, SimpleNamespace(run_config=self.config))  # type: ignore[arg-type]
        return Path(str(self.config["out"]))


class Dies(BaseException):
    """An exception that nothing catches."""


def served(folder: Path) -> dict[str, Any]:
    return dict(summary_of(folder)["final"])
