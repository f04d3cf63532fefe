"""What a run reports at its end of missing answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedshift.engine.round import before_rounds
from fedshift.engine.run import run
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.progress import Missed
from fedshift.experiments.task.preparing import prepare
from fedshift.testing.faults import Faulty, at
from support.small_runs import config_of


class FaultyEngine:
    """Round 2 fails for all clients, round 3 for whichever of clients 0, 1, 2 is drawn."""

    backend, tells_drops = "loop", False

    def client_scores(self, current: Any) -> None:
        return None

    def rounds(
        self,
        algorithm: Any,
        federation: Any,
        training: Any,
        options: Any,
        *,
        after: Any,
        meter: Any,
    ) -> Any:
        faults = {(2, i): "nan" for i in range(6)} | {(3, i): "inf" for i in range(3)}
        return run(
            algorithm, federation, training.rounds,
            cohort=training.cohort, backend=Faulty(at(faults)), after=after,
        )  # fmt: skip


@pytest.mark.slow
def test_a_configured_run_goes_on(tmp_path: Path) -> None:
    training = {"rounds": 4, "steps": 1, "cohort": 4, "lr": 0.05, "on_bad_reply": "drop"}
    config = config_of("fedpals", method={"name": "fedpals", "ess": 0.9}, training=training)
    record(tmp_path, config, prepare(config), lambda event: None, FaultyEngine())
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    second, third = (one for one in lines if one["event"] == "round" and one["round"] in (2, 3))
    assert second["skipped"].startswith("round 2: none of 4 clients sent an update")
    assert (len(second["dropped"]), second["clients"]) == (4, [])
    lost = {one["client"] for one in third["dropped"]}
    assert lost
    assert lost <= {0, 1, 2}
    assert "inf" not in str(third["gap"])
    whole = json.loads((tmp_path / "summary.json").read_text())
    rounds = [one for one in lines if one["event"] == "round"]
    lost, used = (sum(len(one.get(k, ())) for one in rounds) for k in ("dropped", "clients"))
    assert whole["missing"] == {"answers": lost, "used": used, "rounds": 2, "skipped": 1}
    assert whole["why"][-1].startswith(
        f"Rounds that lacked answers: 2 of 4, {lost} in all; rounds that were skipped: 1; "
        f"answers used: {used}."
    )


@pytest.mark.slow
def test_a_run_without_drop_outs_says_nothing_of_them(tmp_path: Path) -> None:
    config = config_of("fedavg", training={"rounds": 1, "steps": 1, "on_bad_reply": "drop"})
    record(tmp_path, config, prepare(config), lambda event: None)
    whole = json.loads((tmp_path / "summary.json").read_text())
    assert whole["missing"] is None
    assert not any("dropped out" in one for one in whole["why"])


def test_a_skipped_round_lacks_no_client() -> None:
    played = before_rounds({})
    skipped = Missed().after(played._replace(t=1, skipped="the gap is above max_gap"))
    assert skipped == (0, 0, 0, 1)
    assert skipped.sentence(1).startswith(
        "Rounds that lacked answers: 0 of 1, 0 in all; rounds that were skipped: 1; answers used: 0"
    )
    whole = skipped.after(played._replace(t=2, trained=(0, 2)))
    assert whole == (0, 2, 0, 1)
    assert Missed().after(played._replace(t=1, trained=(0, 2))).sentence(1) == ""
