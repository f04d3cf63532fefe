"""The probe of backends: its choice and report, its refusals, and slow first calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fedshift import recipes
from fedshift.data import client_data
from fedshift.engine.backends import Job, Reply, Stage, loop
from fedshift.engine.choosing import fastest as module
from fedshift.engine.choosing.fastest import Probed, probe
from fedshift.engine.stacking.stacked import Stacked
from fedshift.recipes import Setting
from support.federations import make_clients, make_federation, one_job


def test_the_probe_chooses_and_says_why(setting: Setting) -> None:
    federation = make_federation(setting.model)
    probed = probe({"stacked": Stacked()}, recipes.fedavg(setting), federation, 4)
    assert probed.seconds.keys() == {"loop", "stacked"}
    assert probed.fastest in probed.line()
    assert "for a round of 4 clients" in probed.line()
    out = probe({"stacked": Stacked()}, recipes.fedala(setting), federation)
    assert out.fastest == "loop"


def test_the_probe_refuses_other_results(setting: Setting) -> None:
    def wrong(update: Any, jobs: Iterable[Job]) -> Any:
        for reply in Stacked()(update, jobs):
            bent = {k: 1.01 * v for k, v in reply.update["delta"].items()}
            yield reply._replace(update=reply.update | {"delta": bent})

    federation = make_federation(setting.model)
    probed = probe({"wrong": wrong, "right": Stacked()}, recipes.fedavg(setting), federation)
    assert probed.seconds.keys() == {"loop", "right"}
    assert "wrong is out: results are 0.01 of a step away" in probed.line()


def test_the_probes_report() -> None:
    probed = Probed({"loop": 2.0, "2 workers": 1.0}, {"stacked": "it cannot. Do not."}, 7)
    assert probed.line() == (
        "backend 2 workers: about 1 s for a round of 7 clients "
        "(loop 2 s; stacked is out: it cannot)"
    )
    same = {
        "stacked": "it cannot. Do not.",
        "dense": "nor can it",
        "2 stacks": "it cannot. Use less.",
    }
    probed = Probed({"loop": 2.0}, same, 7)
    assert "(stacked and 2 stacks are out: it cannot; dense is out: nor can it)" in probed.line()


# Of a step, by the clock of `Processes`.
SECONDS = 0.25


class Processes:
    """A backend on a clock that only clients advance: several at a time, each slow at first."""

    def __init__(self, count: int, clock: list[float], cold: float = 10 * module.LONG) -> None:
        self.free, self.clock, self.cold = [0.0] * count, clock, dict.fromkeys(range(count), cold)

    def __call__(self, stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        self.free = [self.clock[0]] * len(self.free)
        for job in jobs:
            one = self.free.index(min(self.free))
            steps = sum(plan.steps for plan in stage.plans([job.client])[0].values())
            self.free[one] += SECONDS * steps + self.cold.pop(one, 0.0)
            yield from loop(stage, [job])
        self.clock[0] = max(self.free)


@pytest.mark.few(2)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 12])
def test_processes_are_timed_with_all_of_them_at_work(
    count: int, named: bool, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow first call is not counted. With one process assumed, six would look like four."""
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(module, "BUDGET", 0.0)
    like = make_clients()[0]
    clients = tuple(client_data(like.x, like.y, i) for i in range(12))
    federation, algorithm = make_federation(setting.model, clients), recipes.fedavg(setting)
    team = Processes(count, clock)
    probed = probe(
        {"team": team}, algorithm, federation, processes={"team": count} if named else {}
    )
    steps = max(plan.steps for plan in one_job(algorithm, federation).plans.values())
    right = SECONDS * steps * len(clients) / count
    assert bool(team.cold) == (not named and count > 4)
    wrong = not named and count in (3, 6, 12)
    assert (probed.seconds["team"] == pytest.approx(right, rel=0.05)) != wrong
