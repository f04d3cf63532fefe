"""Find the fastest backend for a run, by a trial of each on the run's model and clients.

This is `--backend auto`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from fedshift.algorithms.base import Algorithm
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.preflight.method import check_router
from fedshift.engine.preflight.network import check_model
from fedshift.engine.round import has_examples, jobs_of, open_round
from fedshift.engine.run import Federation, Round, draw_cohort, first_state, start
from fedshift.engine.stacking.stacked import shorten
from fedshift.errors import FedshiftError, InputError, TrainingError, UnfitError
from fedshift.tree import Params, Parts, flatten

# As many clients take part in a trial as the loop trains for one step in this many seconds.
BUDGET = 0.2
# Steps of the longer of two trials.
STEPS = 5
# A first trial that takes more seconds than this is not repeated.
LONG = 1.0
# Clients that `check_fit` tries: if a backend trains them, it can train the others.
TRIED = 2
# The largest relative difference of an update that counts as rounding.
SAME = 1e-3


@dataclass(frozen=True)
class Probed:
    """Estimated seconds of a round by each backend, and why others were refused."""

    seconds: Mapping[str, float]
    refused: Mapping[str, str]
    clients: int

    @property
    def fastest(self) -> str:
        """The backend that takes least; the first of equal ones."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    def line(self) -> str:
        """In one line: which backend was chosen, and why."""
        best = self.fastest
        others = [f"{k} {v:.2g} s" for k, v in self.seconds.items() if k != best]
        reasons = {name: why.partition(". ")[0] for name, why in self.refused.items()}
        for why in dict.fromkeys(reasons.values()):
            names = [name for name, reason in reasons.items() if reason == why]
            verb = "is" if len(names) == 1 else "are"
            others.append(f"{' and '.join(names)} {verb} out: {why}")
        versus = f" ({'; '.join(others)})" if others else ""
        return (
            f"backend {best}: about {self.seconds[best]:.2g} s for a round of {self.clients} "
            f"clients{versus}"
        )


