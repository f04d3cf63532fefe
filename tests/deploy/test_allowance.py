"""The size of a client's answers: counted piece by piece; only the server's questions renew it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift_deploy.allowance import ANSWERS, LEAST, PIECE, QUESTION, Allowance, times_of
from fedshift_deploy.door import Callers
from fedshift_deploy.guard import Guard
from fedshift_deploy.keys import read_client_key, write_client_key
from fedshift_deploy.uploads import CALLER, watch_uploads
from support.signing import signed

SOCKET, PORT = ("/tmp/a-socket", None), ("192.0.2.1", 8000)
PUSH, PULL = "/v1/fleet/push-object", "/v1/fleet/pull-messages"
MEGA = 2**20


def test_an_answer_is_bounded_by_the_largest_question() -> None:
    allowance = Allowance(times=4)
    assert allowance.most == LEAST
    allowance.ask()
    for _ in range(10):
        allowance.send(MEGA)
    assert allowance.most == 40 * MEGA
    # The same question again: the SuperLink has its pieces, and none is sent.
    allowance.ask()
    assert allowance.most == 40 * MEGA
    assert allowance.take("client-0", 40 * MEGA)
    assert not allowance.take("client-0", 1)
    assert allowance.take("client-1", MEGA)  # each has its own
    allowance.ask()
    assert allowance.take("client-0", 40 * MEGA)


def test_how_many_times_the_model(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    assert times_of(file) == 8.0
    file.write_text("[training]\nmax_reply = 2.5\n")
    assert times_of(file) == 2.5
    file.write_text("[training]\n")
    assert times_of(file) == 8.0


def test_a_huge_answer_is_refused_unread(tmp_path: Path) -> None:
    """300 MB in pieces of 5 MiB in answer to a model of 100 kB; then the server asks again."""
    (tmp_path / "client").mkdir()
    write_client_key(tmp_path / "client" / "key")
    pem, public = read_client_key(tmp_path / "client" / "key.pub")
    read: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        read.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    ended: list[str] = []
    guard = Guard(inner, {pem: ("client-0", public)}, Callers(), SOCKET[0], end_upload=ended.append)

    def post(path: str, length: int, at: Any = PORT) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-length", str(length).encode())]
        headers += signed(tmp_path / "client") if at is PORT else []
        scope = {"type": "http", "path": path, "client": ("127.0.0.1", 5), "server": at,
                 "headers": headers}  # fmt: skip
        asyncio.run(guard(scope, receive, send))
        return int(sent[0]["status"])

    assert post(QUESTION, 500, SOCKET) == 200
    assert post(PIECE, 100_000, SOCKET) == 200
    answers = [post(PUSH, 5 * MEGA) for _ in range(60)]
    assert answers == [200] + [413] * 59
    assert read.count(PUSH) == 1
    assert ended == ["client-0"] * 59
    assert post(PULL, 300) == 200  # all else goes on
    # No request of a client renews it, the server's question does.
    assert {post(path, 4 * MEGA) for path in ANSWERS} == {413}
    assert post(QUESTION, 500, SOCKET) == 200
    assert post(PUSH, 5 * MEGA) == 200


def test_an_upload_ends_with_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower itself would wait three minutes for the refused pieces of an answer."""
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    # Put back after the test what the guard's process puts in Flower's place.
    for name in ("start_session", "store_object"):
        monkeypatch.setattr(InMemoryCoreState, name, getattr(InMemoryCoreState, name))
    plain = InMemoryCoreState.store_object
    end = watch_uploads()
    state = InMemoryNodeState(ObjectStoreFactory().store())

    def announce(client: str, piece: str) -> str:
        CALLER.set(client)
        session = state.start_session(1)
        state.preregister_object_tree(ObjectTree(object_id=piece), session)
        return session

    one, two, three = "a" * 64, "b" * 64, "c" * 64
    session = announce("client-0", one)
    announce("client-1", two)
    assert state.get_object(1, one) == state.get_object(1, two) == b""  # to come
    end("client-0")
    # A piece that was under way then leaves it to the server's question to end the upload.
    assert not state.store_object(1, session, one, b"late")
    assert state.object_store.get(one) == b""
    assert state.get_object(1, one) is None
    # The control: Flower alone takes it away, so that the server's app is answered nothing.
    session = announce("client-3", three)
    end("client-3")
    assert not plain(state, 1, session, three, b"late")
    assert state.object_store.get(three) is None
    assert state.get_object(1, two) == b""
    end("client-0")  # again: it has begun none since
    end("client-2")
