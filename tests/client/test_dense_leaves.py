"""The results of dense training are ordinary tensors, although it uses inference mode."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.dense import train
from fedshift.client.local import Local
from fedshift.client.trainer import trained_by
from fedshift.engine.backends import loop
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.tree import Parts, flatten
from support.chains import AT_ONCE
from support.every_method import MAKE
from support.federations import CLASSES, FEATURES, TARGET, make_federation, one_job
from support.rounds import last


@pytest.fixture
def setting() -> Setting:
    model = build(lambda: Mlp((FEATURES,), (10, 7), CLASSES), seed=1)
    return Setting(model, TARGET, Local(lr=0.3, batch=12))


def inferred(*trees: Parts) -> list[str]:
    """Tensors made in inference mode, which allow no gradient."""
    return [k for parts in trees for k, v in flatten(parts).items() if v.is_inference()]


@pytest.mark.few(1)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
@pytest.mark.parametrize("name", [*AT_ONCE, "fedbabu"])
@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_round_leaves_is_for_gradients_too(
    name: str, processes: int, setting: Setting
) -> None:
    """Training at once is in inference mode; its results can be trained by any backend."""
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    with workers(federation.clients, processes) as team:
        blocks = team.blocks(Stacked(dense=True))
        backend = blocks if processes > 1 else Stacked(dense=True)
        played = last(run(algorithm, federation, 1, backend=backend))
    assert not inferred(played.server, *played.states.values())
    assert last(run(algorithm, federation, 2, backend=loop, after=played)).t == 2
    with torch.inference_mode():  # the control
        made = {k: {n: v + 0.0 for n, v in t.items()} for k, t in played.server.items() if t}
    assert inferred(made)


def test_replies_can_be_written_to(setting: Setting) -> None:
    """Like the loop's replies, although their block was made in inference mode."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    jobs = [one_job(algorithm, federation, i) for i in range(6)]
    (block,) = Stacked(dense=True).stream(algorithm.client_update, jobs)
    assert inferred(block.updates)
    for reply in Stacked(dense=True)(algorithm.client_update, jobs):
        assert not inferred(reply.update, reply.changed)
        for v in reply.update["delta"].values():
            v.add_(1)


def test_a_phase_of_one_client_is_for_gradients_too(setting: Setting) -> None:
    """As `trainers.dense` asks for it: parameters and loss are no inference tensors."""
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    job = one_job(algorithm, federation)
    with trained_by(train):
        update, new_state = algorithm.client_update(job.message, job.state, job.data, job.plans)
    assert not inferred(update, new_state)


@pytest.mark.parametrize("options", [{}, {"frozen": ("body.1",)}, {"only": ("head.bias",)}])
@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_what_clients_were_sent_stays(name: str, options: dict[str, Any], setting: Setting) -> None:
    """Updates reuse the memory of the trained tensors, not that of the message."""
    setting = replace(setting, local=replace(setting.local, **options))
    algorithm, federation = MAKE[name](setting), make_federation(setting.model)
    jobs = [one_job(algorithm, federation, i) for i in range(6)]
    before = [[flatten(p) for p in (job.message, job.state)] for job in deepcopy(jobs)]
    (block,) = Stacked(dense=True).stream(algorithm.client_update, jobs)
    assert any(
        v.any() for k, v in flatten(block.updates | block.changed).items() if "report" not in k
    )
    for job, sent in zip(jobs, before, strict=True):
        for parts, were in zip((job.message, job.state), sent, strict=True):
            assert all(torch.equal(v, were[k]) for k, v in flatten(parts).items())
