"""Runs with examples weighed by labels: ESS and distance are those of the weighed examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.summary import summary
from support.small_runs import config_of


def summarised(name: str, cohort: int | None = None, **method: Any) -> Any:
    training = {"rounds": 2, "steps": 2, "cohort": cohort, "lr": 0.05}
    config = config_of(name, method={"name": name, **method}, training=training)
    return summary(run_experiment(config))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["iwerm", "fedpals_joint"])
def test_the_numbers_are_those_of_the_weighed_examples(name: str) -> None:
    done, plain = summarised(name, clip=float("inf")), summarised("fedavg")
    T, n = np.array(done.target), np.array(done.label_counts, dtype=float).sum(0)
    present = (T > 0) & (n > 0)
    reached = np.where(present, T, 0.0) / T[present].sum()
    assert done.ess == pytest.approx(1 / (reached[present] ** 2 / n[present]).sum())
    assert done.ess_fraction == pytest.approx(done.ess / n.sum())
    assert done.distance == pytest.approx(np.linalg.norm(T - reached), abs=1e-12)
    assert done.l1_distance == pytest.approx(np.abs(T - reached).sum(), abs=1e-12)
    assert "11 % in FedAvg, 33 % here" in done.why[0]
    assert "11 % in FedAvg, 11 % here" in plain.why[0]
    # FedAvg on the same clients: all examples, and far from the target.
    assert plain.ess == pytest.approx(n.sum())
    assert plain.distance > done.distance + 0.1


@pytest.mark.slow
def test_in_rounds_of_some_clients_they_are_means_over_the_rounds() -> None:
    done = summarised("fedpals_joint", cohort=4)
    assert 0 < done.ess < np.array(done.label_counts).sum()
    assert done.distance < summarised("fedavg", cohort=4).distance


@pytest.mark.slow
def test_a_clip_costs_distance() -> None:
    free, clipped = (summarised("fedpals_joint", clip=c) for c in (float("inf"), 1.0))
    assert clipped.distance > free.distance + 0.01
