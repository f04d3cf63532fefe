"""What a run with label sets sends, counted, and what it says of absent labels and of tuning."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from label_set_fixtures import tables

from fedshift import recipes
from fedshift.engine.backends import Job, loop
from fedshift.engine.rounds import Federation, run
from fedshift.engine.traffic import Meter, Traffic
from fedshift.experiments.folder import record, summary_of
from fedshift.experiments.label_sets import SetRound, sentences
from fedshift.experiments.load import load_config, validate
from fedshift.experiments.task import prepare
from fedshift.experiments.training import silent
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.report.page import page
from fedshift.report.run_folder import read_run
from fedshift.shifts import LabelSetSplit
from fedshift.tree import size_in_bytes

# --------------------------------------------------------------------------- what is sent, counted


def test_bytes_are_those_of_the_messages(mlp: Model, federated: Callable[..., Federation]) -> None:
    """Up 4 (|phi| + (d + 1) L), id and loss; down the same, 8 L for the slots. Public: L = K."""
    setting = Setting(mlp, (0.2,) * 5)
    params, _ = mlp.init()
    head = sum(v.numel() for k, v in params.items() if k.startswith("head."))
    body, row = sum(v.numel() for v in params.values()) - head, head // 5
    whole = size_in_bytes({"params": params})
    assert whole == 4 * (body + 5 * row)
    for mode, slots in (("private", 3), ("private", 4), ("public", 5)):
        meter = Meter()
        given = {"slots": slots} if mode == "private" else {}
        algorithm = recipes.labelset_fedavg(setting, mode=mode, **given)
        for _ in run(algorithm, federated(), 2, cohort=4, backend=meter):
            pass
        wire = 4 * (body + slots * row)
        assert meter.last.each() == (wire + 8 * slots * (mode == "private"), wire + 12)
        assert meter.last.clients == 4  # the last round's alone
    assert Traffic().each() == (0.0, 0.0)


def test_the_meter_changes_nothing(mlp: Model, federated: Callable[..., Federation]) -> None:
    algorithm = recipes.labelset_fedavg(Setting(mlp, (0.2,) * 5))
    seen: list[int] = []

    def backend(update: Any, jobs: Any) -> Any:
        def told() -> Any:
            job: Job
            for job in jobs:
                seen.append(job.client)
                yield job

        return loop(update, told())

    ends = [
        [*run(algorithm, federated(), 2, backend=b)][-1].server["params"]
        for b in (loop, Meter(), Meter(backend))
    ]
    assert all(torch.equal(ends[0][k], other[k]) for other in ends[1:] for k in ends[0])
    assert seen == list(range(6)) * 2


# --------------------------------------------------------------------------- what a run says


def test_a_run_tells_what_was_absent_and_where_mass_went(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "training": {"cohort": 2, "rounds": 3},
        "shift": {"labels_per_client": 3, "cover": False, "clients": 4},
        "method": {"tune": "pairwise"},
        "server": {"validation": 0},
    }  # fmt: skip
    config = validate(tables(**changes) | {"name": "sets"})
    experiment = record(tmp_path, config, prepare(config), silent)
    found = summary_of(tmp_path)
    sets, server = found["label_sets"], experiment.outcome.last.server
    assert sets["holders"] == np.array(found["label_counts"]).astype(bool).sum(0).tolist()
    assert sets["absent_rounds"] == server["absent"]["rounds"].tolist()
    assert [r["round"] for r in sets["rounds"]] == [1, 2, 3]
    last = sets["rounds"][-1]
    assert last["absent"] == int(server["absent"]["now"].sum()) >= 4
    assert last["outside_after"] == pytest.approx(float(server["tuning"]["outside"][1]))
    assert found["final"]["sets_outside_after"] == last["outside_after"]
    assert found["final"]["bytes_model"] == size_in_bytes({"p": experiment.outcome.params})
    why = " ".join(found["why"])
    assert "central tuning moved the mass on the" in why
    html = page([read_run(tmp_path)])
    assert "Clients that hold it" in html
    text = re.sub(r"(<[^>]*>\s*)+", "|", html)
    for row in zip(found["classes"], sets["holders"], sets["absent_rounds"], strict=True):
        assert f"|{row[0]}|{row[1]}|{row[2]}|" in text
    assert "Mass on absent labels before" in html


def test_a_run_without_label_sets_says_nothing_of_them(tmp_path: Path) -> None:
    plain = tables(training={"rounds": 1}) | {"method": {"name": "fedavg"}, "name": "plain"}
    config = validate(plain)
    record(tmp_path, config, prepare(config), silent)
    found = summary_of(tmp_path)
    assert found["label_sets"] is None
    assert not any(k.startswith("sets_") for k in found["final"])
    assert found["final"]["bytes_down"] == found["final"]["bytes_model"]
    assert 'id="label-sets"' not in page([read_run(tmp_path)])


def test_sentences_name_labels_of_nobody_and_labels_absent_at_times() -> None:
    one = SetRound(9, 2, 0.5, 0.4, 0.25, 0.75)
    found = {"holders": [1, 0, 2], "absent_rounds": [4, 9, 0], "rounds": [vars(one)]}
    said = sentences(found, ("cat", "dog", "cow"))
    assert said == [
        'No client holds "dog": the rows of the head stay as they began.',
        'Rounds of 9 in which nobody of the cohort held a label: "cat" (4).',
        "In the last round central tuning moved the mass on the 2 absent labels from 25.0% to "
        "75.0%.",
    ]
    calm = {"holders": [1], "absent_rounds": [0], "rounds": [vars(replace(one, absent=0))]}
    assert sentences(calm, ("cat",)) == []


def test_an_experiment_file_can_say_all_this(tmp_path: Path) -> None:
    path = tmp_path / "sets.toml"
    path.write_text(
        '[shift]\nkind = "label-sets"\ntarget = "union"\nclients = 10\nlabels_per_client = 2\n'
        'samples = 500\n[server]\nunlabeled = 1000\n[method]\nname = "labelset_fedprox"\n'
        'mode = "public"\ntune = "pairwise"\n'
    )
    config = load_config(path)
    assert config.shift.shift() == LabelSetSplit(2, samples=500)
    assert config.server.unlabeled == 1000
