"""What a federation's server reads and stores of callers that have proved no key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest

from fedshift.errors import InputError
from fedshift_deploy import door
from fedshift_deploy.allowance import Allowance
from fedshift_deploy.door import Callers, Door, server
from fedshift_deploy.guard import (
    ASKING,
    LARGE,
    PROVEN,
    REGISTER,
    STALLED,
    UNPROVEN,
    Guard,
    in_time,
)
from fedshift_deploy.keys import read_client_key, write_authority, write_client_key
from fedshift_deploy.processes import free_port
from support.benchmark_files import load_benchmark
from support.loopback import loopback, processes
from support.signing import signed

PUSH, PULL, CONTROL = "/v1/fleet/push-object", "/v1/fleet/pull-messages", "/v1/control/start-run"
ANSWER, BEAT = "/v1/fleet/push-messages", "/v1/fleet/send-node-heartbeat"
# Where requests come in: by the port, or by the socket of the server's user.
PORT, SOCKET = ("192.0.2.1", 8000), ("/tmp/s/flower", None)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A client's key, and one that the server does not have."""
    place = tmp_path_factory.mktemp("keys")
    for name in ("client", "stranger"):
        (place / name).mkdir()
        write_client_key(place / name / "key")
    return place


def posted(keys: Path, path: str, length: int, headers: Any = (), at: Any = PORT) -> Any:
    """(status, whether the body was read) of a POST with this Content-Length."""
    sent: list[Any] = []
    reads = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        reads.append(1)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    pem, public = read_client_key(keys / "client" / "key.pub")
    allowance = Allowance()
    allowance.send(LARGE)  # a model of that size
    guard = Guard(inner, {pem: ("client-0", public)}, Callers(), SOCKET[0], allowance=allowance)
    length_header = [] if length < 0 else [(b"content-length", str(length).encode())]
    scope = {"type": "http", "path": path, "client": ("127.0.0.1", 5), "server": at,
             "headers": [*length_header, *headers]}  # fmt: skip
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], bool(reads), sent[0]["headers"]


def test_the_size_of_a_body_depends_on_what_its_sender_has_proved(keys: Path) -> None:
    client = signed(keys / "client")
    for path, headers, most in (
        (PUSH, [], UNPROVEN),
        (PUSH, signed(keys / "stranger"), UNPROVEN),
        (PUSH, signed(keys / "stranger", claim=keys / "client"), UNPROVEN),
        (PUSH, [*client[:1], (b"flwr-signature", b"?!"), client[2]], UNPROVEN),
        (PUSH, client, LARGE),
        (ANSWER, client, PROVEN),
        (PULL, client, ASKING),
        (BEAT, client, ASKING),
    ):
        assert posted(keys, path, most, headers)[:2] == (200, True)
        status, read, answer = posted(keys, path, most + 1, headers)
        assert (status, read) == (413, False)
        # Or the server would read on.
        assert (b"connection", b"close") in answer
    assert posted(keys, CONTROL, PROVEN, at=SOCKET)[0] == 200
    assert posted(keys, CONTROL, PROVEN + 1, at=SOCKET)[:2] == (413, False)
    # The socket proves no client's key.
    assert posted(keys, PUSH, UNPROVEN + 1, at=SOCKET)[:2] == (413, False)
    assert posted(keys, CONTROL, 1)[:2] == (403, False)


def test_a_client_asks_in_few_bytes(keys: Path) -> None:
    """Otherwise each connection could hold megabytes; pieces of its answers may be as large."""
    client, size = signed(keys / "client"), 2**20
    assert posted(keys, BEAT, size, client)[:2] == (413, False)
    assert posted(keys, PUSH, size, client)[:2] == (200, True)


def test_honest_questions_are_a_fraction_of_that() -> None:
    """The longest requests of Flower's SuperNode: largest numbers, keys and hashes."""
    node, largest, hashed = Node(node_id=2**64 - 1), 2**64 - 1, "f" * 64
    pem = ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip
    for question in (
        fleet_pb2.ActivateNodeRequest(public_key=pem, heartbeat_interval=30.0),
        SendNodeHeartbeatRequest(node=node, heartbeat_interval=30.0),
        fleet_pb2.PullMessagesRequest(node=node),
        GetRunRequest(node=node, run_id=largest),
        GetFabRequest(node=node, hash_str=hashed, run_id=largest),
        message_pb2.PullObjectRequest(node=node, run_id=largest, object_id=hashed),
        message_pb2.ConfirmMessageReceivedRequest(
            node=node, run_id=largest, message_object_id=hashed
        ),
    ):
        assert question.ByteSize() < ASKING // 64


