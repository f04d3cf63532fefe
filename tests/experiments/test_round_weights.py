"""What is recorded of weights where every round draws a cohort: that of the rounds played."""

from __future__ import annotations

import csv
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.engine.round import before_rounds
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.progress import Progress, progress_of
from fedshift.experiments.measures.round_weights import Reach, WeightSums, weight_sums_of
from fedshift.experiments.on_flower import configured_site, on_grid, strategy_of
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid, client_app
from fedshift.record.folder import read_run
from fedshift.record.rounds import Metrics
from fedshift.report.page import page
from fedshift.server.pals import effective_sample_size, pals_weights
from support.small_runs import CLIENTS, config_of, record_until, recorded

MOST = {"method": {"name": "fedpals", "ess": 0.8}}

METRICS = Metrics(
    **dict.fromkeys(Metrics.__dataclass_fields__, 0.5)  # type: ignore[arg-type]
    | {"round": 1, "clients_trained": 3, "ess": 17.0, "ess_fraction": 0.9, "gap": 0.1}
)


def by_hand(summary: dict[str, Any], ids: list[int]) -> dict[str, float]:
    """ESS, its share and both gaps of FedPALS' weights over some of a run's clients."""
    counts, target = np.array(summary["label_counts"], float)[ids], np.array(summary["target"])
    solved = pals_weights(counts, target, ess=0.8)
    rows = counts / counts.sum(1, keepdims=True)
    off, sizes = target - solved.weights @ rows, counts.sum(1)
    ess = effective_sample_size(solved.weights, sizes)
    return {
        "ess": ess,
        "ess_fraction": ess / sizes.sum(),
        "distance": float(np.sqrt(off @ off)),
        "l1_distance": float(np.abs(off).sum()),
    }


@pytest.mark.slow
def test_a_cohorts_weights_are_those_of_the_rounds(tmp_path: Path) -> None:
    """Summary, clients.csv, metrics.csv and events, each against weights solved by hand."""
    summary, rounds = recorded(tmp_path / "run", config_of("fedpals", **MOST))
    alone = [by_hand(summary, e["cohort"]) for e in rounds]
    for key in alone[0]:
        assert summary[key] == pytest.approx(np.mean([one[key] for one in alone]), abs=1e-9)
    for event, one in zip(rounds, alone, strict=True):
        assert event["ess_fraction"] == pytest.approx(one["ess_fraction"], abs=1e-9)
        assert event["gap"] == pytest.approx(one["distance"], abs=1e-9)
    shares = np.zeros(6)
    for event in rounds:
        shares[event["cohort"]] += np.array(event["weights"]) / len(rounds)
    assert summary["weights"] == pytest.approx(shares.tolist(), abs=1e-12)
    assert summary["cohorts"] == {"clients": 3, "rounds": 6}
    with (tmp_path / "run" / "clients.csv").open() as f:
        assert [float(row["weight"]) for row in csv.DictReader(f)] == summary["weights"]
    with (tmp_path / "run" / "metrics.csv").open() as f:
        for row in csv.DictReader(f):
            one = rounds[int(row["round"]) - 1]
            assert float(row["ess"]) == one["ess"]
            assert float(row["ess_fraction"]) == one["ess_fraction"]
            assert float(row["gap"]) == one["gap"]
    # Weights over all clients, which no round has, would say something else.
    assert abs(by_hand(summary, list(range(6)))["ess_fraction"] - summary["ess_fraction"]) > 0.02


@pytest.mark.slow
def test_without_cohorts_weights_are_those_over_all_clients(tmp_path: Path) -> None:
    """Also where the cohort is all clients; events then have no weights."""
    training = {"rounds": 2, "steps": 1, "evaluate_every": 2}
    config = config_of("fedpals", **MOST, training=training)
    summary, rounds = recorded(tmp_path / "a", config)
    for key, value in by_hand(summary, list(range(6))).items():
        assert summary[key] == pytest.approx(value, abs=1e-9)
    assert summary["cohorts"] is None
    assert "weights" not in rounds[0]
    everybody = config_of("fedpals", **MOST, training=training | {"cohort": 6})
    assert recorded(tmp_path / "b", everybody)[0] == summary


