"""A Flower client app that misbehaves by a plan, in its messages' bytes as well as in tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.engine.backends import Reply
from fedshift.errors import unknown
from fedshift.flower.client import partition
from fedshift.flower.records import parts_of, to_records
from fedshift.testing.attacks import ATTACKS, spoil
from fedshift.testing.faults import FaultPlan

# Changes of an array's bytes, by name.
BYTES: Mapping[str, Callable[[bytes], bytes]] = {
    "bytes cut in half": lambda data: data[: len(data) // 2],
    "bytes but the last": lambda data: data[:-1],
    "no bytes": lambda data: b"",
    "another magic": lambda data: b"PK\x03\x04" + data[4:],
    "a pickle": lambda data: pickle.dumps({"x": 1}),
    "a header of objects": lambda data: data.replace(b"'<f4'", b"'|O' ", 1),
    "a header of terabytes": lambda data: data.replace(b"'shape': (", b"'shape': (1099511627776, "),
    "a header that is code": lambda data: data.replace(b"{'descr'", b"{'x':()}", 1),
    "bytes behind the end": lambda data: data + b"\0" * 64,
}


def faulty_app(app: ClientApp, plan: FaultPlan, seed: int = 0) -> ClientApp:
    """The app, with its answers to "train" spoilt by `plan`; other messages are passed on.

    plan: as in `fedshift.testing.faults`, with the names of `BYTES` as well. An app answers each
    message once, so "drop" and "delay" become errors, and duplicates arrive once. Raises InputError
    for unknown names.
    """
    faulty = ClientApp()

    @faulty.train()
    def train(message: Message, context: Context) -> Message:
        t, reply = int(message.content["run"]["round"]), app(message, context)  # type: ignore
        name = plan(t, partition(context))
        if name is not None:
            reply.content = spoilt(name, reply.content, partition(context), t, seed)
        return reply

    @faulty.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return app(message, context)

    # Other queries pass unchanged: the faults are those of training.
    for kind in ("register", "state"):

        @faulty.query(kind)
        def query(message: Message, context: Context) -> Message:
            return app(message, context)

    return faulty


def spoilt(name: str, content: RecordDict, client: int, t: int, seed: int = 0) -> RecordDict:
    """A client's answer to "train" after the attack of this name.

    Raises RuntimeError for answers that never come, as a failing client would.
    """
    if name in BYTES:
        return _bytes(BYTES[name], content)
    if name not in ATTACKS:
        raise unknown("attack", name, [*ATTACKS, *BYTES])
    replies = spoil(name, Reply(client, parts_of(content), {}, t), seed)
    # Flower waits for one answer per message, so one that is late or lost must become an error.
    if not replies or name == "delay":
        raise RuntimeError("no answer")
    run = ConfigRecord({"round": replies[0].t})
    return RecordDict({**to_records(replies[0].update), "run": run})


def _bytes(change: Callable[[bytes], bytes], content: RecordDict) -> RecordDict:
    """The answer with the bytes of one array changed."""
    record = content.array_records["delta"]
    # One array is enough, since the reader must then refuse the whole answer.
    name, array = next(iter(record.items()))
    data = change(array.data)
    forged = Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=data)
    delta = ArrayRecord({**dict(record.items()), name: forged})
    others = {k: v for k, v in content.items() if k != "delta"}
    return RecordDict({**others, "delta": delta})
