"""End a client's upload to the SuperLink at once if the guard refuses one of its pieces.

Flower waits three minutes for the next piece of an answer that was announced. A client whose piece
was refused sends no more, so the round would wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fedshift.flower.installed import put_in_place

# The client whose request is being handled; "" outside of requests.
CALLER: ContextVar[str] = ContextVar("caller", default="")


def watch_uploads() -> Callable[[str], None]:
    """Record which upload each client has begun; return a function that ends a client's latest.

    It sets the upload's time limit to now: Flower then tells the server's app that no more pieces
    will come.
    """
    from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState
    from flwr.supercore.date import now

    start, store = InMemoryCoreState.start_session, InMemoryCoreState.store_object
    latest, ended = dict[str, tuple[Any, str]](), set[str]()

    def started(state: Any, run_id: int) -> str:
        session = start(state, run_id)
        latest[CALLER.get()] = state, session
        return session

    def stored(
        state: Any, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        # A client sends several pieces at once. A piece that was under way at the refusal would
        # renew the time limit, or remove the upload before the server's app has asked for it.
        if session_id in ended:
            return False
        return store(state, run_id, session_id, object_id, object_content)

    def end(client: str) -> None:
        """End a client's latest upload, if it has one."""
        state, session = latest.pop(client, (None, ""))
        if state is not None:
            ended.add(session)
            with state._lock_object_push_sessions:
                if upload := state._object_push_sessions.get(session):
                    upload.expires_at = now()

    put_in_place(InMemoryCoreState, "start_session", started)
    put_in_place(InMemoryCoreState, "store_object", stored)
    return end
