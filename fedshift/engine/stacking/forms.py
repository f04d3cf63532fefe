"""Which clients of a round can be stacked: those whose jobs have the same form."""

from __future__ import annotations

from operator import is_
from typing import Any

from fedshift.client.plans import PlansOfClient, widths
from fedshift.engine.backends import Job
from fedshift.tree import Params

Form = tuple[Any, ...]


class Forms:
    """What must be equal for clients to be stacked: names, shapes and types.

    Each distinct tree gets a number, because trees are compared again and again.
    """

    def __init__(self) -> None:
        self._numbers: dict[Form, int] = {}
        # Numbers by id of a tree; most of a message is one tree for all clients.
        self._by_id: dict[int, int] = {}
        self._last: tuple[Job, Form] | None = None

    def of(self, job: Job) -> Form:
        """The form of a job; all jobs live as long as this object."""
        if self._last is None or not _is_same_at_sight(self._last[0], job):
            sent, kept = job.message, job.state
            numbers = map(self._number, (*sent.values(), *kept.values()))
            shape = job.data.x.shape[1:]
            form = job.t, len(sent), *sent, *kept, *numbers, *widths(job.plans), shape
            self._last = job, form
        return self._last[1]

    def _number(self, tree: Params) -> int:
        number = self._by_id.get(id(tree))
        if number is None:
            form = tuple((k, v.shape, v.dtype) for k, v in tree.items())
            number = self._by_id[id(tree)] = self._numbers.setdefault(form, len(self._numbers))
        return number


def _is_same_at_sight(one: Job, other: Job) -> bool:
    """Fast path: same objects and no client state, hence the same form."""
    a, b = one.plans, other.plans
    if not (isinstance(a, PlansOfClient) and isinstance(b, PlansOfClient) and a.group is b.group):
        return False
    if one.t != other.t or one.data.x.shape != other.data.x.shape or any(other.state.values()):
        return False
    if [*one.message] != [*other.message] or [*one.state] != [*other.state]:
        return False
    return all(map(is_, one.message.values(), other.message.values())) and not any(
        one.state.values()
    )
