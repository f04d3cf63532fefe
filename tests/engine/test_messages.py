"""Jobs sent through pipes arrive unchanged, and nothing is sent twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedshift import recipes
from fedshift.client.plans import PlansOfClient, PlansOfGroup
from fedshift.engine.backends import Job
from fedshift.engine.processes.messages import pack, unpack
from fedshift.recipes import Setting
from fedshift.tree import Parts
from support.federations import make_federation, one_job


def drawn_by(job: Job, draws: PlansOfGroup) -> Job:
    return job._replace(plans=PlansOfClient(draws, job.client), t=draws.t)


@pytest.mark.parametrize("change", ["", "round", "seed", "phases"])
def test_each_job_has_its_batches(change: str, setting: Setting) -> None:
    federation, algorithm = make_federation(setting.model), recipes.fedavg(setting)
    base = one_job(algorithm, federation, 0)
    clients, phases = dict(enumerate(federation.clients)), algorithm.phases()
    ways = {
        "": (phases, 1, 0), "round": (phases, 2, 0), "seed": (phases, 1, 9),
        "phases": ({k: replace(phase, batch=2) for k, phase in phases.items()}, 1, 0),
    }  # fmt: skip
    jobs = tuple(
        drawn_by(base._replace(client=i, data=clients[i]), PlansOfGroup(*ways[how], clients))
        for i, how in enumerate(("", change, ""))
    )
    some = pack(jobs, {})
    back = unpack(some, {}, federation.clients)
    assert len(some) == (3 if change else 1)
    assert [(job.client, job.t) for job in back] == [(job.client, job.t) for job in jobs]
    for ours, theirs in zip(jobs, back, strict=True):
        assert ours.message == theirs.message
        for name, plan in ours.plans.items():
            assert torch.equal(plan.rows, theirs.plans[name].rows)


def test_parts_that_the_receiver_has_are_not_sent(setting: Setting) -> None:
    """Identity counts: an equal tree that is another object is sent."""
    base = one_job(recipes.fedavg(setting), make_federation(setting.model), 0)
    shared, other = {"w": torch.ones(2)}, {"w": torch.zeros(1)}
    sent: tuple[Parts, ...] = (
        {"params": shared}, {"own": other, "params": shared}, {"params": dict(shared)},
    )  # fmt: skip
    jobs = tuple(base._replace(message=message) for message in sent)
    some = pack(jobs, {"params": shared, "other": other})
    assert [list(job.new) for job in some] == [[], ["own"], ["params"]]
    clients = make_federation(setting.model).clients
    back = unpack(some, {"params": shared, "other": other}, clients)
    assert [list(job.message) for job in back] == [["params"], ["own", "params"], ["params"]]


def test_states_are_not_shared_between_jobs(setting: Setting) -> None:
    """Jobs that share one state object: what one client writes, the other does not see."""
    federation = make_federation(setting.model)
    state: Parts = {"own": {"w": torch.ones(2)}}
    base = one_job(recipes.fedavg(setting), federation, 0)._replace(state=state)
    one, two = unpack(pack((base, base), {}), {}, federation.clients)
    assert one.state["own"] is not two.state["own"]
