"""The socket that a SuperLink listens on, with limits for connections without a client's key.

A connection costs memory and a file handle from the start: half a TLS handshake is enough. So
connections are counted when they are accepted. Only few may exist that have not proved a client's
key (`guard`), and only for seconds. If there are too many, the one that has waited longest is
closed, preferably one from the same address, so that new callers always get in.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from asyncio.sslproto import SSLProtocol
from typing import Any

import uvicorn

from fedshift_deploy.inside import listening

# Most connections without a proof: from one address, and in all. A client's proof takes less than
# a second.
OF_ADDRESS, IN_ALL = 128, 192
# Most connections of one client; a SuperNode uses a few at a time.
OF_CLIENT = 64
# Seconds from the connection to the proof, including the handshake and headers.
PATIENCE = 20.0
# Length of the kernel's queue of connections, and how many the server accepts in a row.
QUEUE, AT_ONCE = 1024, 16
# Size of asyncio's read buffer, which it allocates for each connection (its default: 256 KiB); and
# after how many failed connections garbage is collected.
PIECE, GIVE_BACK = 2**15, 64


class Callers:
    """All open connections, with the client that has proved to be behind each of them."""

    def __init__(self) -> None:
        self._by_peer: dict[tuple[Any, ...], Caller] = {}
        # Dicts used as sets that keep the order of arrival.
        self._waiting: dict[Caller, None] = {}
        self._proven: dict[str, dict[Caller, None]] = {}
        self._failed = 0

    def enter(self, caller: Caller) -> None:
        """Add a new connection; if there are too many, drop the one that has waited longest."""
        same = [c for c in self._waiting if c.peer[0] == caller.peer[0]]
        if len(same) >= OF_ADDRESS:
            self._drop(same[0])
        elif len(self._waiting) >= IN_ALL:
            self._drop(next(iter(self._waiting)))
        self._by_peer[caller.peer[:2]] = caller
        self._waiting[caller] = None

    def prove(self, peer: tuple[Any, ...], who: str) -> None:
        """The connection from this address and port is client `who`'s: end its time limit."""
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
        # A newer connection may have the same port already: keep that one.
        if self._by_peer.get(caller.peer[:2]) is caller:
            del self._by_peer[caller.peer[:2]]

    def closed(self, caller: Caller) -> None:
        """Forget a connection whose handle is closed."""
        self.leave(caller)
        if not caller.who:
            self._failed += 1
            # asyncio leaves failed handshakes in reference cycles: collect them before they grow.
            if self._failed % GIVE_BACK == 0:
                gc.collect()

    def _drop(self, caller: Caller) -> None:
        self.leave(caller)
        caller.cut()

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._by_peer)


class Caller(socket.socket):
    """A connection that is closed after `PATIENCE` unless a client's key is proved on it."""

    def __init__(self, door: Door, handle: int, peer: tuple[Any, ...]) -> None:
        super().__init__(door.family, door.type, door.proto, fileno=handle)
        self.peer, self.who, self._callers = peer, "", door.callers
        self._clock = asyncio.get_running_loop().call_later(PATIENCE, self.cut)
        self._callers.enter(self)

    def stop_clock(self) -> None:
        """Remove the time limit."""
        self._clock.cancel()

    def cut(self) -> None:
        """Shut the connection down; the server then notices and closes it."""
        self.stop_clock()
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it and forget it."""
        self.stop_clock()
        super().close()
        self._callers.closed(self)


class Door(socket.socket):
    """A listening socket for asyncio's loop that records its connections in `callers`."""

    def __init__(self, host: str, port: int, callers: Callers) -> None:
        super().__init__(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.callers = callers
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind((host, port))

    def listen(self, backlog: int = QUEUE, /) -> None:
        """Listen, with a longer queue in the kernel than the server asks for."""
        # The server asks for `AT_ONCE`, since asyncio also accepts that many in a row.
        super().listen(max(backlog, QUEUE))

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address."""
        handle, peer = self._accept()  # type: ignore[attr-defined]
        return Caller(self, handle, peer), peer


def serve(app: Any, *, host: str, port: int, callers: Callers, path: str, **settings: Any) -> None:
    """`uvicorn.run` with these limits on the port, and without them on the Unix socket at `path`.

    It listens until a signal ends the process.
    """
    SSLProtocol.max_size = PIECE
    # Exclude all present objects, which will stay, so that a collection takes milliseconds.
    gc.freeze()
    # The socket first: other processes use it as soon as the port answers.
    sockets = [listening(path), Door(host, port, callers)]
    server(app, host=host, port=port, **settings).run(sockets=sockets)


def server(app: Any, **settings: Any) -> uvicorn.Server:
    """uvicorn's server, with the event loop and the HTTP parser that these limits need."""
    # asyncio's loop calls our socket's `accept`; uvloop would not. h11 limits headers (64 KiB);
    # httptools does not.
    fixed = {"loop": "asyncio", "http": "h11", "backlog": AT_ONCE}
    return uvicorn.Server(uvicorn.Config(app, **{**settings, **fixed}))
