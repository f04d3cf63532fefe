"""One seed gives the same bytes, whatever is measured and whichever clients are never drawn.

Workers and their number: test_workers. The order of replies: test_contract. States on disk:
test_client_states. Other engines: test_flower, test_stacked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.algorithms.method import Method
from fedshift.engine.run import Federation, Round, draw_cohort, play_round, start
from fedshift.experiments.experiment import record
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.task.preparing import prepare
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import SIZES, make_clients, make_federation
from support.fuzz import different
from support.small_runs import config_of

TRAINING = {"rounds": 4, "steps": 2, "cohort": 3, "lr": 0.05}
SEED = 39  # of draws that leave out the two clients more, three rounds long
# Their server's state does not hold a share of all clients, as SCAFFOLD's |S|/N is one.
COHORTS = ("fedavg", "fedprox", "fedpals", "ditto", "fedper", "fedrep", "moon", "median")


def model_of(folder: Path, **training: Any) -> bytes:
    config = config_of("scaffold", training=TRAINING | training)
    record(folder, config, prepare(config), ignore_event)
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_measuring_changes_nothing(tmp_path: Path) -> None:
    """Measured in every round, at the end, or in the last rounds; another seed is the control."""
    seldom = model_of(tmp_path / "seldom", evaluate_every=100)
    assert model_of(tmp_path / "often", evaluate_every=1) == seldom
    assert model_of(tmp_path / "last", evaluate_every=100, evaluate_last=3) == seldom
    rows = [
        len((tmp_path / n / "metrics.csv").read_text().splitlines()) for n in ("seldom", "often")
    ]
    assert rows == [2, 5]
    config = config_of("scaffold", training=TRAINING, seeds={"run": 1})
    record(tmp_path / "other", config, prepare(config), ignore_event)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != seldom


def after(algorithm: Method, federation: Federation, cohorts: list[list[int]]) -> Round:
    """The state after a round with each of these cohorts."""
    current = start(algorithm, federation)
    for t, ids in enumerate(cohorts, 1):
        current = play_round(
            algorithm, federation, current.server, current.states, torch.tensor(ids), t
        )
    return current


@pytest.mark.few(2)
@pytest.mark.parametrize("clients", [5, 15, 16, 31, 100])
def test_one_more_client_leaves_the_draw_as_it_is(clients: int) -> None:
    """Unless the new client is drawn itself, as often as any other."""
    size, rounds = 3, 2000
    times = torch.zeros(clients + 1)
    for t in range(rounds):
        few, more = draw_cohort(clients, size, t, 0), draw_cohort(clients + 1, size, t, 0)
        assert len(more.unique()) == size
        assert clients in more.tolist() or few.equal(more)
        times[more] += 1
    expected = rounds * size / (clients + 1)
    assert (times - expected).abs().max() < 5 * expected**0.5
    assert not torch.stack([draw_cohort(40, 3, t, 0) for t in (1, 2)]).diff(dim=0).eq(0).all()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [n for n in COHORTS if n in MAKE])
def test_clients_that_are_never_drawn_change_nothing(name: str, setting: Setting) -> None:
    """Two more clients: the same model and states of those that took part, bit for bit."""
    drawn = [draw_cohort(len(SIZES), 3, t, SEED).tolist() for t in (1, 2, 3)]
    assert drawn == [draw_cohort(len(SIZES) + 2, 3, t, SEED).tolist() for t in (1, 2, 3)]
    few = make_federation(setting.model)
    clients = (*few.clients, *(c for c in make_clients(1, (11, 26))))
    more = make_federation(setting.model, tuple(c._replace(id=torch.tensor(i))
                                                for i, c in enumerate(clients)))  # fmt: skip
    assert len(more.clients) == len(SIZES) + 2
    ours, theirs = (after(MAKE[name](setting), f, drawn) for f in (few, more))
    shared = ("params", "buffers")
    assert different(*({p: r.server[p] for p in shared if p in r.server} for r in (ours, theirs))) \
        == []  # fmt: skip
    for i in ours.states:
        assert different(ours.states[i], theirs.states[i]) == []
    other = after(MAKE[name](setting), more, [*drawn[:2], [0, 4, 7]])
    assert different(ours.server, other.server)  # the control
