"""One schema writes and reads a run's summary and tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fedshift.record.rounds import (
    ROUND_COLUMNS,
    Client,
    Metrics,
    clients_csv,
    other_columns,
    read_clients,
    read_rounds,
    rounds_csv,
)
from fedshift.record.summary import parsed, written

GOLDEN = Path(__file__).parents[1] / "golden"
SUMMARIES = sorted(path.parent.name for path in GOLDEN.glob("*/summary.json"))


@pytest.mark.parametrize("name", SUMMARIES)
def test_what_is_read_is_written_again(name: str) -> None:
    """Control: a changed number."""
    text = (GOLDEN / name / "summary.json").read_text()
    summary, other = parsed(text), json.loads(text)
    assert json.loads(written(summary)) == other
    other["final"]["round"] += 1
    assert parsed(json.dumps(other)) != summary


def test_tables_come_back() -> None:
    names = [name for name in Metrics.__dataclass_fields__ if name not in ("round", "others")]
    others = {"auc": 0.5, "brier": math.nan}
    one = Metrics(round=3, others=others, **dict.fromkeys(names, 0.5) | {"gap": math.nan})  # type: ignore[arg-type]
    (row,) = read_rounds(Path("metrics.csv"), rounds_csv([one]), ROUND_COLUMNS)
    assert row.round == 3
    assert row.values == dict.fromkeys(names, 0.5) | {"gap": None, "auc": 0.5, "brier": None}
    assert other_columns([row], ("auc", "brier", "gap")) == ("auc", "brier")
    clients = (
        Client("0", 12, 0.25, 0.5, 0.75, 4, (5.0, 7.0)),
        Client("1", 12, 0.75, 0.5, None, 0, (12.0, 0.0)),
    )
    text = clients_csv(clients, ("cat", "dog"))
    assert read_clients(Path("clients.csv"), text, ("cat", "dog")) == clients
    other = clients_csv(clients[::-1], ("cat", "dog"))
    assert read_clients(Path("clients.csv"), other, ("cat", "dog")) != clients
