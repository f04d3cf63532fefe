"""Plans drawn at first use, in the process that uses them.

Workers then receive a few numbers (seed, round, client) instead of arrays of batch indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fedshift.client.local import Local, plan_many
from fedshift.data import ClientData, Plan


@dataclass(eq=False)
class PlansOfGroup:
    """The plans of some clients in round t, drawn together at the first request for one of them.

    Drawing each just before its client trains would evict code and data from the processor's cache.
    A client's plans equal those of `plan_all`: they do not depend on the rest of the group.
    """

    phases: Mapping[str, Local]
    t: int
    seed: int
    clients: dict[int, ClientData]
    # Filled at first use, for all clients together.
    _drawn: dict[int, dict[str, Plan]] = field(default_factory=dict, repr=False)
    widths: tuple[tuple[str, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.widths = tuple((name, phase.batch) for name, phase in self.phases.items())

    def of(self, client: int) -> dict[str, Plan]:
        """The plans of one of the clients, by phase."""
        if not self._drawn:
            many = plan_many(self.phases, list(self.clients.items()), self.t, self.seed)
            self._drawn = dict(zip(self.clients, many, strict=True))
        return self._drawn[client]


# Not frozen: that makes construction three times as slow, and each client and round needs one.
@dataclass(eq=False, slots=True)
class PlansOfClient(Mapping[str, Plan]):
    """One client's plans by phase; reading one draws the plans of its whole group."""

    group: PlansOfGroup
    client: int

    def __getitem__(self, phase: str) -> Plan:
        return self.group.of(self.client)[phase]

    def __iter__(self) -> Iterator[str]:
        return iter(self.group.phases)

    def __len__(self) -> int:
        return len(self.group.phases)


def widths(plans: Mapping[str, Plan]) -> tuple[tuple[str, int], ...]:
    """(phase, rows of a batch, padding included) of each phase, without drawing any plan."""
    if isinstance(plans, PlansOfClient):
        return plans.group.widths
    return tuple((name, plan.rows.shape[1]) for name, plan in plans.items())