@pytest.mark.slow
def test_flower_records_the_same(tmp_path: Path) -> None:
    """Over Flower's messages, in memory; another seed is the control."""
    config = config_of("fedpals", **MOST)
    summary, rounds = recorded(tmp_path / "here", config)
    app = client_app(partial(configured_site, dumps(config)))

    class OnFlower:
        backend, tells_drops = "loop", False

        def client_scores(self, current: Any) -> None:
            return None

        def rounds(
            self, algorithm: Any, federation: Any, training: Any, options: Any, *,
            after: Any, meter: Any,
        ) -> Any:  # fmt: skip
            strategy = strategy_of(algorithm, federation, training)
            return on_grid(LocalGrid(app, 6), strategy, training, meter=meter)

    events: list[dict[str, Any]] = []
    (tmp_path / "there").mkdir()
    record(tmp_path / "there", config, prepare(config), events.append, OnFlower())
    assert json.loads((tmp_path / "there" / "summary.json").read_text()) == summary
    there = [e for e in events if e["event"] == "round"]
    timeless = [{k: v for k, v in e.items() if k not in ("time", "seconds")} for e in rounds]
    assert [{k: v for k, v in e.items() if k != "seconds"} for e in there] == timeless
    other = recorded(tmp_path / "other", config_of("fedpals", **MOST, seeds={"cohort": 1}))[0]
    assert other["weights"] != summary["weights"]


@pytest.mark.slow
def test_the_report_and_the_terminal_say_what_the_numbers_are(tmp_path: Path) -> None:
    recorded(tmp_path / "run", config_of("fedpals", **MOST))
    text = page([read_run(tmp_path / "run")])
    assert text.count("(3 of 6 clients a round, 6 rounds)") == 3  # table, weights, curve
    recorded(tmp_path / "all", config_of("fedpals", **MOST, training={"rounds": 1, "steps": 1}))
    assert "clients a round" not in page([read_run(tmp_path / "all")])


@pytest.mark.slow
def test_lambda_is_given_where_all_rounds_have_the_same(tmp_path: Path) -> None:
    fixed = {"method": {"name": "fedpals", "lam": 30.0}}
    assert recorded(tmp_path / "fixed", config_of("fedpals", **fixed))[0]["lam"] == 30.0
    summary, rounds = recorded(tmp_path / "ess", config_of("fedpals", **MOST))
    assert len({e["gap"] for e in rounds}) > 1
    assert (summary["lam"], summary["certified"]) == (None, True)
    summary, _ = recorded(tmp_path / "fedavg", config_of("fedavg"))
    assert (summary["lam"], summary["certified"]) == (None, None)
    assert summary["ess_fraction"] == pytest.approx(1.0)  # of the cohort's examples


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ditto", "feddrm"])
def test_another_methods_lam_is_not_called_fedpals_lambda(name: str, tmp_path: Path) -> None:
    """Their `lam` weighs losses; the clients' weights are sample sizes."""
    model = {"name": "mlp-projected", "hidden": [4]}
    training = {"rounds": 1, "steps": 1}
    method = {"name": name, "lam": 0.5}
    config = config_of(name, shift=CLIENTS, model=model, training=training, method=method)
    summary, _ = recorded(tmp_path / "run", config)
    assert (summary["lam"], summary["certified"]) == (None, None)


