"""Flower's SuperLink, controlled from its own machine only: `python -m fedshift.deploy.guard ...`.

It takes the arguments of `flower-superlink`. Flower serves all requests on one port. SuperNodes are
identified by their keys (/v1/fleet/). Starting runs, registering keys (/v1/control/) and acting as
the server of a run (/v1/runtime/) need no credentials at all. Any machine that reaches the port
could therefore run an app of its own on the server and on all clients. With this guard, other
machines only reach /v1/fleet/.
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
REFUSAL = b"only the server's own machine may ask for this"


class OwnMachine:
    """An ASGI application around `app`: other machines only get what SuperNodes need, else 403."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it."""
        if scope["type"] == "lifespan" or from_here(scope) or for_nodes(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            # 1008: refused by policy.
            await send({"type": "websocket.close", "code": 1008})


def for_nodes(scope: Scope) -> bool:
    """Whether Flower itself checks a SuperNode's key for this request."""
    return scope["type"] == "http" and str(scope["path"]).startswith(FLEET)


def from_here(scope: Scope) -> bool:
    """Whether a request comes from this machine: from loopback, or from its own address."""
    peer, local = (scope.get(end) or ("", 0) for end in ("client", "server"))
    try:
        # A link-local IPv6 address has its interface behind a %.
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    # A socket for both versions shows 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or peer[0] == local[0]


def put_up() -> None:
    """Put the guard before the SuperLink that Flower makes in this process."""
    from flwr.superlink import extensions
    from starlette.middleware import Middleware

    # Otherwise the server would believe a request's header about its origin.
    os.environ.pop("FORWARDED_ALLOW_IPS", None)
    # Flower's hook for middleware; it is the outermost layer.
    extensions.get_middleware = lambda: (Middleware(OwnMachine),)


def main() -> None:
    """Run the SuperLink."""
    from flwr.superlink.cli import flower_superlink

    put_up()
    flower_superlink()


if __name__ == "__main__":
    main()
