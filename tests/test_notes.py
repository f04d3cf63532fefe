"""Notes on options without effect, and on numbers of some rounds alone."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fedshift import FedAvg, Federation, Model, pals_weights, run
from fedshift.algorithms.ditto import Ditto
from fedshift.data import client_data, register
from fedshift.errors import InputError, NeedlessWarning
from fedshift.experiments.measures.round_weights import Reach, WeightSums, weight_sums_of
from fedshift.seeds import Seeds
from fedshift.server.combine import Mean
from fedshift.server.weights import Pals
from support.small_runs import config_of, recorded

COUNTS = [[8, 2], [2, 8]]
MODEL = Model(nn.Linear(3, 2))
NOTE = "ess=0.2 changes nothing: the closest mixture (lam=0) already has 1"


def federation() -> Federation:
    """Two clients whose mixture is (1/2, 1/2) with equal weights, which are those by size."""
    x = torch.zeros(10, 3)
    clients = [
        client_data(x, torch.tensor([0] * row[0] + [1] * row[1]), i) for i, row in enumerate(COUNTS)
    ]
    return Federation(clients, *MODEL.init(), register(clients, 2), Seeds.of(0))


def fedpals(ess: float) -> FedAvg:
    return FedAvg(MODEL, combine=Mean(Pals((0.5, 0.5), ess=ess)))


def test_an_ess_below_that_of_lambda_0_is_noted() -> None:
    assert pals_weights(COUNTS, [0.5, 0.5], ess=0.2).note == NOTE
    assert pals_weights(COUNTS, [0.9, 0.1], ess=0.9).note == ""  # the controls
    assert pals_weights(COUNTS, [0.5, 0.5], lam=0.0).note == ""
    assert pals_weights(COUNTS, [0.5, 0.5], ess=1.0).note == ""


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_run_warns_of_it_when_it_is_asked_for(wrapped: bool) -> None:
    method = fedpals(0.2)
    with pytest.warns(NeedlessWarning) as warned:
        run(Ditto(method) if wrapped else method, federation(), 1)
    assert [str(one.message) for one in warned] == [NOTE]
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(fedpals(1.0), federation(), 1)
        run(FedAvg(MODEL), federation(), 1)
        run(method, federation(), 1, cohort=1)


def test_means_are_of_the_rounds_that_have_an_ess() -> None:
    three = WeightSums(3, reached=Reach(30.0, 1.0, 0.6, 0.9), defined=(2, 2, 3, 3))
    assert three.mean == pytest.approx(Reach(15.0, 0.5, 0.2, 0.3))
    assert weight_sums_of(three.facts()).defined == three.defined
    none = WeightSums(2, reached=Reach(0.0, 0.0, 0.4, 0.4), defined=(0, 0, 2, 2)).mean
    assert math.isnan(none.ess)
    assert none.gap == 0.2
    older = {k: v for k, v in three.facts().items() if k != "known"}
    assert weight_sums_of(older).defined == (3, 3, 3, 3)


def test_a_run_says_in_how_many_rounds_there_was_one(tmp_path: Path) -> None:
    """SCAFFOLD's plain mean weighs clients without examples; some cohorts have none of them."""
    shift = {"kind": "dirichlet-per-class", "beta": 0.02, "min_size": 0, "clients": 30}
    tables = {
        "data": {"validation": 0.0},
        "shift": shift | {"target": "uniform"},
        "training": {"rounds": 6, "steps": 1, "cohort": 3},
    }
    summary, rounds = recorded(tmp_path / "run", config_of("scaffold", **tables))
    finite = [e["ess"] for e in rounds if isinstance(e["ess"], float) and not math.isnan(e["ess"])]
    assert 0 < len(finite) < 6
    assert summary["ess"] == pytest.approx(sum(finite) / len(finite))
    note = f"The mean ESS is that of {len(finite)} of 6 rounds: in the others a client without"
    assert any(one.startswith(note) for one in summary["why"])


def test_clients_may_be_of_several_shapes_where_the_network_reads_them() -> None:
    def made(second: int) -> Federation:
        net = Model(nn.Sequential(nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(2, 2)))
        y = torch.tensor([0, 1])
        clients = [client_data(torch.zeros(2, 1, n), y, i) for i, n in enumerate((4, second))]
        fed = Federation(clients, *net.init(), register(clients, 2), Seeds.of(0))
        run(FedAvg(net), fed, 1)
        return fed

    made(6)
    with pytest.raises(InputError, match=r"client 1: inputs are \(1, 0\), client 0's \(1, 4\)"):
        made(0)
