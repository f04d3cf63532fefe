"""What a user gives as a backend, and what such a backend answers, checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from traceback import walk_tb
from types import FunctionType

from fedshift.arguments import called
from fedshift.engine.backend_names import IN_PYTHON
from fedshift.engine.backends import UNSEEN, Backend, Block, ClientUpdate, Job, Reply
from fedshift.engine.sums.summing import InBlocks
from fedshift.errors import InputError, nearest, shown
from fedshift.real import is_whole

# What every error about a user's backend ends with.
DUE = (
    "a backend is a function of (update, jobs) that yields a Reply for each job, as "
    "fedshift.engine.backends.work(update, job) makes it"
)


def check_backend(backend: object) -> None:
    """Raise InputError unless it is a backend: not a name, a class, or workers without `with`."""
    if isinstance(backend, str):
        cure = IN_PYTHON.get(backend, f"leave it out, or give one.{nearest(backend, IN_PYTHON)}")
        raise InputError(f'backend is the text "{shown(backend)}"; {cure}')
    if isinstance(backend, type):
        raise InputError(
            f"backend is {called(backend)}; give an object of it, {backend.__name__}()"
        )
    # `workers(...)` is one of these until its `with` block is entered.
    if isinstance(backend, contextlib.ContextDecorator):
        raise InputError(
            "backend is workers(...) outside of a `with` block; write "
            "`with workers(federation.clients, 2) as team:` and give backend=team"
        )
    if isinstance(backend, FunctionType) and backend.__name__ == "workers":
        raise InputError(f"backend is the function workers; {IN_PYTHON['workers']}")
    if not callable(backend):
        raise InputError(
            f"backend is {called(backend)}; give a backend, such as Stacked(), or leave it out"
        )


def watched(backend: Backend, due: int | None) -> Backend:
    """The backend; one that a user wrote is watched, and raises InputError for a wrong answer.

    due: how many replies there must be; None: clients may drop out. Errors of training pass as they
    are. A TypeError is taken for a mistake in the backend, unless the library's own training code
    raised it.
    """
    module = getattr(backend, "__module__", None) or type(backend).__module__
    # A backend that streams blocks has methods that a wrapper would hide. Its blocks are checked by
    # the gate, like all others.
    if module.partition(".")[0] == "fedshift" or isinstance(backend, InBlocks):
        return backend
    name = getattr(backend, "__name__", type(backend).__name__)

    def replies(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        count = 0
        try:
            for one in backend(update, jobs):
                _check(name, one)
                if isinstance(one, Block):
                    count += len(one.clients)
                    # Shapes are recorded anew: the backend may have changed tensors of the block.
                    yield one if one.sums else one._replace(look=UNSEEN)
                else:
                    count += 1
                    yield one
        except TypeError as e:
            if _in_training(e):
                raise
            raise InputError(f"the backend {name} fails: {e}; {DUE}") from e
        if due is not None and count < due:
            raise InputError(f"the backend {name} gave {count} replies for {due} jobs; {DUE}")

    return replies


def _in_training(e: TypeError) -> bool:
    """Whether a client's training raised the error, and not the backend around it."""
    frames = (frame for frame, _ in walk_tb(e.__traceback__))
    names = (str(frame.f_globals.get("__name__")) for frame in frames)
    return any(name.startswith(("fedshift.algorithms.", "fedshift.client.")) for name in names)


def _check(name: str, given: object) -> None:
    if not isinstance(given, Reply | Block):
        raise InputError(f"the backend {name} gave {called(given)}, no Reply; {DUE}")
    # The tensors of a reply are left to the gate, which compares those of all clients.
    if isinstance(given, Reply) and not is_whole(given.client):
        raise InputError(
            f"the backend {name} gave a Reply whose client is {called(given.client)}; {DUE}"
        )
