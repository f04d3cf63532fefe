"""How the server sends questions to sites that keep their rows, and collects their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshift.engine.checks.gate import Dropped
from fedshift.errors import InputError, shown
from fedshift.experiments.config.section import Section
from fedshift.flower.arriving import failed_client
from fedshift.flower.nodes import check_name, names_of
from fedshift.flower.records import failure_of, fields_of
from fedshift.flower.waiting import Attendance, Tell
from fedshift.tasks.names import listed
from fedshift_deploy.sites.answering import ANSWER, ASK, read
from fedshift_deploy.sites.sums import Survey

S = TypeVar("S", bound=Section)
T = TypeVar("T")
# Seconds between two looks for new sites.
POLL = 0.5


@dataclass
class Sites:
    """The sites of a federation; nodes: client -> the id of its Flower node.

    patience: seconds to wait for the sites, and for their answers before round 1. timeout: seconds
    for later answers. tell: gets events that name the sites that are missing.
    """

    grid: Grid
    names: tuple[str, ...]
    patience: float
    timeout: float
    tell: Tell
    nodes: dict[int, int] = field(default_factory=dict)

    def surveys(self) -> list[Survey]:
        """Wait for all sites, and ask each for its survey as soon as it connects.

        So mistakes in a site's data show before the last site is there. Raises InputError for data
        that do not fit, for sites that did not come, and for two nodes of one client.
        """
        end, asked, surveys = time.monotonic() + self.patience, set[int](), dict[int, Survey]()
        attendance = Attendance(len(self.names), self.tell)

        def away() -> list[str]:
            return [name for i, name in enumerate(self.names) if i not in surveys]

        while True:
            new = sorted({*self.grid.get_node_ids()} - asked)
            asked |= {*new}
            names, refused = names_of(self.grid) if new else {}, dict[int, str]()
            for node, reply in self._send("survey", dict.fromkeys(new, Section()), self.patience):
                if _is_gone(failed_client(-1, reply)):
                    asked.discard(node)  # to be asked again when it is back
                    continue
                client = _client(reply)
                try:
                    answer = _taken(reply, lambda content, _: _read(content, Survey), client)
                    check_name(reply.metadata.src_node_id, client, names)
                except InputError as e:
                    refused[client] = str(e)
                    continue
                if not 0 <= client < len(self.names) or client in self.nodes:
                    raise InputError(
                        f"two nodes are client {client}, or there is none of this number; with "
                        f"{len(self.names)} clients they are 0..{len(self.names) - 1}"
                    )
                self.nodes[client], surveys[client] = reply.metadata.src_node_id, answer
            if refused:
                raise InputError(self._misfit(refused))
            attendance.see(surveys, away)
            if len(surveys) == len(self.names):
                return [surveys[i] for i in range(len(self.names))]
            if time.monotonic() > end:
                raise InputError(
                    f"{len(surveys)} of {len(self.names)} clients are connected after "
                    f"{self.patience:g} s, without {listed(away())}; start the others"
                )
            time.sleep(POLL)

    def ask(self, step: str, kind: type[S], given: Sequence[Section]) -> list[S]:
        """Each site's answer, in order of the clients.

        Raises InputError with the names of all sites that refuse. If none does, it names those that
        did not answer.
        """
        answers, missed = self.answers(
            step, lambda content, _: _read(content, kind), given, self.patience
        )
        gone = {one.client: one.reason for one in missed if _is_gone(one)}
        if refused := {one.client: one.reason for one in missed if one.client not in gone}:
            raise InputError(self._misfit(refused))
        if gone:
            raise InputError(
                f"{len(gone)} of {len(self.names)} clients did not answer before round 1: "
                f"{self._each(gone)}. Start the server again once they have joined; a client's "
                "supernode.log says what ended it"
            )
        return [answers[i] for i in range(len(self.names))]

    def answers(
        self, step: str, take: Callable[[RecordDict, int], T], given: Sequence[Section],
        seconds: float, parts: Mapping[str, ArrayRecord] = {},
    ) -> tuple[dict[int, T], list[Dropped]]:  # fmt: skip
        """(`take` of each answer, by client; the clients without an answer, and why)."""
        asked = {self.nodes[i]: one for i, one in enumerate(given)}
        clients = {node: i for i, node in self.nodes.items()}
        late = f"no answer within {seconds:g} s"
        missed = {i: Dropped(i, late, "timeout") for i in sorted(self.nodes)}
        answers: dict[int, T] = {}
        for node, reply in self._send(step, asked, seconds, parts):
            i = clients[node]
            try:
                answers[i] = _taken(reply, take, i)
                del missed[i]
            except InputError as e:
                missed[i] = failed_client(i, reply) or Dropped(i, str(e), "reply")
        return answers, list(missed.values())

    def _misfit(self, refused: Mapping[int, str]) -> str:
        return (
            f"data of {len(refused)} of {len(self.names)} clients do not fit: "
            f"{self._each(refused)}. `fedshift deploy check` on the client's machine, or its "
            "supernode.log, says where"
        )

    def _each(self, reasons: Mapping[int, str]) -> str:
        names = dict(enumerate(self.names))
        return "; ".join(
            f'"{shown(names.get(i, "?"))}": {why}' for i, why in sorted(reasons.items())
        )

    def _send(
        self, step: str, asked: Mapping[int, Section], seconds: float,
        parts: Mapping[str, ArrayRecord] = {},
    ) -> Iterator[tuple[int, Message]]:  # fmt: skip
        """(the node that was asked, its answer)."""
        messages = []
        for node, one in asked.items():
            ask = ConfigRecord({"step": step, "given": one.model_dump_json()})
            content = RecordDict({**parts, ASK: ask})
            messages.append(Message(content, message_type=f"query.{ASK}", dst_node_id=node))
        for reply in self.grid.send_and_receive(messages, timeout=seconds) if messages else ():
            # If a node is gone, the SuperLink replies in its place, under its own node id: the
            # node that was asked is found by the message's id.
            by_id = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
            node = reply.metadata.src_node_id
            if node not in asked:
                node = by_id[reply.metadata.reply_to_message_id]
            yield node, reply


def _is_gone(one: Dropped | None) -> bool:
    """Whether a client is away or did not answer; its data are not at fault then."""
    return one is not None and one.kind in ("lost", "timeout")


def _taken(reply: Message, take: Callable[[RecordDict, int], T], client: int) -> T:
    """`take` of an answer. Raises InputError for one that reports a failure or cannot be read."""
    if (why := failure_of(reply)) is not None:
        raise InputError(why)
    try:
        return take(reply.content, client)
    except InputError:
        raise
    except Exception as e:
        # The bytes come from another machine, so whatever is raised means that they are bad.
        raise InputError(f"its answer cannot be read: {type(e).__name__}: {e}") from None


def _read(content: RecordDict, kind: type[S]) -> S:
    return read(kind, str(fields_of(content, ASK)[ANSWER]))


def _client(reply: Message) -> int:
    """The client that a reply claims to be from; -1 if it does not say."""
    record = reply.content.config_records.get(ASK) if reply.has_content() else None
    client = None if record is None else record.get("client")
    return client if isinstance(client, int) else -1
