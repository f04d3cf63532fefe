"""Clients that misbehave according to a plan, to see how your federation reacts.

    plan = seeded(0.1, ("drop", "nan", "delay"), seed=0)
    for played in run(algorithm, federation, 50, backend=Faulty(plan)):
        print(played.t, played.dropped, played.skipped)

with a federation whose gate drops (`Gate(on_bad="drop")`); with the default gate the first bad
reply ends the run. The names are those of `fedshift.testing.attacks.ATTACKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
from fedshift.errors import InputError, check_name
from fedshift.seeds import generator, key
from fedshift.testing.attacks import ATTACKS, spoil

# From (round, client) to the name of a fault; None for none.
FaultPlan = Callable[[int, int], str | None]


def at(faults: Mapping[tuple[int, int], str]) -> FaultPlan:
    """A plan with these faults: {(round, client): name}. Raises InputError for unknown names."""
    for name in faults.values():
        check_name("attack", name, ATTACKS)
    return lambda t, client: faults.get((t, client))


def seeded(rate: float, names: Sequence[str] = tuple(ATTACKS), seed: int = 0) -> FaultPlan:
    """A plan: each client misbehaves in each round with probability `rate`, with one of `names`.

    It depends only on (seed, round, client). Raises InputError for a rate outside [0, 1] and
    unknown names.
    """
    if not 0.0 <= rate <= 1.0 or not names:
        raise InputError(f"rate={rate}, {len(names)} names; allowed: 0 to 1, and at least one")
    for name in names:
        check_name("attack", name, ATTACKS)

    def plan(t: int, client: int) -> str | None:
        rng = generator(seed, "faults", t, client)
        hit = float(torch.rand((), generator=rng)) < rate
        return names[int(torch.randint(len(names), (), generator=rng))] if hit else None

    return plan


class Faulty:
    """A backend whose clients misbehave by `plan`; `done` lists (round, client, fault).

    A delayed reply arrives in the next round, in addition to that round's reply of its client.
    """

    def __init__(self, plan: FaultPlan, backend: Backend = loop, seed: int = 0) -> None:
        self.plan, self.backend, self.seed = plan, backend, seed
        self.late: list[Reply] = []
        self.done: list[tuple[int, int, str]] = []

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        """The replies that arrive, in the backend's order; late ones come first."""
        # Empty the list first, because replies that are delayed now belong to the next round.
        arriving, self.late = self.late, []
        yield from arriving
        for reply in self.backend(stage, jobs):
            t, client = reply.t, reply.client
            if (name := self.plan(t, client)) is not None:
                self.done.append((t, client, name))
            if name is None:
                yield reply
            elif name == "delay":
                self.late.append(reply)
            else:
                yield from spoil(name, reply, key(self.seed, "spoil", t, client))
