"""Questions of a server to sites with data of their own, and their answers, by client."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshift.errors import InputError, shown
from fedshift.experiments.at_sites import ANSWER, ASK, read
from fedshift.experiments.section import Section
from fedshift.experiments.site_sums import Survey
from fedshift.flower.records import failure_of, fields_of
from fedshift.tasks.names import listed

S = TypeVar("S", bound=Section)
POLL = 0.5


@dataclass
class Sites:
    """The sites of a federation by client; patience: seconds to wait for them, and for answers."""

    grid: Grid
    names: tuple[str, ...]
    patience: float
    nodes: dict[int, int] = field(default_factory=dict)

    def surveys(self) -> list[Survey]:
        """Wait for all sites; ask each for its survey as it connects, so that mistakes show early.

        Raises InputError for data that do not fit, for sites that are not there, and for two nodes
        of one client.
        """
        end, asked, surveys = time.monotonic() + self.patience, set[int](), dict[int, Survey]()
        while True:
            new = sorted({*self.grid.get_node_ids()} - asked)
            asked |= {*new}
            for reply in self._send("survey", dict.fromkeys(new, Section())):
                answer, client = _answer(reply, Survey)
                if isinstance(answer, str):
                    raise InputError(self._misfit({client: answer}))
                if not 0 <= client < len(self.names) or client in self.nodes:
                    raise InputError(
                        f"two nodes are client {client}, or there is none of this number; with "
                        f"{len(self.names)} clients they are 0..{len(self.names) - 1}"
                    )
                self.nodes[client], surveys[client] = reply.metadata.src_node_id, answer
            if len(surveys) == len(self.names):
                return [surveys[i] for i in range(len(self.names))]
            if time.monotonic() > end:
                away = [name for i, name in enumerate(self.names) if i not in surveys]
                raise InputError(
                    f"{len(surveys)} of {len(self.names)} clients are connected after "
                    f"{self.patience:g} s, without {listed(away)}; start the others"
                )
            time.sleep(POLL)

    def ask(self, step: str, kind: type[S], given: Sequence[Section]) -> list[S]:
        """Each site's answer, in order. Raises InputError with the names of all that refuse."""
        answers, refused = self.answers(step, kind, given)
        if refused:
            raise InputError(self._misfit(refused))
        return [answers[i] for i in range(len(self.names))]

    def answers(
        self, step: str, kind: type[S], given: Sequence[Section],
        parts: Mapping[str, ArrayRecord] = {},
    ) -> tuple[dict[int, S], dict[int, str]]:  # fmt: skip
        """(answers, why there is none) by client."""
        asked = {self.nodes[i]: one for i, one in enumerate(given)}
        clients = {node: i for i, node in self.nodes.items()}
        answers: dict[int, S] = {}
        silent = f"no answer within {self.patience:g} s"
        refused = dict.fromkeys(clients.values(), silent)
        for reply in self._send(step, asked, parts):
            i, answer = clients[reply.metadata.src_node_id], _answer(reply, kind)[0]
            if isinstance(answer, str):
                refused[i] = answer
            else:
                answers[i] = answer
                del refused[i]
        return answers, refused

    def _misfit(self, refused: Mapping[int, str]) -> str:
        names = dict(enumerate(self.names))
        each = [f'"{shown(names.get(i, "?"))}": {why}' for i, why in sorted(refused.items())]
        return (
            f"data of {len(each)} of {len(self.names)} clients do not fit: {'; '.join(each)}. "
            "`fedshift deploy check` on the client's machine says where"
        )

    def _send(
        self, step: str, asked: Mapping[int, Section], parts: Mapping[str, ArrayRecord] = {}
    ) -> list[Message]:
        messages = []
        for node, one in asked.items():
            ask = ConfigRecord({"step": step, "given": one.model_dump_json()})
            content = RecordDict({**parts, ASK: ask})
            messages.append(Message(content, message_type=f"query.{ASK}", dst_node_id=node))
        return list(self.grid.send_and_receive(messages, timeout=self.patience)) if messages else []


def _answer(reply: Message, kind: type[S]) -> tuple[S | str, int]:
    """(the answer, or why there is none; the client, -1 where it does not say)."""
    client = -1
    try:
        if (why := failure_of(reply)) is not None:
            record = reply.content.config_records.get(ASK) if reply.has_content() else None
            return why, -1 if record is None else int(str(record["client"]))
        fields = fields_of(reply.content, ASK)
        client = int(fields["client"])
        return read(kind, str(fields[ANSWER])), client
    except Exception as e:
        # The bytes come from another machine: any exception means that they are bad.
        return str(e) if isinstance(e, InputError) else f"{type(e).__name__}: {e}", client
