"""Flower's SuperLink behind a guard: `python -m fedshift_deploy.guard FOLDER ADDRESS ...`.

FOLDER is the federation's, ADDRESS is in its certificate; then come the arguments of
`flower-superlink`. Flower serves all requests on one port. SuperNodes are identified by their keys
(/v1/fleet/). But starting runs, registering keys (/v1/control/) and acting as the server of a run
(/v1/runtime/) need no credentials at all. So any machine, or other user of this machine, that
reaches the port could run an app on the server and on all clients. With this guard the port serves
only /v1/fleet/. Everything else comes over a socket that only the server's user can open
(`inside`).

Flower also reads a request's whole body before it checks the key. The guard first checks the key,
which is in the headers: without a valid one a body must be small, with one it may be as large as
Flower's pieces of a model. `door` limits the connections themselves.

Until all keys are registered, SuperNodes are told to wait (503). Flower would refuse a client whose
key it does not know yet, like a stranger.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fedshift.flower.installed import put_in_place
from fedshift_deploy.allowance import ANSWERS, PIECE, QUESTION, Allowance, times_of
from fedshift_deploy.door import Callers, serve
from fedshift_deploy.inside import SOCKET, executor
from fedshift_deploy.keys import read_client_key
from fedshift_deploy.log_records import show_controls
from fedshift_deploy.place import EXPERIMENT, clients_of
from fedshift_deploy.uploads import CALLER, watch_uploads

FLEET = "/v1/fleet/"
# Most bytes of a body:
# UNPROVEN  without a client's key
# ASKING    with one, in requests that are no answers (numbers, a key or a hash, less than 1 KiB)
# PROVEN    in the outline of an answer, and over the server's socket
# LARGE     in pieces of models: Flower cuts arrays into pieces of 5 MiB, but the server's app sends
#           its state (push-task-output) in one piece
UNPROVEN, ASKING, PROVEN, LARGE = 2**12, 2**16, 2**23, 2**25
REGISTER = "/v1/control/register-node"
LARGE_ONES = ("/push-object", "/push-task-output")
# Seconds without a byte after which a body that was announced is given up.
STALLED = 60.0
HERE = "this user"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Keys = Mapping[bytes, tuple[str, ec.EllipticCurvePublicKey]]
REFUSAL = "only the user that runs the server may ask for this, over its socket"


class Guard:
    """An ASGI application around `app` that refuses requests by socket, key and size of the body.

    The port serves what SuperNodes need, and 403 otherwise; the Unix socket at `path` serves all.
    Bodies that are too large for their sender get 413, those of unknown size 411; they are not
    read.

    allowance     limit of clients' answers
    unregistered  number of keys still to be registered; until then SuperNodes get 503
    end_upload    called with a client whose answer is refused
    """

    def __init__(
        self, app: App, keys: Keys, callers: Callers, path: str, unregistered: int = 0,
        allowance: Allowance | None = None, end_upload: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.end_upload = end_upload or (lambda client: None)
        self.app, self.keys, self.callers, self.path = app, keys, callers, path
        self.allowance, self.unregistered = allowance or Allowance(), unregistered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it."""
        if scope["type"] == "lifespan":  # the server's own start and end, not a request
            await self.app(scope, receive, send)
        elif not (came_over_socket(scope, self.path) or is_for_nodes(scope)):
            await refuse(scope, send, 403, REFUSAL)
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif is_for_nodes(scope) and self.unregistered > 0:
            await refuse(scope, send, 503, "keys are being registered; try again")
        elif scope["path"] == REGISTER:
            await self._handle(scope, receive, self._count_registrations(send))
        else:
            await self._handle(scope, receive, send)

    def _count_registrations(self, send: Send) -> Send:
        async def counted(message: MutableMapping[str, Any]) -> None:
            if message.get("status") == 200:  # Flower has accepted the key
                self.unregistered -= 1
            await send(message)

        return counted

    def _allows(self, path: str, who: str, size: int) -> bool:
        """Whether a body is within the allowance, which each question of the server renews."""
        if who == HERE and path == QUESTION:
            self.allowance.ask()
        elif who == HERE and path == PIECE:
            self.allowance.send(size)
        return not (who and path in ANSWERS) or self.allowance.take(who, size)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        who = client_of(headers, self.keys) if is_for_nodes(scope) else HERE
        if b"transfer-encoding" in headers:
            await refuse(scope, send, 411, "say how long the body is")
        elif (size := int(headers.get(b"content-length", b"0"))) > (most := body_limit(scope, who)):
            await refuse(scope, send, 413, f"a body may have {most} bytes here")
        elif not self._allows(str(scope["path"]), who, size):
            most = self.allowance.most
            self.end_upload(who)
            await refuse(scope, send, 413, f"an answer may have {most} bytes in all")
        else:
            if who:
                self.callers.prove(scope.get("client") or (), who)
            CALLER.set(who)
            await self.app(scope, in_time(receive), send)


