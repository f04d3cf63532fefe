"""A client that registers false counts and trains as the others do."""

from __future__ import annotations

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.flower.client import partition
from fedshift.flower.records import to_parts, to_record

LIE = 1e9


def lied(content: RecordDict) -> RecordDict:
    """A registration that claims 10^9 examples, as many of each label."""
    table = to_parts(content.array_records)["table"]
    if "labels" in table:
        table["labels"] = torch.full_like(table["labels"], LIE / len(table["labels"]))
    return RecordDict({**content, "table": to_record(table | {"n": torch.tensor(LIE).double()})})


class Lying:
    """The app, in which one client registers false counts."""

    def __init__(self, app: ClientApp, liar: int) -> None:
        self.app, self.liar = app, liar

    def __call__(self, message: Message, context: Context) -> Message:
        reply = self.app(message, context)
        if message.metadata.message_type == "query.register" and partition(context) == self.liar:
            reply.content = lied(reply.content)
        return reply
