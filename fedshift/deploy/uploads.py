"""Clients' uploads to the SuperLink, and how one ends at once whose pieces the guard refuses.

Flower waits three minutes for the next piece of an answer that was announced. The client whose
piece was refused sends no more, so that the round would wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fedshift.flower.installed import put_in_place

# The client whose request is handled; "" outside of one.
CALLER: ContextVar[str] = ContextVar("caller", default="")


def watch_uploads() -> Callable[[str], None]:
    """Note which upload each client has begun; the result ends a client's latest one.

    It ends by the clock: the server's app is then answered that the pieces will not come.
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
        # A client sends several pieces at once. One that was under way at the refusal would renew
        # the upload, or take it away before the server's app has asked for it and is answered.
        if session_id in ended:
            return False
        return store(state, run_id, session_id, object_id, object_content)

    def end(client: str) -> None:
        state, session = latest.pop(client, (None, ""))
        if state is not None:
            ended.add(session)
            with state._lock_object_push_sessions:
                if upload := state._object_push_sessions.get(session):
                    upload.expires_at = now()

    put_in_place(InMemoryCoreState, "start_session", started)
    put_in_place(InMemoryCoreState, "store_object", stored)
    return end
