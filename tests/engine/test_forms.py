"""Which clients can be stacked: the fast check agrees with a check of each client."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.plans import PlansOfClient, PlansOfGroup
from fedshift.engine.backends import Job
from fedshift.engine.round import jobs_of, open_round
from fedshift.engine.run import first_state, start
from fedshift.engine.stacking.stacked import Forms
from fedshift.recipes import Setting
from support.federations import make_federation


@pytest.fixture
def jobs(setting: Setting) -> list[Job]:
    """The jobs of a round, as the engine makes them."""
    federation, algorithm = make_federation(setting.model), recipes.fedavg(setting)
    server = start(algorithm, federation).server
    opened = open_round(algorithm, server, torch.arange(6), 1)
    ready = jobs_of(opened, federation.clients, lambda i: first_state(algorithm, federation, i), 0)
    return list(ready)


def other_draws(job: Job, **options: Any) -> Job:
    """Batches of another kind."""
    draws = job.plans.group  # type: ignore[attr-defined]
    phases = {k: phase.__class__(**options) for k, phase in draws.phases.items()}
    again = PlansOfGroup(phases, draws.t, draws.seed, {job.client: job.data})
    return job._replace(plans=PlansOfClient(again, job.client))


def grown(job: Job) -> Job:
    """Examples of another shape."""
    x = torch.cat((job.data.x, job.data.x), 1)
    return job._replace(data=job.data._replace(x=x))


CHANGES = {
    "round": lambda job: job._replace(t=2),
    "examples": grown,
    "batch": lambda job: other_draws(job, batch=3),
    "state": lambda job: job._replace(state=job.state | {"own": {"w": torch.zeros(2)}}),
    "what is kept": lambda job: job._replace(state={k: {"w": torch.zeros(2)} for k in job.state}),
    "message": lambda job: job._replace(
        message={k: {n: v.double() for n, v in tree.items()} for k, tree in job.message.items()}
    ),
    "names": lambda job: job._replace(message={f"my {k}": tree for k, tree in job.message.items()}),
    "fewer parts": lambda job: job._replace(message=dict([*job.message.items()][:1])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_of_another_form(change: str, jobs: list[Job]) -> None:
    """Whichever job comes first, and whatever jobs came before."""
    odd = CHANGES[change](jobs[1])
    for order in ((jobs[0], odd, jobs[2]), (odd, jobs[0], jobs[2]), (jobs[0], jobs[2], odd)):
        forms = Forms()
        by_client = {job.client: forms.of(job) for job in order}
        assert by_client[jobs[0].client] == by_client[jobs[2].client]
        assert by_client[odd.client] != by_client[jobs[0].client]


def test_the_same_in_other_objects_is_of_one_form(jobs: list[Job]) -> None:
    copy = jobs[1]._replace(
        message={k: {n: v.clone() for n, v in tree.items()} for k, tree in jobs[1].message.items()},
        plans=dict(jobs[1].plans),
    )
    forms = Forms()
    assert forms.of(jobs[0]) == forms.of(copy) == forms.of(jobs[2])
