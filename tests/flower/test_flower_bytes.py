"""Bytes per round and client on Flower's messages, against the methods' specified costs."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift import recipes
from fedshift.client.local import Local
from fedshift.model import build
from fedshift.recipes import Setting
from fedshift.tree import size_in_bytes
from support.federations import Normed, make_clients, make_federation

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "results" / "flower_bytes.md").read_text(encoding="utf-8").splitlines()
sys.path.insert(0, str(ROOT / "benchmarks"))
traffic = import_module("flower_bytes")
METHODS = sorted({row.partition(",")[0] for row in traffic.SPECIFIED})


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_methods_cost_what_is_specified_and_printed(name: str) -> None:
    for row, counts in traffic.counted(name, traffic.makers()[name]).items():
        assert traffic.agrees(counts, traffic.SPECIFIED[row]), (row, counts)
        assert traffic.row_of(row, counts) in PAGE
        other = "scaffold" if name != "scaffold" else "fedavg"
        assert not traffic.agrees(counts, traffic.SPECIFIED[other])  # the control


def test_every_specified_method_is_in_the_printed_table() -> None:
    rows = {line.split("|")[1].strip().partition(",")[0] for line in PAGE if line.startswith("|")}
    rows -= {"method", "---"}
    assert set(METHODS) <= rows <= set(traffic.makers())


def test_buffers_travel_as_the_model_does() -> None:
    """P + B, where running statistics are floats and counters eight bytes each."""
    model = build(Normed, seed=0)
    federation = make_federation(model, make_clients(sizes=(16, 24)))
    algorithm = recipes.fedavg(Setting(model, (0.2,) * 5, Local(batch=8)))
    seen = traffic.played(algorithm, federation)[1]
    params, buffers = model.init()
    whole = size_in_bytes({"params": params, "buffers": buffers})
    assert buffers
    assert (seen.down, seen.up) == (2 * whole, 2 * (whole + traffic.REPORT))
