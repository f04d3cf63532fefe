"""The socket that a SuperLink listens on: callers without a key get little room and little time.

A connection costs memory and a file handle before it has said anything: half a TLS handshake is
enough. So connections are counted as they are accepted. A caller that has not proved a client's key
(`guard`) is one of few, and is cut off after seconds. Where too many wait, the one that has waited
longest makes room, first among those of the same address: new callers always get in.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from asyncio.sslproto import SSLProtocol
from typing import Any

import uvicorn

from fedshift.deploy.inside import listening

# Connections without a proof: of one address, and in all. It takes a client less than a second.
OF_ADDRESS, IN_ALL = 128, 192
# Connections of one client; a SuperNode uses a few at a time.
OF_CLIENT = 64
# Seconds from the connection to the proof: handshake, headers and all.
PATIENCE = 20.0
# Callers that the kernel keeps until they are accepted, and those that are accepted at a stretch.
QUEUE, AT_ONCE = 1024, 16
# Bytes that asyncio reads of a connection at a time, and takes from the memory at its beginning
# (256 KiB by itself); and failed connections until their memory is given back.
PIECE, GIVE_BACK = 2**15, 64


class Callers:
    """All open connections, by who has proved to be behind them."""

    def __init__(self) -> None:
        self._by_peer: dict[tuple[Any, ...], Caller] = {}
        # In the order in which they came; dicts for their order.
        self._waiting: dict[Caller, None] = {}
        self._proven: dict[str, dict[Caller, None]] = {}
        self._failed = 0

    def enter(self, caller: Caller) -> None:
        """Take a new connection in; the one that has waited longest makes room for it."""
        same = [c for c in self._waiting if c.peer[0] == caller.peer[0]]
        if len(same) >= OF_ADDRESS:
            self._drop(same[0])
        elif len(self._waiting) >= IN_ALL:
            self._drop(next(iter(self._waiting)))
        self._by_peer[caller.peer[:2]] = caller
        self._waiting[caller] = None

    def prove(self, peer: tuple[Any, ...], who: str) -> None:
        """The connection from this address and port is `who`'s, and need not hurry any more."""
        caller = self._by_peer.get(tuple(peer[:2]))
        if caller is None or caller not in self._waiting:
            return
        del self._waiting[caller]
        caller.stop_clock()
        caller.who = who
        mine = self._proven.setdefault(who, {})
        if len(mine) >= OF_CLIENT:
            self._drop(next(iter(mine)))
        mine[caller] = None

    def leave(self, caller: Caller) -> None:
        """Forget a connection."""
        self._waiting.pop(caller, None)
        self._proven.get(caller.who, {}).pop(caller, None)
        # A new connection may have the same port already.
        if self._by_peer.get(caller.peer[:2]) is caller:
            del self._by_peer[caller.peer[:2]]

    def closed(self, caller: Caller) -> None:
        """Forget a connection whose handle is closed."""
        self.leave(caller)
        if not caller.who:
            self._failed += 1
            # asyncio leaves failed handshakes in circles, which wait for Python's rare collection.
            if self._failed % GIVE_BACK == 0:
                gc.collect()

    def _drop(self, caller: Caller) -> None:
        self.leave(caller)
        caller.cut()

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._by_peer)


class Caller(socket.socket):
    """A connection, which its time-out cuts unless it is proven before."""

    def __init__(self, door: Door, handle: int, peer: tuple[Any, ...]) -> None:
        super().__init__(door.family, door.type, door.proto, fileno=handle)
        self.peer, self.who, self._callers = peer, "", door.callers
        self._clock = asyncio.get_running_loop().call_later(PATIENCE, self.cut)
        self._callers.enter(self)

    def stop_clock(self) -> None:
        """Let the connection stay as long as it likes."""
        self._clock.cancel()

    def cut(self) -> None:
        """End the connection; the server closes it when it notices."""
        self.stop_clock()
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it and forget it."""
        self.stop_clock()
        super().close()
        self._callers.closed(self)


class Door(socket.socket):
    """A listening socket for asyncio's own loop, whose connections are in `callers`."""

    def __init__(self, host: str, port: int, callers: Callers) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.callers = callers
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))

    def listen(self, backlog: int = QUEUE, /) -> None:
        """Listen, with the kernel's queue longer than the server asks for."""
        # The server's number is also how many it accepts at a stretch, each with a TLS of its own.
        super().listen(max(backlog, QUEUE))

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address."""
        handle, peer = self._accept()  # type: ignore[attr-defined]
        return Caller(self, handle, peer), peer


def serve(app: Any, *, host: str, port: int, callers: Callers, path: str, **settings: Any) -> None:
    """`uvicorn.run` with these limits, and also on the Unix socket at `path`, without limits.

    It listens until a signal ends the process.
    """
    SSLProtocol.max_size = PIECE
    # What is there now stays: a collection that passes it over takes milliseconds.
    gc.freeze()
    # In this order: once the port answers, the socket does, too.
    sockets = [listening(path), Door(host, port, callers)]
    server(app, host=host, port=port, **settings).run(sockets=sockets)


def server(app: Any, **settings: Any) -> uvicorn.Server:
    """uvicorn's server, of parts that this door works with."""
    # asyncio's loop asks our socket for connections; uvloop would not. h11 bounds headers (64 KiB);
    # httptools does not.
    fixed = {"loop": "asyncio", "http": "h11", "backlog": AT_ONCE}
    return uvicorn.Server(uvicorn.Config(app, **{**settings, **fixed}))