@pytest.mark.slow
def test_an_ess_that_changes_nothing_is_reported(tmp_path: Path) -> None:
    """An ESS that lambda = 0 exceeds changes nothing; a larger one does."""
    training = {"rounds": 2, "steps": 1}

    def why(ess: float, **more: Any) -> list[str]:
        method = {"name": "fedpals", "ess": ess}
        config = config_of("fedpals", method=method, training=training | more)
        summary = recorded(tmp_path / f"{ess}{more}", config)[0]
        return [s for s in summary["why"] if "changes nothing" in s]

    summary, _ = recorded(
        tmp_path / "0", config_of("fedpals", method={"name": "fedpals", "lam": 0.0})
    )
    counts, target = summary["label_counts"], summary["target"]
    has = pals_weights(counts, target, lam=0.0).ess_fraction
    assert why(0.05) == [
        "Asked for an ESS of 5 %: the closest mixture (lambda = 0) already has "
        f"{100 * has:.3g} %, so ess changes nothing."
    ]
    assert why(has + 0.01) == []
    assert why(0.05, cohort=3) == [
        "Asked for an ESS of 5 %: in 2 of 2 rounds the closest mixture of the cohort (lambda = 0) "
        "already has more; there ess changes nothing."
    ]
    assert why(1.0, cohort=3) == []


def test_skipped_rounds_have_changed_nothing() -> None:
    start = before_rounds({})
    skipped = start._replace(t=1, skipped="the gap is above max_gap")
    before = WeightSums(rounds=2)
    assert before.after(skipped, None, {}, torch.zeros(1)) is before  # type: ignore[arg-type]


def test_what_a_checkpoint_keeps_is_all_of_it() -> None:
    """Number by number."""
    reached = Reach(math.nan, 1 / 3, 0.1 + 0.2, 5e-324)
    played = WeightSums(
        3, np.array([0.1 + 0.2, 1 / 3]), reached, lams=(0.0, math.inf), certified=2, unneeded=1
    )
    back = weight_sums_of(json.loads(json.dumps(played.facts(), allow_nan=False)))
    assert back.facts() == played.facts()
    assert back.weights == played.weights
    assert back.reached[1:] == reached[1:]
    facts = Progress(metrics=[METRICS], weight_sums=played).facts()
    assert progress_of(None, facts).metrics[0].gap == 0.1  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_that_was_killed_says_the_same_of_its_rounds(tmp_path: Path) -> None:
    config = config_of("fedpals", **MOST)
    whole, rounds = recorded(tmp_path / "whole", config)
    record_until(tmp_path / "cut", config, 4, every=2)
    cut, again = recorded(tmp_path / "cut", config)
    assert cut == whole
    assert again[-1]["weights"] == rounds[-1]["weights"]


@pytest.mark.slow
def test_candidates_have_the_ess_of_their_rounds(tmp_path: Path) -> None:
    config = config_of("fedpals", method={"name": "fedpals", "ess": "auto"})
    summary, rounds = recorded(tmp_path / "run", config)
    chosen = next(
        c
        for c in summary["selection"]["candidates"]
        if c["label"] == summary["selection"]["chosen"]
    )
    fractions = [e["ess_fraction"] for e in rounds if e["run"] == f"run {chosen['label']}"]
    assert chosen["ess_fraction"] == pytest.approx(np.mean(fractions), abs=1e-12)
    assert chosen["ess_fraction"] == summary["ess_fraction"]


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [None, 10])
def test_weight_of_a_client_without_examples_is_no_reason_to_fail(
    cohort: int | None, tmp_path: Path
) -> None:
    """A plain mean gives it weight: then there is no ESS; weights by size give it none."""
    shift = {"kind": "dirichlet-per-class", "beta": 0.02, "min_size": 0, "clients": 30}
    tables = {
        "data": {"validation": 0.0},
        "shift": shift | {"target": "uniform"},
        "training": {"rounds": 1, "steps": 1} | ({"cohort": cohort} if cohort else {}),
    }
    summary, _ = recorded(tmp_path / "mean", config_of("scaffold", **tables))
    assert 0 in np.sum(summary["label_counts"], axis=1)
    assert (summary["ess"], summary["ess_fraction"]) == (None, None)
    assert summary["distance"] > 0
    assert "–" in page([read_run(tmp_path / "mean")])
    assert recorded(tmp_path / "size", config_of("fedavg", **tables))[0]["ess"] > 0


def test_cohorts_of_all_are_not_draws() -> None:
    training = validate({"training": {"cohort": 4}}).training
    assert [training.draws(n) for n in (4, 5)] == [False, True]
    assert not validate({}).training.draws(5)
