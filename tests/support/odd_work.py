"""A client's work whose answer is changed, for tests of what is let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedshift.engine.backends import ClientUpdate
from fedshift.tree import Parts


@dataclass(frozen=True)
class OddWork:
    """`change` makes others of what one client sends and keeps; it is pickled for workers."""

    update: ClientUpdate
    client: int
    change: Callable[[Parts, Parts], tuple[Parts, Parts]]

    def __call__(self, message: Parts, state: Parts, data: Any, plans: Any) -> tuple[Parts, Parts]:
        sent, kept = self.update(message, state, data, plans)
        return self.change(sent, kept) if int(data.id) == self.client else (sent, kept)
