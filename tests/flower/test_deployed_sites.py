"""A federation whose clients hold other data than the experiment deals them."""

from __future__ import annotations

import csv
import json
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift import pals_weights
from fedshift.data import label_counts
from fedshift.experiments.config.load import validate
from fedshift.experiments.on_flower import configured_site
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid, Site, client_app
from fedshift_deploy.machines import deployed
from support.small_runs import text_of


def smaller_site(text: str, client: int) -> Site:
    """Half, a third or a quarter of what is dealt; client 1 cannot train on it."""
    site = configured_site(text, client)
    dealt, n = site.data, len(site.data.y) // (client + 2)
    x = dealt.x[:n] * (torch.inf if client == 1 else 1.0)
    return replace(site, data=dealt._replace(x=x, y=dealt.y[:n], w=dealt.w[:n]))


@pytest.mark.slow
def test_gap_and_tables_are_of_the_data_that_clients_have(tmp_path: Path) -> None:
    text, out = text_of("fedpals"), tmp_path / "run"
    given = {"experiment": text, "out": str(out), "patience": 60.0, "timeout": 60.0}
    grid = LocalGrid(client_app(partial(smaller_site, text)), 3)
    deployed.server_app(grid, SimpleNamespace(run_config=given))  # type: ignore[arg-type]

    counts = torch.stack([label_counts(smaller_site(text, i).data, 10) for i in range(3)]).numpy()
    target = prepare(validate(tomllib.loads(text), text=text)).task.target.numpy()
    left = pals_weights(counts[[0, 2]], target, ess=0.9)
    rounds = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in rounds if event["event"] == "round"]
    assert [d["client"] for d in rounds[0]["dropped"]] == [1]
    assert rounds[0]["gap"] == pytest.approx(float((left.residual**2).sum() ** 0.5))

    # The weights of the rounds that were played: client 1 was in none.
    rows = list(csv.DictReader((out / "clients.csv").open()))
    assert [int(row["n"]) for row in rows] == counts.sum(1).tolist()
    played = [left.weights[0], 0.0, left.weights[1]]
    assert [float(row["weight"]) for row in rows] == pytest.approx(played)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ess"] == pytest.approx(left.ess)
    assert summary["distance"] == pytest.approx(float((left.residual**2).sum() ** 0.5))
    whole = pals_weights(counts, target, ess=0.9)  # the control: what it would have had
    assert whole.weights[1] > 0.1
