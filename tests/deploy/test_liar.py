"""A client that claims 10^9 examples: its weight, and whether it is reported."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.config.schema import Config
from fedshift.experiments.experiment import federation_of, method_of, record
from fedshift.experiments.folder.run_folder import EventLog
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.caps import cap_named
from fedshift.experiments.on_flower import configured_site
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid, client_app
from fedshift_deploy.machines.deployed import opening
from fedshift_deploy.machines.deployed_engine import Deployed, News
from fedshift_deploy.machines.opening import opening_event
from support.liars import Lying

EXAMPLE = Path(__file__).parents[2] / "examples" / "loopback" / "experiment.toml"
BY_SIZE = ("method.name=fedavg", "method.ess=")
LIAR = 2


def experiment(*changes: str) -> Config:
    return load_config(EXAMPLE, ["training.rounds=1", "training.steps=2", *changes])


def grid_of(config: Config, liar: int | None = LIAR) -> LocalGrid:
    app: Any = client_app(partial(configured_site, dumps(config)))
    return LocalGrid(app if liar is None else Lying(app, liar), 3)


def folder_of(config: Config, out: Path, liar: int | None = LIAR) -> dict[str, Any]:
    """The run's folder as the deployed server writes it: summary and claims."""
    prepared, waits = prepare(config), {"patience": 1.0, "timeout": 60.0}
    out.mkdir()
    opens = partial(
        opening, EventLog(out), prepared, run=config.name, dealt=True,
        cap=cap_named(config.method, config.training), cohort=config.training.cohort,
    )  # fmt: skip
    engine = Deployed(grid_of(config, liar), waits, out, opens, News(out, config.name))
    record(out, config, prepared, ignore_event, engine)
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    claims = next(line for line in lines if line["event"] == "claims")
    return json.loads((out / "summary.json").read_text()) | {"claims": claims}


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [BY_SIZE, ()], ids=["sizes", "fedpals"])
def test_the_liar_has_the_cap_and_is_named(method: tuple[str, ...], tmp_path: Path) -> None:
    run = folder_of(experiment("training.max_weight=0.5", *method), tmp_path / "run")
    assert run["weights"][LIAR] == pytest.approx(0.5, abs=1e-12)
    warnings = [
        line for line in run["why"] if line.startswith(f"Client {LIAR}: by what it registered")
    ]
    assert len(warnings) == 1
    assert "it would have 1.000 of" in warnings[0] or "it would have 0.999 of" in warnings[0]
    assert "of the weight; the cap leaves it 0.500. It claims 1,000,000,000 examples" in warnings[0]
    claims = run["claims"]
    assert claims["one_could_take"] == 0.5
    assert claims["without_cap"] > 0.999
    assert {one["client"] for one in claims["suspicions"]} == {LIAR}
    reasons = " ".join(one["reason"] for one in claims["suspicions"])
    assert "1,000,000,000 examples, 1,33" in reasons  # times the median of the others
    assert "registered 1,000,000,000 examples; the experiment deals it" in reasons


@pytest.mark.slow
def test_without_a_cap_it_takes_everything_but_not_in_silence(tmp_path: Path) -> None:
    run = folder_of(experiment(*BY_SIZE), tmp_path / "run")
    assert run["weights"][LIAR] > 0.99999
    assert run["claims"]["one_could_take"] > 0.999
    assert "no cap bounds it" in run["claims"]["suspicions"][0]["reason"]


@pytest.mark.slow
def test_no_honest_client_is_suspected(tmp_path: Path) -> None:
    config = experiment("training.max_weight=0.5", *BY_SIZE)
    there = folder_of(config, tmp_path / "there", liar=None)
    assert there["claims"]["suspicions"] == []
    (tmp_path / "here").mkdir()
    record(tmp_path / "here", config, prepare(config), ignore_event)
    for name in ("summary.json", "model.safetensors", "clients.csv"):
        same = (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
        assert same, name


def claims_of(config: Config, change: Any, *, dealt: bool = True) -> dict[str, Any]:
    prepared = prepare(config)
    federation = federation_of(config.method, prepared)
    table = {k: v.clone() for k, v in federation.table.items()}
    change(table)
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    return opening_event(
        prepared, algorithm, federation, table, run=config.name,
        cap=cap_named(config.method, config.training), cohort=config.training.cohort, dealt=dealt,
    )  # fmt: skip


@pytest.mark.slow
def test_labels_are_set_against_gradients() -> None:
    """Twenty clients of ten labels, of which one claims another's labels at its own size."""
    config = experiment("shift.labels_per_client=3", "shift.clients=20")

    def swap(table: dict[str, torch.Tensor]) -> None:
        labels = torch.zeros(10).double()
        labels[0] = table["n"][4]
        table["labels"][4] = labels

    honest = claims_of(config, lambda table: None)
    assert honest["audit"] == "20 consistent"
    assert honest["suspicions"] == []
    event = claims_of(config, swap)
    assert event["audit"] == "19 consistent, 1 inconsistent"
    reasons = [one["reason"] for one in event["suspicions"] if one["client"] == 4]
    assert reasons[0].startswith("its label counts do not fit the gradients of its data (p = ")
    assert "registered other label counts than those of the data" in reasons[1]


@pytest.mark.slow
def test_what_the_server_cannot_look_at() -> None:

    def more(table: dict[str, torch.Tensor]) -> None:
        table.update(n=table["n"] + 1)

    few = claims_of(experiment(), lambda table: None)
    assert few["audit"] == "3 untested"  # three clients of ten labels
    elsewhere = claims_of(experiment(), more, dealt=False)
    assert elsewhere["audit"] == "not made: the server has no examples of the clients"
    assert not any("deals" in one["reason"] for one in elsewhere["suspicions"])
    by_size = claims_of(experiment(*BY_SIZE), lambda table: table.pop("labels"))
    assert by_size["audit"] == "not made: clients register no label counts"


@pytest.mark.slow
def test_what_one_client_could_take() -> None:
    """By FedPALS and by size all of the weight, by a plain mean its even share."""
    for method, free in (
        ((), 1.0),
        (BY_SIZE, 1.0),
        (("method.name=fedmedian", "method.ess="), 1 / 3),
    ):
        event = claims_of(experiment("training.max_weight=0.4", *method), lambda table: None)
        assert event["without_cap"] == pytest.approx(free, abs=1e-3), method
        assert event["one_could_take"] == pytest.approx(min(free, 0.4), abs=1e-3), method


@pytest.mark.parametrize("changes", [
    ("training.max_weight=0.5", *BY_SIZE), ("shift.labels_per_client=3", "shift.clients=20"),
], ids=["two of three", "19 of 20"])  # fmt: skip
def test_a_client_that_has_not_joined_is_not_suspected(changes: tuple[str, ...]) -> None:
    """As with --min-clients: its row of zeros says nothing of it, nor of the others' sizes."""

    def absent(table: dict[str, torch.Tensor]) -> None:
        for column in table.values():
            column[2] = 0.0

    event = claims_of(experiment(*changes), absent)
    assert event["suspicions"] == []
    assert event["audit"] in (
        "not made: it needs all clients, with examples",
        "not made: clients register no label counts",
    )
