"""Tasks whose clients have test sets, and runs on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import datasets
from fedshift.datasets import Samples, cifar100
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import record, run_experiment
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.served import over_last, reasons
from fedshift.experiments.task.client_tests import pool
from fedshift.experiments.task.preparing import Prepared, oracle_clients, prepare, scaled
from fedshift.record.rounds import ServedMetrics
from fedshift.router.route import Router

TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mnist-mini", "validation": 0.0, "limit": 800},
    "shift": {
        "kind": "shards", "shards_per_client": 2, "clients": 4, "target": "clients",
        "transform": "fashion",
    },
    "model": {"name": "lenet-gn-small"},
    "training": {
        "rounds": 3, "steps": 4, "batch": 16, "lr": 0.05, "evaluate_every": 3, "evaluate_last": 2,
    },
}  # fmt: skip


def made(method: str = "feddrm", **changes: dict[str, Any]) -> dict[str, Any]:
    tables = {k: v | changes.get(k, {}) for k, v in TABLES.items()}
    return tables | {"method": {"name": method, **changes.get("method", {})}}


def ready(**changes: dict[str, Any]) -> Prepared:
    return prepare(validate(made(**changes)))


def test_the_pool_has_both_files_or_a_part_of_them() -> None:
    data = datasets.load("fashion-mnist-mini")
    whole = pool(data, None, 0)
    assert len(whole.train) == len(data.train) + len(data.test)
    assert len(whole.test) == 0
    some = pool(data, 50, 0)
    assert len(some.train) == 50
    assert not torch.equal(some.train.y, pool(data, 50, 1).train.y)
    with pytest.raises(InputError, match="data.limit = 99999, but fashion-mnist-mini has 10000"):
        pool(data, 99_999, 0)


def test_the_task_tests_every_client_on_its_own_kind_of_data() -> None:
    prepared = ready()
    task = prepared.task
    assert [len(c.y) + len(t) for c, t in zip(task.clients, task.tests, strict=True)] == [200] * 4
    assert [len(t) for t in task.tests] == [60] * 4
    assert torch.equal(task.test.x, torch.cat([t.x for t in task.tests]))
    counts = torch.bincount(task.test.y, minlength=10).double()
    torch.testing.assert_close(task.target, counts / counts.sum())
    # Two shards of 100 sorted labels, of which there are about 80 each.
    pairs = zip(task.clients, task.tests, strict=True)
    assert all(len({*c.y.tolist(), *t.y.tolist()}) <= 6 for c, t in pairs)


def test_every_client_sees_through_its_own_look() -> None:
    """Client 2 inverts after darkening: white background where client 0's is black."""
    task, plain = ready().task, ready(shift={"transform": "none"}).task
    assert all(torch.equal(a.y, b.y) for a, b in zip(task.clients, plain.clients, strict=True))
    raw = (plain.clients[0].x + 1) / 2
    torch.testing.assert_close((task.clients[0].x + 1) / 2, raw * 0.5)
    inverted = (task.clients[2].x + 1) / 2
    torch.testing.assert_close(inverted, 1 - 0.5 * (plain.clients[2].x + 1) / 2)
    assert not torch.equal(task.clients[1].x, task.clients[0].x)
    assert float(scaled(torch.tensor([[255]], dtype=torch.uint8))) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift": {"target": "drawn"}}, 'transform needs target = "clients"'),
        ({"shift": {"intensity": "low"}}, 'intensity is for transform = "bits"'),
        ({"model": {"branches": "mid"}}, 'branches is for "lenet-gn", not for "lenet-gn-small"'),
        ({"shift": {"clients": 9}}, "8"),
        ({"model": {"name": "lenet"}}, 'model.name "lenet" has no branch that tells clients apart'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ready(**changes)


def run(method: str, folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    config = validate(made(method, **changes))
    record(folder, config, prepare(config), ignore_event)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


@pytest.mark.slow
def test_feddrm_is_measured_in_every_way_to_answer_a_query(tmp_path: Path) -> None:
    summary = run("feddrm", tmp_path)
    last = summary["last"]
    assert (last["round"], last["rounds"]) == (3, 2)
    assert last["global_accuracy"] is None
    assert last["system_accuracy"] == last["routed_posterior"]
    assert last["average_accuracy"] == pytest.approx(last["oracle_routed"])
    for name in ("mixture_accuracy", "refitted_accuracy", "moment_router_accuracy"):
        assert 0.0 <= last[name] <= 1.0
    assert "imperfect routing costs" in summary["why"][0]
    rows = (tmp_path / "served.csv").read_text().splitlines()
    assert len(rows) == 1 + 2
    assert "client3.private/head.weight" in (tmp_path / "model.safetensors").read_bytes()[
        :9000
    ].decode(errors="ignore")


@pytest.mark.slow
def test_fedavg_has_one_model_for_all_ways(tmp_path: Path) -> None:
    last = run("fedavg", tmp_path)["last"]
    assert last["global_accuracy"] == last["vote_accuracy"] == last["oracle_routed"]
    assert last["routed_posterior"] is None


def test_fedavg_and_feddrm_start_from_one_body_and_head() -> None:
    plain, routed = ready(), prepare(validate(made("fedavg")))
    mine, theirs = plain.model.init()[0], routed.model.init()[0]
    assert any(k.startswith("router.") for k in mine)
    assert all(torch.equal(mine[k], v) for k, v in theirs.items())


def test_a_personal_method_needs_the_clients_own_tests(tmp_path: Path) -> None:
    shift = {"target": "drawn", "transform": "none", "kind": "iid"}
    shift["shards_per_client"] = None  # type: ignore[assignment]
    with pytest.raises(InputError, match='Set shift.target = "clients" .or data.target, for data'):
        run("fedrep", tmp_path, shift=shift)


def test_the_last_rounds_are_averaged() -> None:
    def at(t: int, value: float) -> ServedMetrics:
        return ServedMetrics(t, *[value] * 10)

    last = over_last([at(1, 0.0), at(2, 0.4), at(3, 0.6)], 2)
    assert (last["rounds"], last["vote_accuracy"]) == (2, pytest.approx(0.5))
    assert last["vote_accuracy_sd"] == pytest.approx(0.1)  # divided by 2, not by 1
    single = over_last([at(1, 0.0), at(3, 0.6)], 0)
    assert (single["rounds"], single["vote_accuracy"]) == (1, 0.6)
    assert math.isnan(single["vote_accuracy_sd"])  # one round does not scatter


def test_the_page_says_how_the_global_model_compares() -> None:
    nan = float("nan")
    base = {"average_accuracy": 0.9, "oracle_routed": 0.9, "vote_accuracy": 0.5}
    voted = base | {"system_accuracy": 0.5, "router_accuracy": nan, "global_accuracy": 0.8}
    assert reasons(voted) == [
        "By its own client's model 90.0 % of all test rows are answered rightly; by the vote of "
        "all models, 50.0 %.",
        "By the global model, 80.0 %: 10.0 points less than by the clients' own models, 30.0 "
        "points more than by their vote.",
    ]
    assert "as many as by their vote" in reasons(voted | {"global_accuracy": 0.5})[1]
    other = reasons(voted | {"average_accuracy": 0.85, "rounds": 5})[0]
    assert "(85.0 % where clients count by their training rows)" in other
    assert "(Means of the last 5 measured rounds.)" in other
    routed = voted | {"router_accuracy": 0.6}
    assert "queries sent by this router, do not beat it here" in reasons(routed)[1]
    assert len(reasons(routed | {"global_accuracy": 0.4})) == 1


@pytest.mark.slow
def test_a_router_that_cannot_be_refitted_loses_no_run(tmp_path: Path, monkeypatch: Any) -> None:
    def stuck(*_: Any, **__: Any) -> None:
        raise TrainingError("the refit of the router stands at gradient 1 after 9 rounds")

    monkeypatch.setattr(Router, "refitted", stuck)
    summary = run("feddrm", tmp_path)
    assert summary["last"]["refitted_accuracy"] is None
    assert summary["last"]["moment_accuracy"] > 0
    assert summary["why"][-1].startswith(
        "The router has no refitted layer: the refit of the router"
    )


def test_the_oracles_clients_keep_their_looks() -> None:
    """Bright corners where the look inverts, as in the client's own images."""
    prepared = ready()
    mine, oracles = prepared.task.clients, oracle_clients(prepared)
    corners = [[float(c.x[:, 0, 0, 0].median()) for c in many] for many in (mine, oracles)]
    assert corners[0] == corners[1]
    assert len(set(corners[0])) > 1


def test_cifar_20_is_dealt_by_its_fine_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 shards each: about 12 neighbouring fine labels of many superclasses; by coarse, 2 or 3."""
    fine = torch.arange(100).repeat(20)
    images = torch.zeros(len(fine), 3, 32, 32, dtype=torch.uint8)

    def load(name: str, **options: Any) -> datasets.Dataset:
        y = fine if name == "cifar-100" else cifar100.coarse(fine)
        classes = cifar100.FINE if name == "cifar-100" else cifar100.COARSE
        examples = Samples(images, y)
        empty = Samples(images[:0], y[:0])
        return datasets.Dataset(name, examples, empty, classes, "0" * 64, "here", "none")

    monkeypatch.setattr("fedshift.experiments.task.client_tests.datasets.load", load)
    tables = made("fedavg", data={"name": "cifar-20", "limit": 1600})
    tables["shift"] |= {"clients": 8, "transform": "none"}
    tables["model"] = {"name": "linear"}
    task = prepare(validate(tables)).task
    assert len(task.classes) == 20
    labels = [len(c.y.unique()) for c in task.clients]
    assert min(labels) >= 5
    tables["data"] |= {"name": "cifar-100"}
    assert len(prepare(validate(tables)).task.classes) == 100


@pytest.mark.slow
def test_nothing_is_routed_to_clients_that_never_took_part() -> None:
    """One round of 2 of 4 clients: the report's router is `Router.of`."""
    config = validate(made(training={"rounds": 1, "cohort": 2, "evaluate_last": 1}))
    prepared = prepare(config)
    experiment = run_experiment(config, prepared=prepared)
    outcome, task = experiment.outcome, prepared.task
    trained = set(outcome.last.states)
    assert len(trained) == 2
    router = Router.of(experiment.algorithm, outcome.last.server, outcome.last.states)
    assert set(router.clients) == trained
    answers = router.predict(task.test.x, "hard").argmax(1)
    assert outcome.served[-1].system_accuracy == pytest.approx(
        float((answers == task.test.y).double().mean())
    )
    assert outcome.at_end is not None
    sent = torch.tensor(outcome.at_end.details["router"]["sent"])
    assert sent.sum(0).nonzero().flatten().tolist() == sorted(trained)