@torch.inference_mode(False)
def probe(
    contenders: Mapping[str, Backend],
    algorithm: Algorithm,
    federation: Federation,
    cohort: int | None = None,
    processes: Mapping[str, int] | None = None,
) -> Probed:
    """Train the first steps of round 1 by every backend, and estimate the time of a round.

    A client with S planned steps is taken to need a + b S seconds; a and b are measured by trials
    of 1 step and of a few. A backend is out if it refuses the run, fails, or gives other results
    than `loop`, which always takes part.

    processes: how many a backend has, if more than one. All of them get equally many clients.
    """
    update, jobs = _first_round(algorithm, federation, cohort)
    _timed(loop, update, [shorten(jobs[-1], 1)])  # the first call is slow
    unit, _ = _timed(loop, update, [shorten(jobs[-1], 1)])
    # By time, not by number, so that trials take about as long for any model.
    count_tried = max(4, int(BUDGET / max(unit, 1e-6)))
    # The loop's results are the reference for all others.
    expected = _timed(loop, update, [shorten(job, 1) for job in jobs[:count_tried]])[1]
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, backend in {"loop": loop, **contenders}.items():
        each = (processes or {}).get(name, 1)
        # Rounded up, so that no process is idle.
        tried = jobs[: -(-count_tried // each) * each]
        try:
            # A first call is slow, in every process anew. The loop has had one.
            if backend is not loop:
                _timed(backend, update, [shorten(job, 1) for job in tried])
            estimate = _estimated(backend, update, tried, expected)
        except (InputError, TrainingError) as e:  # an error in the data comes again in the run
            refused[name] = str(e)
        else:
            seconds[name] = estimate * len(jobs) / len(tried)
    return Probed(seconds, refused, len(jobs))


def check_fit(
    backend: Backend,
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    *,
    cohort: int | None = None,
    after: Round | None = None,
) -> None:
    """Train one step of a few clients of the next round; UnfitError if the backend cannot.

    Other errors, such as those of a client's data, are left to the run, which names the client. So
    are later batches that the backend cannot train. Raises InputError for a network that does not
    fit the clients' examples.
    """
    check_model(algorithm.model, federation)
    check_router(algorithm, federation)
    current = start(algorithm, federation) if after is None else after
    if current.t >= rounds:
        return
    try:
        update, jobs = _round_after(current, algorithm, federation, cohort)
        tried = [shorten(job, 1) for job in itertools.islice(jobs, TRIED)]
        list(backend(update, tried))
    except UnfitError:
        raise
    except FedshiftError:
        return


def _first_round(
    algorithm: Algorithm, federation: Federation, cohort: int | None
) -> tuple[ClientUpdate, list[Job]]:
    """The jobs of round 1, or of the first round whose cohort has an example."""
    first, total = start(algorithm, federation), len(federation.clients)
    draws = (draw_cohort(total, cohort or total, t, federation.seeds.cohort) for t in count(1))
    t = next(t for t, ids in enumerate(draws) if has_examples(first.server, ids))
    update, jobs = _round_after(first._replace(t=t), algorithm, federation, cohort)
    return update, list(jobs)


def _round_after(
    current: Round, algorithm: Algorithm, federation: Federation, cohort: int | None
) -> tuple[ClientUpdate, Iterator[Job]]:
    """The jobs of the next round, made one by one."""
    total, seed, t = len(federation.clients), federation.seeds, current.t + 1
    ids = draw_cohort(total, cohort or total, t, seed.cohort)
    opened = open_round(algorithm, current.server, ids, t, federation.gate.max_weight)

    def state_of(i: int) -> Parts:
        return current.states[i] if i in current.states else first_state(algorithm, federation, i)

    return opened.stage.client_update, jobs_of(opened, federation.clients, state_of, seed.batch)


def _estimated(
    backend: Backend, update: ClientUpdate, jobs: Sequence[Job], expected: Sequence[Reply]
) -> float:
    """Estimated seconds of these jobs with all their steps; expected: the loop's replies."""
    steps = sum(max((p.steps for p in job.plans.values()), default=0) for job in jobs) / len(jobs)
    short = [shorten(job, 1) for job in jobs]
    first, replies = _timed(backend, update, short)
    # A backend that is fast and wrong must not win.
    if (gap := _distance(replies[: len(expected)], expected)) > SAME:
        raise InputError(f"results are {gap:.1g} of a step away from the loop's")
    if first > LONG or steps <= 1:
        return first * max(steps, 1.0)
    longer = [shorten(job, STEPS) for job in jobs]
    # The shorter of two trials: other processes can only make one slower.
    one, many = (min(_timed(backend, update, j)[0] for _ in range(2)) for j in (short, longer))
    # Not below 0: noise can make more steps look faster.
    slope = max(many - one, 0.0) / (min(STEPS, steps) - 1)
    return one + slope * (steps - 1)


def _timed(
    backend: Backend, update: ClientUpdate, jobs: Sequence[Job]
) -> tuple[float, list[Reply]]:
    began = time.perf_counter()
    replies = list(backend(update, jobs))
    return time.perf_counter() - began, sorted(replies, key=lambda reply: reply.client)


def _distance(replies: Sequence[Reply], expected: Sequence[Reply]) -> float:
    """||u - u'|| / ||u'||, the largest over all clients; u: an update without its report."""

    def norm(a: Reply, b: Reply | None = None) -> float:
        one, other = _numbers(a), {} if b is None else _numbers(b)
        return math.hypot(*(float((v - other.get(k, 0.0)).norm()) for k, v in one.items()))

    each = [norm(a, b) / (norm(b) or 1.0) for a, b in zip(replies, expected, strict=True)]
    return max(each, default=0.0)


def _numbers(reply: Reply) -> Params:
    update = {part: tree for part, tree in reply.update.items() if part != "report"}
    return {k: v.double() for k, v in flatten(update).items()}
