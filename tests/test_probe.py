"""The probe of backends: what it chooses and says, what it refuses, first calls that are slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Setting, make_federation

from fedshift import recipes
from fedshift.engine import probe as module
from fedshift.engine.backends import ClientUpdate, Job, Reply, loop
from fedshift.engine.probe import Probed, probe
from fedshift.engine.stacked import Stacked


def test_the_probe_chooses_and_says_why(setting: Setting) -> None:
    federation = make_federation(setting.model)
    found = probe({"stacked": Stacked()}, recipes.fedavg(setting), federation, 4)
    assert found.seconds.keys() == {"loop", "stacked"}
    assert found.fastest in found.line()
    assert "for a round of 4 clients" in found.line()
    out = probe({"stacked": Stacked()}, recipes.fedala(setting), federation)
    assert out.fastest == "loop"


def test_the_probe_refuses_other_results(setting: Setting) -> None:
    def wrong(update: Any, jobs: Iterable[Job]) -> Any:
        for reply in Stacked()(update, jobs):
            bent = {k: 1.01 * v for k, v in reply.update["delta"].items()}
            yield reply._replace(update=reply.update | {"delta": bent})

    federation = make_federation(setting.model)
    found = probe({"wrong": wrong, "right": Stacked()}, recipes.fedavg(setting), federation)
    assert found.seconds.keys() == {"loop", "right"}
    assert "wrong is out: its results are 0.01 of a step away" in found.line()


def test_the_probes_line() -> None:
    found = Probed({"loop": 2.0, "2 workers": 1.0}, {"stacked": "it cannot. Do not."}, 7)
    assert found.line() == (
        "backend 2 workers: about 1 s for a round of 7 clients "
        "(loop 2 s; stacked is out: it cannot)"
    )
    same = {
        "stacked": "it cannot. Do not.",
        "dense": "nor can it",
        "2 stacks": "it cannot. Do not.",
    }
    found = Probed({"loop": 2.0}, same, 7)
    assert "(stacked and 2 stacks are out: it cannot; dense is out: nor can it)" in found.line()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_process_may_be_slow_at_first(
    processes: int, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only clients and processes move: what is slow once is not reckoned."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    cold = set(range(processes))

    def slow_at_first(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in jobs:
            now[0] += 0.001 * sum(plan.steps for plan in job.plans.values())
            if (process := job.client % processes) in cold:
                cold.remove(process)
                now[0] += 10 * module.LONG
            yield from loop(update, [job])

    federation = make_federation(setting.model)
    found = probe({"slow": slow_at_first}, recipes.fedavg(setting), federation)
    assert not cold
    _, jobs = module._first_round(recipes.fedavg(setting), federation, None)
    steps = sum(plan.steps for job in jobs for plan in job.plans.values())
    assert found.seconds["slow"] == pytest.approx(0.001 * steps, rel=0.3)