async def refuse(scope: Scope, send: Send, status: int, why: str) -> None:
    """Answer a request without reading its body, and close the connection."""
    if scope["type"] == "http":
        # "close", or the server would read the body after all to get at the next request.
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": why.encode()})
    else:
        # 1008: refused by policy.
        await send({"type": "websocket.close", "code": 1008})


def in_time(receive: Receive) -> Receive:
    """`receive`, but a caller that sends no part of its body for a minute counts as gone."""
    more = True

    async def received() -> MutableMapping[str, Any]:
        nonlocal more
        try:
            # After the body, `receive` waits for the end of the connection: without a limit.
            message = await asyncio.wait_for(receive(), STALLED if more else None)
        except TimeoutError:
            return {"type": "http.disconnect"}
        more = bool(message.get("more_body", False))
        return message

    return received


def body_limit(scope: Scope, who: str) -> int:
    """How many bytes a request's body may have."""
    path = str(scope["path"])
    if not who:
        return UNPROVEN
    # Answers are limited by `allowance`. Other bodies must be small, because a client may send one
    # on each of its connections at the same time.
    if who != HERE and path not in ANSWERS:
        return ASKING
    return LARGE if path.endswith(LARGE_ONES) else PROVEN


def client_of(headers: Mapping[bytes, bytes], keys: Keys) -> str:
    """The client that has signed a request's headers; "" if none has.

    Flower later checks that the signed time is the present, and that the key is the node's.
    """
    try:
        key, signature = (
            base64.b64decode(headers[name], validate=True)
            for name in (b"flwr-public-key", b"flwr-signature")
        )
        name, public = keys[key]
        public.verify(signature, headers[b"flwr-timestamp"], ec.ECDSA(hashes.SHA256()))
    except (KeyError, ValueError, InvalidSignature):
        return ""
    return name


def is_for_nodes(scope: Scope) -> bool:
    """Whether Flower itself checks a SuperNode's key for this request."""
    return scope["type"] == "http" and str(scope["path"]).startswith(FLEET)


def came_over_socket(scope: Scope, path: str) -> bool:
    """Whether a request came over the Unix socket at this path."""
    # Do not use the caller's address, which is also missing for a TCP connection that has just
    # ended.
    return (scope.get("server") or ("",))[0] == path


def put_up(folder: Path) -> None:
    """Put the guard in front of the SuperLink that Flower makes in this process."""
    import uvicorn
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    # With this variable uvicorn would believe what a request's headers say about its origin.
    os.environ.pop("FORWARDED_ALLOW_IPS", None)
    callers, keys = Callers(), dict[bytes, tuple[str, ec.EllipticCurvePublicKey]]()
    path = os.environ[SOCKET]
    for place in clients_of(folder):
        sent, key = read_client_key(place / "key.pub")
        keys[sent] = place.name, key
    # Flower's hook for middleware; it is the outermost layer.
    given: dict[str, Any] = {
        "keys": keys, "callers": callers, "path": path, "unregistered": len(keys),
        "allowance": Allowance(times_of(folder / EXPERIMENT)), "end_upload": watch_uploads(),
    }  # fmt: skip
    put_in_place(extensions, "get_middleware", lambda: (Middleware(Guard, **given),))
    # Flower has no hook for the server itself, so replace the function that it calls.
    uvicorn.run = functools.partial(serve, callers=callers, path=path)


def main() -> None:
    """Run the SuperLink and the process that starts its tasks, by the certificate's address."""
    from flwr.superlink.cli import flower_superlink

    folder, address = Path(sys.argv.pop(1)), sys.argv.pop(1)
    show_controls()
    put_up(folder)
    with executor(address, "--root-certificates", str(folder / "ca.crt")):
        flower_superlink()


if __name__ == "__main__":
    main()
