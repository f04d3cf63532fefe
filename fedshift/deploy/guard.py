"""Flower's SuperLink, which obeys its own machine alone: `python -m fedshift.deploy.guard ...`.

It takes the arguments of `flower-superlink`. Flower answers everybody on one port: SuperNodes, by
their keys (/v1/fleet/), and, asking for nothing, whoever starts runs and registers keys
(/v1/control/) or plays the server of a run (/v1/runtime/). Whoever reaches that port could run an
app of his own on the server and on all clients. Other machines get no further than /v1/fleet/.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

FLEET = "/v1/fleet/"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
TOLD = b"only the server's own machine may ask for this"


class OwnMachine:
    """An ASGI application around `app`: other machines get what SuperNodes need, and else 403."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it."""
        if scope["type"] == "lifespan" or from_here(scope) or for_nodes(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": TOLD})
        else:
            await send({"type": "websocket.close", "code": 1008})


def for_nodes(scope: Scope) -> bool:
    """Whether a request is one of those that Flower lets in by a SuperNode's key."""
    return scope["type"] == "http" and str(scope["path"]).startswith(FLEET)


def from_here(scope: Scope) -> bool:
    """Whether a request comes from this machine: from loopback, or the address that it came to."""
    peer, own = (scope.get(end) or ("", 0) for end in ("client", "server"))
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or peer[0] == own[0]


def put_up() -> None:
    """Have Flower's SuperLink, when it is made in this process, stand behind the guard."""
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    # Else what a request says of its origin would be believed.
    os.environ.pop("FORWARDED_ALLOW_IPS", None)
    # Flower's own place for middleware, the outermost.
    extensions.get_middleware = lambda: (Middleware(OwnMachine),)


def main() -> None:
    """Run the SuperLink."""
    from flwr.superlink.cli import flower_superlink

    put_up()
    flower_superlink()


if __name__ == "__main__":
    main()
