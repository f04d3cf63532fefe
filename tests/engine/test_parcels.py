"""Jobs for pipes: which of them go as one, and that each gets there what it had here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedshift import recipes
from fedshift.client.plans import Drawn, Draws
from fedshift.engine.backends import Job
from fedshift.engine.processes.messages import packed, unpacked
from fedshift.recipes import Setting
from support.federations import make_federation, one_job


def drawn_by(job: Job, draws: Draws) -> Job:
    return job._replace(plans=Drawn(draws, job.client), t=draws.t)


@pytest.mark.parametrize("change", ["", "round", "seed", "phases"])
def test_jobs_that_differ_by_their_batches_travel_apart(change: str, setting: Setting) -> None:
    """Each gets there what it had here; as one go those that differ by their client alone."""
    federation, algorithm = make_federation(setting.model), recipes.fedavg(setting)
    base = one_job(algorithm, federation, 0)
    clients, phases = dict(enumerate(federation.clients)), algorithm.phases()
    told = {
        "": (phases, 1, 0), "round": (phases, 2, 0), "seed": (phases, 1, 9),
        "phases": ({k: replace(phase, batch=2) for k, phase in phases.items()}, 1, 0),
    }  # fmt: skip
    jobs = tuple(
        drawn_by(base._replace(client=i, data=clients[i]), Draws(*told[how], clients))
        for i, how in enumerate(("", change, ""))
    )
    about, trees = packed(jobs, {})
    assert len(about) == len(trees) == (3 if change else 1)
    back = unpacked(about, trees, {}, federation.clients)
    assert [(job.client, job.t) for job in back] == [(job.client, job.t) for job in jobs]
    for ours, theirs in zip(jobs, back, strict=True):
        assert ours.message == theirs.message
        for name, plan in ours.plans.items():
            assert torch.equal(plan.rows, theirs.plans[name].rows)
