"""A federation of three real clients on loopback, of which one claims 10^9 examples. Slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.measures.caps import with_cap
from support.loopback import Loopback, gone, loopback, processes

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "loopback" / "experiment.toml"
# Weights follow from what clients register, so one round shows them.
SHORT = ["training.rounds=1", "training.steps=3", "method.name=fedavg", "method.ess="]


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """Three clients, for both tests: each run brings an experiment of its own."""
    folder = tmp_path_factory.mktemp("liar") / "federation"
    with loopback(folder, dumps(load_config(EXAMPLE, SHORT)), 3) as made:
        for client in range(3):
            made.join(client)
        yield made
    assert gone(str(folder)), processes(str(folder))


def test_a_liar_has_the_cap_and_is_named(fed: Loopback, tmp_path: Path) -> None:
    config = load_config(EXAMPLE, SHORT)
    training, _ = with_cap(config.method, config.training, config.clients)
    capped = config.model_copy(update={"training": training})

    def played(name: str, text: str, plan: str) -> tuple[dict[str, Any], dict[str, Any]]:
        fed.play(tmp_path / name, experiment=text, plan=plan)
        claims = next(event for event in fed.events if event["event"] == "claims")
        return json.loads((tmp_path / name / "summary.json").read_text()), claims

    run, claims = played("capped", dumps(capped), "lie 0 2")
    assert run["weights"][2] == pytest.approx(0.5, abs=1e-12)
    assert {one["client"] for one in claims["suspicions"]} == {2}
    assert any(line.startswith("Client 2: by what it registered it") for line in run["why"])
    # Control: without the cap it has everything.
    run, claims = played("free", dumps(config), "lie 0 2")
    assert run["weights"][2] > 0.99999
    assert claims["one_could_take"] > 0.99999


def test_a_refused_answer_holds_no_round_up(fed: Loopback, tmp_path: Path) -> None:
    """100 MB in answer to a model of 100 kB: that client drops out, and the others do not wait."""
    text = dumps(load_config(EXAMPLE, [*SHORT, "training.max_weight=0.5"]))
    fed.play(tmp_path / "run", experiment=text, plan="swell-100 1 0")
    (lost,) = [event for event in fed.events if event["event"] == "dropped"]
    assert (lost["round"], lost["client"]) == (1, 0)
    log = (fed.folder / "superlink.log").read_text().splitlines()
    refused = max(line.split()[0] for line in log if line.endswith(" 413"))
    # From the refusal, since rounds take minutes on a busy machine. Flower alone waits for 180 s.
    assert lost["time"] - datetime.fromisoformat(refused).timestamp() < 60