def test_super_nodes_wait_until_all_keys_are_registered(keys: Path) -> None:
    """Flower refuses keys that are not registered yet as it refuses unknown ones."""

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        status = 500 if scope["query_string"] else 200
        await send({"type": "http.response.start", "status": status, "headers": []})

    guard = Guard(inner, {}, Callers(), SOCKET[0], unregistered=2)

    def status(path: str, at: Any = PORT, query: bytes = b"") -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "path": path, "client": ("127.0.0.1", 5), "server": at,
                 "headers": [], "query_string": query}  # fmt: skip
        asyncio.run(guard(scope, receive, send))
        return int(sent[0]["status"])

    for key in ((REGISTER, SOCKET), (REGISTER, PORT), (CONTROL, SOCKET)):
        assert status(PULL) == 503
        status(*key)
    assert status(REGISTER, SOCKET, b"fails") == 500
    assert status(PULL) == 503
    assert status(REGISTER, SOCKET) == 200
    assert status(PULL) == 200


def test_bodies_of_unknown_length_are_refused(keys: Path) -> None:
    pieces = [(b"transfer-encoding", b"chunked")]
    assert posted(keys, PUSH, -1, [*pieces, *signed(keys / "client")])[:2] == (411, False)
    assert posted(keys, PULL, -1)[0] == 200


def test_a_body_that_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender counts as gone; a sender with a complete body is waited for."""
    monkeypatch.setattr("fedshift_deploy.guard.STALLED", 0.05)
    parts = [{"type": "http.request", "body": b"a", "more_body": more} for more in (True, False)]

    def stalls_after(n: int) -> Any:
        left = iter(parts[:n])

        async def receive() -> Any:
            for part in left:
                return part
            await asyncio.sleep(0.5)
            return {"type": "late"}

        return in_time(receive)

    async def heard(n: int) -> list[str]:
        receive = stalls_after(n)
        return [(await receive())["type"] for _ in range(n + 1)]

    assert asyncio.run(heard(1)) == ["http.request", "http.disconnect"]
    assert asyncio.run(heard(2)) == ["http.request", "http.request", "late"]


def test_the_page_says_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    for row in (
        f"key | {UNPROVEN // 1024} KiB, else 413",
        f"question of a client's | {ASKING // 1024} KiB",
        f"socket | {PROVEN // 2**20} MiB; {LARGE // 2**20} MiB for",
        f"key | {door.PATIENCE:g} s |",
        f"announced | {STALLED:g} s |",
        f"proof | {door.OF_ADDRESS} of one address, {door.IN_ALL} in all",
        f"client | {door.OF_CLIENT}; the oldest",
    ):
        assert row in page


def test_keys_that_are_no_keys(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text("hello")
    with pytest.raises(InputError, match="key.pub: not a public key; take the one"):
        read_client_key(tmp_path / "key.pub")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[int, Callers]]:
    """The port of an application that treats callers of /prove as proved, and its connections."""
    callers, port = Callers(), free_port()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/prove":
            callers.prove(scope["client"], "client-0")
        length = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"yes"})

    write_authority(folder, ["localhost"])
    running = server(
        app, ssl_certfile=folder / "server.crt", ssl_keyfile=folder / "server.key",
        lifespan="off", log_config=None, timeout_keep_alive=30, timeout_graceful_shutdown=1,
    )  # fmt: skip
    listening = Door("127.0.0.1", port, callers)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        yield port, callers
    finally:
        running.should_exit = True
        thread.join(30)
        listening.close()


def connect(port: int, address: str, *, tls: bool) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), 10.0, source_address=(address, 0))
    if not tls:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(plain)


def ask(caller: socket.socket, path: str) -> str:
    """The status of the answer, after reading all of it."""
    caller.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"yes") and (more := caller.recv(1000)):
        answer += more
    return answer[9:12].decode()


def cut(caller: socket.socket) -> bool:
    """Whether the server ends a connection within ten seconds."""
    try:
        return caller.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


here = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is no address here")


@pytest.mark.slow
@here
@pytest.mark.parametrize("tls", [False, True])
def test_idle_connections_starve_no_one(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connection of the same address is closed first, then the oldest of all."""
    monkeypatch.setattr(door, "OF_ADDRESS", 4)
    monkeypatch.setattr(door, "IN_ALL", 6)
    with serving(tmp_path) as (port, callers), contextlib.ExitStack() as opened:
        proven = opened.enter_context(connect(port, "127.0.0.9", tls=True))
        assert ask(proven, "/prove") == "200"
        idle = [opened.enter_context(connect(port, "127.0.0.2", tls=tls)) for _ in range(20)]
        assert all(cut(one) for one in idle[:16])
        idle += [opened.enter_context(connect(port, "127.0.0.3", tls=tls)) for _ in range(4)]
        assert all(cut(one) for one in idle[16:18])
        new = opened.enter_context(connect(port, "127.0.0.4", tls=True))
        assert ask(new, "/") == "200"
        assert len(callers) == 7
        # The one with a proof is counted apart.
        assert ask(proven, "/") == "200"


