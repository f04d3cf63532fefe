"""The example of a Flower app that takes FedPALS."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Context, RecordDict

from fedshift.flower import LocalGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_dropin"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield lambda name: import_module(f"dropin.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "dropin"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_example_runs(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Both strategies run in the app's ServerApp; FedPALS is better on the target."""
    accuracies = {}
    for name in ("fedavg", "fedpals"):
        config = {"num-server-rounds": 3, "local-epochs": 1, "learning-rate": 0.1, "strategy": name}
        grid = LocalGrid(example("client_app").app, 6)
        for context in grid.contexts.values():
            context.run_config = config
        context = Context(1, 0, node_config={}, state=RecordDict(), run_config=config)
        example("server_app").app(grid, context)
        accuracies[name] = float(context.state["result"]["target-accuracy"])
        assert f"after round 3: {100 * accuracies[name]:.1f} %" in capsys.readouterr().out
    assert accuracies["fedpals"] > accuracies["fedavg"] + 0.02


def test_the_example_differs_from_the_quick_start_in_two_lines() -> None:
    text = (EXAMPLE / "dropin" / "server_app.py").read_text()
    lines = [line for line in text.splitlines() if "FedPALS" in line and "  # the " in line]
    assert len(lines) == 2
    readme = (EXAMPLE / "README.md").read_text()
    assert "+from fedshift.flower import FedPALS" in readme
