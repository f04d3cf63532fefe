"""Find the fastest backend for a run, by a trial of each on the run's model and clients.

This is `--backend auto`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedshift.algorithms.method import Method
from fedshift.engine.backends import Backend, Job, Reply, Stage, loop
from fedshift.engine.preflight.method import check_router
from fedshift.engine.preflight.network import check_model
from fedshift.engine.round import Round, has_examples, open_round
from fedshift.engine.run import Federation, draw_cohort, start, state_of
from fedshift.errors import FedshiftError, InputError, TrainingError, UnfitError
from fedshift.tree import flatten

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
    algorithm: Method,
    federation: Federation,
    cohort: int | None = None,
    processes: Mapping[str, int] | None = None,
) -> Probed:
    """Train the first steps of round 1 by every backend, and estimate the time of a round.

    A backend is out if it refuses the run, fails, or gives other results than `loop`, which always
    takes part. processes: how many it has, if more than one; all of them get equally many clients.
    """
    current, total = start(algorithm, federation), len(federation.clients)
    for t in itertools.count(1):  # the first round whose cohort has an example
        ids = draw_cohort(total, cohort or total, t, federation.seeds.cohort)
        if has_examples(current.server, ids):
            break
    stage, jobs = _trial(current._replace(t=t - 1), algorithm, federation, cohort)
    short, longer = replace(stage, most=1), replace(stage, most=STEPS)
    _timed(loop, short, jobs[-1:])  # the first call is slow
    # By time, not by number, so that trials take about as long for any model.
    count = max(4, int(BUDGET / max(_timed(loop, short, jobs[-1:])[0], 1e-6)))
    # The loop's results are the reference for all others.
    expected = _timed(loop, short, jobs[:count])[1]
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, backend in {"loop": loop, **contenders}.items():
        each = (processes or {}).get(name, 1)
        tried = jobs[: -(-count // each) * each]  # rounded up, so that no process is idle
        plans = stage.plans([job.client for job in tried])
        steps = [max((p.steps for p in one.values()), default=0) for one in plans]
        try:
            replies = _timed(backend, short, tried)[1]  # slow, in every process anew
            # A backend that is fast and wrong must not win.
            if (gap := _distance(replies[: len(expected)], expected)) > SAME:
                raise InputError(f"results are {gap:.1g} of a step away from the loop's")
            least = _timed(backend, longer, tried)[0]
            if least < LONG:  # the shorter of two: other processes can only make one slower
                least = min(least, _timed(backend, longer, tried)[0])
        except (InputError, TrainingError) as e:  # an error in the data comes again in the run
            refused[name] = str(e)
        else:
            done = sum(min(one, STEPS) for one in steps)
            seconds[name] = least * sum(steps) / max(done, 1) * len(jobs) / len(tried)
    return Probed(seconds, refused, len(jobs))


def check_fit(
    backend: Backend,
    algorithm: Method,
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
        stage, jobs = _trial(current, algorithm, federation, cohort, TRIED)
        list(backend(replace(stage, most=1), jobs))
    except UnfitError:
        raise
    except FedshiftError:
        return


def _trial(
    current: Round, algorithm: Method, federation: Federation, cohort: int | None,
    most: int | None = None,
) -> tuple[Stage, list[Job]]:  # fmt: skip
    """The stage of the next round, and its jobs, at most so many."""
    total, seeds, t = len(federation.clients), federation.seeds, current.t + 1
    ids = draw_cohort(total, cohort or total, t, seeds.cohort)
    opened = open_round(algorithm, current.server, ids, t, federation.gate.max_weight)
    jobs = [
        Job(i, t, opened.message(i), state_of(algorithm, federation, current.states, i))
        for i in opened.clients()[:most]
    ]
    return Stage(algorithm, t, federation.clients, seeds.batch), jobs


def _timed(backend: Backend, stage: Stage, jobs: Sequence[Job]) -> tuple[float, list[Reply]]:
    began = time.perf_counter()
    replies = list(backend(stage, jobs))
    return time.perf_counter() - began, sorted(replies, key=lambda reply: reply.client)


def _distance(replies: Sequence[Reply], expected: Sequence[Reply]) -> float:
    """||u - u'|| / ||u'||, the largest over all clients; u: an update without its report."""
    gaps = [0.0]
    for reply, other in zip(replies, expected, strict=True):
        a, b = (
            flatten({part: tree for part, tree in one.update.items() if part != "report"})
            for one in (reply, other)
        )
        size = math.hypot(*(float(v.double().norm()) for v in b.values()))
        gaps.append(
            math.hypot(*(float((v.double() - b[k].double()).norm()) for k, v in a.items()))
            / (size or 1.0)
        )
    return max(gaps)