@here
def test_without_limits_all_connections_stay(tmp_path: Path) -> None:
    """The control of the test above."""
    with serving(tmp_path) as (port, callers), contextlib.ExitStack() as opened:
        for _ in range(20):
            opened.enter_context(connect(port, "127.0.0.2", tls=True))
        assert len(callers) == 20


@pytest.mark.parametrize("tls", [False, True])
def test_callers_that_prove_nothing_are_cut_off(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the handshake and after it; connections that have proved a key stay."""
    monkeypatch.setattr(door, "PATIENCE", 1.0)
    with serving(tmp_path) as (port, callers), contextlib.ExitStack() as opened:
        proven = opened.enter_context(connect(port, "127.0.0.1", tls=True))
        assert ask(proven, "/prove") == "200"
        idle = opened.enter_context(connect(port, "127.0.0.1", tls=tls))
        if tls:
            idle.sendall(b"GET / HTTP/1.1\r\n")  # and no end of the headers
        assert cut(idle)
        assert ask(proven, "/") == "200"
        assert len(callers) == 1


def test_a_client_has_a_number_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "OF_CLIENT", 2)
    with serving(tmp_path) as (port, _), contextlib.ExitStack() as opened:
        many = [opened.enter_context(connect(port, "127.0.0.1", tls=True)) for _ in range(3)]
        for one in many:
            assert ask(one, "/prove") == "200"
        assert cut(many[0])
        assert ask(many[2], "/") == "200"


def test_headers_are_limited(tmp_path: Path) -> None:
    with serving(tmp_path) as (port, _), connect(port, "127.0.0.1", tls=True) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(50):  # more than all buffers between the two have room for
                caller.sendall((b"x-filler: " + b"a" * 1000 + b"\r\n") * 1000)
            pytest.fail("50 megabytes of headers were taken")


@pytest.fixture
def floods(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of callers without a key."""
    return load_benchmark("floods.py", monkeypatch)


def superlink_of(port: int) -> int:
    """The process that listens on this port."""
    (pid,) = (p for p, a in processes("fedshift_deploy.guard").items() if f"--port {port}" in a)
    return pid


@pytest.mark.slow
def test_a_superlink_under_floods(tmp_path: Path, floods: Any) -> None:
    """Flower's SuperLink grows by less than 50 MB, and has time for new callers."""
    with loopback(tmp_path / "f", 'name = "x"\n', 1) as fed:
        for flood in floods.floods(superlink_of(fed.port), fed.port, 200, 600):
            assert flood.growth < 50, flood
            assert flood.seconds < 10, flood


@pytest.mark.slow
def test_a_client_holds_little_of_a_superlink(tmp_path: Path, floods: Any) -> None:
    """Less than 50 MB by 48 connections, each with a heartbeat of all but 8 MiB.

    The control: a piece of an answer, which may have as many, is seen in the memory.
    """
    size = PROVEN - 1
    with loopback(tmp_path / "f", 'name = "x"\n', 1) as fed, contextlib.ExitStack() as opened:
        lines = [b"%s: %s\r\n" % pair for pair in signed(fed.place(0))]
        lines += [b"host: x\r\ncontent-type: application/protobuf\r\n\r\n"]

        def begin(path: str) -> None:
            head = f"POST {path} HTTP/1.1\r\ncontent-length: {size}\r\n".encode()
            caller = opened.enter_context(floods.connect(fed.port))
            with contextlib.suppress(OSError):
                caller.sendall(head + b"".join(lines) + bytes(size - 1))

        with floods.watched(superlink_of(fed.port)) as peak:
            for _ in range(48):
                begin(BEAT)
            time.sleep(1.0)
            assert peak() < 50
        with floods.watched(superlink_of(fed.port)) as peak:
            begin(PUSH)
            time.sleep(1.0)
            assert peak() > 5
