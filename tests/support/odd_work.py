"""A client's work with a changed answer, for tests of the checks of replies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedshift.data import ClientData, Plan
from fedshift.engine.backends import Block, ClientUpdate, Job, Reply, loop
from fedshift.engine.checks.replies import block_of
from fedshift.engine.sums.summing import TermsOf
from fedshift.errors import InputError
from fedshift.tree import Parts, stack


@dataclass(frozen=True)
class OddWork:
    """`change` alters what one client sends and keeps; it is pickled for workers."""

    update: ClientUpdate
    client: int
    change: Callable[[Parts, Parts], tuple[Parts, Parts]]

    def __call__(self, message: Parts, state: Parts, data: Any, plans: Any) -> tuple[Parts, Parts]:
        sent, new_state = self.update(message, state, data, plans)
        return self.change(sent, new_state) if int(data.id) == self.client else (sent, new_state)


@dataclass(frozen=True)
class Together:
    """`loop`, with its replies merged into blocks; `kind` is the change in one client's reply.

    each: how many are put together; turned: the last of them first; apart: by odd ids and even
    """

    kind: str = ""
    client: int = -1
    each: int = 3
    turned: bool = False
    apart: bool = False

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        odd = OddWork(update, self.client, partial(changed, self.kind)) if self.kind else update
        return loop(odd, jobs)

    def stream(
        self, update: ClientUpdate, jobs: Iterable[Job], terms_of: TermsOf | None = None
    ) -> Iterator[Block]:
        replies = list(self(update, jobs))
        replies.sort(key=lambda reply: reply.client % 2 if self.apart else 0)
        for i in range(0, len(replies), self.each):
            some = replies[i : i + self.each][:: -1 if self.turned else 1]
            clients = tuple(reply.client for reply in some)
            try:
                sent, states = stack([r.update for r in some]), stack([r.changed for r in some])
            except InputError:  # as states of FedDisk, which are as large as a client's data
                yield from map(block_of, some)
            else:
                yield Block.of(clients, sent, states, some[0].t)


@dataclass(frozen=True)
class OddReports(Together):
    """Some clients report something else."""

    others: Sequence[int] = ()
    change: str = ""

    def __call__(self, update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in loop(update, jobs):
            report = reply.update["report"]
            loss = report["loss"]
            odd = {
                "double": {**report, "loss": loss.double()},
                "more": {**report, "more": loss},
                "less": {"id": report["id"]},
                "other": {"id": report["id"], "cost": loss},
                "wide": {**report, "loss": loss.expand(2)},
            }[self.change]
            mine = reply.client in self.others
            yield reply._replace(update={**reply.update, "report": odd}) if mine else reply


# Examples of clients 0 to 7.
SIZES = (12, 9, 7, 14, 10, 8, 11, 13)


def changed(kind: str, sent: Parts, new_state: Parts) -> tuple[Parts, Parts]:
    """A client's update and state with one thing changed."""
    delta, report = sent["delta"], sent["report"]
    name = next(iter(delta))
    changes: dict[str, Callable[[], Parts]] = {
        "nan": lambda: {"delta": delta | {name: delta[name] * float("nan")}},
        "inf": lambda: {"delta": delta | {name: delta[name] + float("inf")}},
        "large": lambda: {"delta": delta | {name: delta[name] + 1e6}},
        "form": lambda: {"delta": delta | {name: delta[name].flatten()}},
        "type": lambda: {"delta": delta | {name: delta[name].double()}},
        "names": lambda: {"delta": {"other": delta[name]}},
        "another's": lambda: {"report": report | {"id": report["id"] - 1}},
        "more": lambda: {"extra": {"w": torch.zeros(2)}},
        "kept": dict,
    }
    state = {"kept": {"w": torch.tensor([float("inf")])}} if kind == "kept" else {}
    return sent | changes[kind](), {**new_state, **state}


def asleep() -> None:
    time.sleep(600)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Once:
    """A client's work; client 3 does something else while `flag` does not exist."""

    update: ClientUpdate
    flag: Path
    instead: Callable[[], None]

    def __call__(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        if int(data.id) == 3 and not self.flag.exists():
            self.flag.touch()
            self.instead()
        return self.update(message, state, data, plans)
