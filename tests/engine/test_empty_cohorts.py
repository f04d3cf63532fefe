"""A cohort may have no example by chance: its round is skipped, and the run goes on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.data import client_data
from fedshift.engine.checks.gate import Gate, OnBad
from fedshift.engine.choosing.fastest import probe
from fedshift.engine.run import Federation, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.measures.round_weights import ess_of
from fedshift.model import Model
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import make_clients, make_federation
from support.routing import routed_model

SIZES = (9, 1, 16)
WHY = "round {}: no client of its cohort has an example"
# Krum needs more than one client's change to choose from, and a router more than one client.
ALONE = [name for name in MAKE if "krum" not in name and not name.startswith("feddrm")]


@pytest.fixture
def mlp() -> Model:
    return routed_model(len(SIZES))


def with_an_empty_client(model: Model, on_bad: OnBad = "stop") -> Federation:
    """A federation of three clients, of which client 1 has no example."""
    first, middle, last = make_clients(sizes=SIZES)
    nothing = client_data(middle.x[:0], middle.y[:0], 1)
    federation = make_federation(model, (first, nothing, last))
    return replace(federation, gate=Gate(on_bad=on_bad, max_skips=1))


@pytest.mark.few(5)
@pytest.mark.parametrize("on_bad", ["stop", "drop"])
@pytest.mark.parametrize("name", ALONE)
def test_the_round_of_an_empty_cohort_is_skipped(
    name: str, on_bad: OnBad, setting: Setting, mlp: Model
) -> None:
    """By every method: no client trains, no state changes, and the other rounds are played."""
    federation = with_an_empty_client(mlp, on_bad)
    played = list(run(MAKE[name](setting), federation, 5, cohort=1))
    empty = [r for r in played if r.cohort.tolist() == [1]]
    assert 0 < len(empty) < 5
    assert [r.t for r in played if r.skipped] == [r.t for r in empty]
    for r in empty:
        before = played[r.t - 2] if r.t > 1 else None
        assert r.skipped == WHY.format(r.t)
        assert (r.trained, r.dropped, r.weights.tolist()) == ((), (), [0.0])
        assert before is None or (r.server is before.server and r.states == before.states)


def test_one_example_is_enough(setting: Setting, mlp: Model) -> None:
    """The control: a client of one example trains in the rounds that were skipped above."""
    federation = make_federation(mlp, make_clients(sizes=SIZES))
    played = list(run(recipes.fedavg(setting), federation, 5, cohort=1))
    assert any(r.cohort.tolist() == [1] and r.trained == (1,) for r in played)
    assert not any(r.skipped for r in played)


def test_the_others_of_a_cohort_are_played(setting: Setting, mlp: Model) -> None:
    played = list(run(recipes.fedavg(setting), with_an_empty_client(mlp), 3))
    assert [r.trained for r in played] == [(0, 2)] * 3
    assert not any(r.skipped for r in played)


def test_a_run_that_drew_no_client_says_so(setting: Setting, mlp: Model) -> None:
    federation, method = with_an_empty_client(mlp), recipes.fedavg(setting)
    drawn = next(r.t for r in run(method, federation, 9, cohort=1) if not r.skipped)
    assert drawn > 1  # else the run would not show what happens
    with pytest.raises(TrainingError, match="skipped; the last one: round .: no client of its"):
        list(run(method, federation, drawn - 1, cohort=1))


def test_a_federation_without_an_example_is_refused(setting: Setting, mlp: Model) -> None:
    nothing = tuple(c._replace(x=c.x[:0], y=c.y[:0], w=c.w[:0]) for c in make_clients(sizes=SIZES))
    with pytest.raises(InputError, match="none of the 3 clients has an example .*there is noth"):
        list(run(recipes.fedavg_uniform(setting), make_federation(mlp, nothing), 1))


def test_backends_are_tried_on_a_cohort_that_has_some(setting: Setting, mlp: Model) -> None:
    federation, method = with_an_empty_client(mlp), recipes.fedavg(setting)
    assert next(iter(run(method, federation, 9, cohort=1))).skipped
    assert probe({"dense": Stacked(dense=True)}, method, federation, cohort=1).clients == 1


def test_empty_weights_have_no_effective_sample_size() -> None:
    """Without clients, or without examples, weights have no effective sample size."""
    assert math.isnan(ess_of(torch.zeros(2).numpy(), torch.zeros(2).numpy()))
    assert math.isnan(ess_of(torch.tensor([0.5, 0.5]).numpy(), torch.tensor([8.0, 0.0]).numpy()))
    assert ess_of(torch.tensor([0.5, 0.5]).numpy(), torch.tensor([8.0, 8.0]).numpy()) == 16.0


def test_on_flower_too(setting: Setting, mlp: Model) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    from fedshift.flower import LocalGrid, client_app, play
    from support.flower_runs import differing_tensors, sites, strategy_of

    federation, method = with_an_empty_client(mlp), recipes.fedavg(setting)
    grid: Any = LocalGrid(client_app(sites(method, federation)), len(SIZES))
    strategy = strategy_of(method, federation, cohort=1, gate=federation.gate)
    there = list(play(strategy, grid, 5))
    here = list(run(method, federation, 5, cohort=1))
    assert [r.skipped for r in there] == [r.skipped for r in here]
    assert any(r.skipped for r in there)
    assert all(
        differing_tensors(a._replace(states={}), b) == [] for a, b in zip(here, there, strict=True)
    )
