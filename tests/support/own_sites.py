"""Clients with tables of their own, which can be joined into one, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.experiment import record
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid
from fedshift_deploy.chosen import CHOICES, SITE
from fedshift_deploy.machines import deployed
from fedshift_deploy.sites.answering import EXPERIMENT

SITES = ("coast", "east", "south")
FILE = """\
name = "own"
[data]
source = "sites"
clients = ["coast", "east", "south"]
label = "outcome"
classes = ["well", "ill"]
columns = ["age", "sex", "day", "marker", "ward"]
categories = ["sex", "ward"]
target = {well = 0.3, ill = 0.7}
[model]
name = "mlp"
hidden = [8]
[method]
name = "fedpals"
ess = 0.5
[training]
rounds = 2
steps = 4
evaluate_every = 1
"""


def joined(seed: int = 0, n: int = 120) -> pd.DataFrame:
    """The interleaved rows of three sites, with gaps, dates as numbers and rare wards."""
    rng = np.random.default_rng(seed)
    site = rng.choice(SITES, n, p=(0.5, 0.3, 0.2))
    age = rng.normal(60, 12, n).round(1)
    marker = np.where(rng.random(n) < 0.15, np.nan, rng.normal(0.1, 1.3, n).round(3))
    ill = rng.random(n) < 1 / (1 + np.exp(-(age - 60) / 8))
    ward = rng.choice(["surgery", "medicine", "other"], n).astype(object)
    ward[rng.random(n) < 0.1] = None
    ward[np.flatnonzero(site == "south")[:1]] = "hospice"
    outcome = np.where(ill, "ill", "well").astype(object)
    outcome[::29] = None
    return pd.DataFrame(
        {
            "site": site,
            "age": age,
            "sex": rng.choice(["f", "m"], n),
            "day": 20_240_000 + rng.integers(0, 400, n),
            "marker": marker,
            "ward": ward,
            "outcome": outcome,
        }
    )


def places(folder: Path, table: pd.DataFrame, text: str = FILE) -> list[Path]:
    """A folder for each client, with its rows, site.toml and the experiment."""
    made = []
    for i, name in enumerate(SITES):
        place = folder / f"client-{i}"
        place.mkdir(parents=True)
        table[table["site"] == name].drop(columns="site").to_csv(place / "data.csv", index=False)
        (place / "site.toml").write_text('[data]\nsource = "data.csv"\n')
        (place / EXPERIMENT).write_text(text)
        made.append(place)
    return made


def resolved(folder: Path, text: str = FILE) -> str:
    """The experiment as `fedshift deploy init` puts it into the app."""
    path = folder / "file.toml"
    path.write_text(text)
    return dumps(load_config(path))


def deploy(
    monkeypatch: pytest.MonkeyPatch, folders: Sequence[Path], out: Path, text: str,
    wrap: Callable[[Any], Any] = lambda app: app,
) -> Path:  # fmt: skip
    """Run the deployed app in this process, each client with its own folder."""
    given = {
        "experiment": text,
        "site": CHOICES[SITE],
        "out": str(out),
        "patience": 1.0,
        "timeout": 60.0,
    }

    def place_of(context: Any) -> Path:
        return folders[int(context.node_config["partition-id"])]

    monkeypatch.setattr(deployed, "place_of", place_of)
    grid = LocalGrid(wrap(deployed.client_app), len(folders))
    for context in grid.contexts.values():
        context.run_config = dict(given)
    deployed.server_app(grid, SimpleNamespace(run_config=given))  # type: ignore[arg-type]
    return out


def together(folder: Path, table: pd.DataFrame, text: str = FILE) -> Path:
    """The same experiment in one process, on the joined table."""
    table.to_csv(folder / "joined.csv", index=False)
    text = text.replace('source = "sites"', 'source = "joined.csv"\nclient = "site"')
    lines = [line for line in text.splitlines() if not line.startswith(("clients =", "values ="))]
    (folder / "joined.toml").write_text("\n".join(lines))
    config, out = load_config(folder / "joined.toml"), folder / "here"
    out.mkdir()
    record(out, config, prepare(config), ignore_event)
    return out
