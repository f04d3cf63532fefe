"""The bytes of a run with label sets, and its sentences on absent labels and on tuning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import recipes
from fedshift.engine.backends import Job, loop
from fedshift.engine.run import Federation, run
from fedshift.engine.traffic import Meter, Traffic
from fedshift.experiments.config.load import load_config, validate
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.run_folder import summary_of
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.label_sets import BLIND, described, sentences
from fedshift.experiments.task.preparing import prepare
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.record.folder import read_run
from fedshift.record.summary import LabelSets, Optima, SetRound
from fedshift.report.page import page
from fedshift.shifts import LabelSetSplit
from fedshift.tree import size_in_bytes
from support.label_set_fixtures import tables

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
        for _ in run(algorithm, federated(), 2, cohort=4, meter=meter):
            pass
        wire = 4 * (body + slots * row)
        assert meter.last.each() == (wire + 8 * slots * (mode == "private"), wire + 12)
        assert meter.last.clients == 4  # the last round's alone
    assert Traffic().each() == (0.0, 0.0)


def test_the_meter_changes_nothing(mlp: Model, federated: Callable[..., Federation]) -> None:
    algorithm = recipes.labelset_fedavg(Setting(mlp, (0.2,) * 5))
    seen: list[int] = []

    def backend(update: Any, jobs: Any) -> Any:
        def noted() -> Any:
            job: Job
            for job in jobs:
                seen.append(job.client)
                yield job

        return loop(update, noted())

    ends = [
        [*run(algorithm, federated(), 2, backend=b, meter=m)][-1].server["params"]
        for b, m in ((loop, None), (loop, Meter()), (backend, Meter()))
    ]
    assert all(torch.equal(ends[0][k], other[k]) for other in ends[1:] for k in ends[0])
    assert seen == list(range(6)) * 2


# --------------------------------------------------------------------------- what a run says


def test_a_run_reports_absent_labels_and_where_mass_went(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "training": {"cohort": 2, "rounds": 3},
        "shift": {"labels_per_client": 3, "cover": False, "clients": 4},
        "method": {"tune": "pairwise"},
        "server": {"validation": 0},
    }  # fmt: skip
    config = validate(tables(**changes) | {"name": "sets"})
    experiment = record(tmp_path, config, prepare(config), ignore_event)
    summary = summary_of(tmp_path)
    sets, server = summary["label_sets"], experiment.outcome.last.server
    assert sets["holders"] == np.array(summary["label_counts"]).astype(bool).sum(0).tolist()
    assert sets["absent_rounds"] == server["absent"]["rounds"].tolist()
    assert [r["round"] for r in sets["rounds"]] == [1, 2, 3]
    last = sets["rounds"][-1]
    assert last["absent"] == int(server["absent"]["now"].sum()) >= 4
    assert last["outside_after"] == pytest.approx(float(server["tuning"]["outside"][1]))
    assert summary["final"]["sets_outside_after"] == last["outside_after"]
    assert summary["final"]["bytes_model"] == size_in_bytes({"p": experiment.outcome.params})
    why = " ".join(summary["why"])
    assert "central tuning moved the mass on the" in why
    html = page([read_run(tmp_path)])
    assert "Clients that hold it" in html
    text = re.sub(r"(<[^>]*>\s*)+", "|", html)
    sizes = [f"{summary['final'][f'bytes_{k}']:,.0f}" for k in ("down", "up", "model")]
    assert f"|private|pairwise, over all labels|{'|'.join(sizes)}|" in text
    for row in zip(summary["classes"], sets["holders"], sets["absent_rounds"], strict=True):
        assert f"|{row[0]}|{row[1]}|{row[2]}|" in text
    assert "Mass on absent labels before" in html


def test_absences_are_reported_where_clients_test_on_their_own_data(tmp_path: Path) -> None:
    given = tables(shift={"cover": False, "target": "clients"}, training={"cohort": 1})
    given.pop("server")
    config = validate(given | {"method": {"name": "labelset_fedavg"}, "name": "own"})
    record(tmp_path, config, prepare(config), ignore_event)
    summary = summary_of(tmp_path)
    assert summary["serving"] is not None
    assert any("no client of the cohort held a label" in s for s in summary["why"])
    html = re.sub(r"(<[^>]*>\s*)+", "|", page([read_run(tmp_path)]))
    assert "|private|none|" in html
    assert "averaged over no client and stays as it was." in html
    # Folders of versions that said neither mode nor bytes.
    for key in ("mode", "tune", "tune_over"):
        del summary["label_sets"][key]
    for key in ("bytes_down", "bytes_up", "bytes_model"):
        del summary["final"][key]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    html = re.sub(r"(<[^>]*>\s*)+", "|", page([read_run(tmp_path)]))
    assert "|–|–|–|–|–|" in html
    assert "stays as it was (but for mode public and tuning over all labels)." in html


@pytest.mark.slow
def test_a_run_without_label_sets_says_nothing_of_them(tmp_path: Path) -> None:
    plain = tables(training={"rounds": 1}) | {"method": {"name": "fedavg"}, "name": "plain"}
    config = validate(plain)
    record(tmp_path, config, prepare(config), ignore_event)
    summary = summary_of(tmp_path)
    assert summary["label_sets"] is None
    assert not any(k.startswith("sets_") for k in summary["final"])
    assert summary["final"]["bytes_down"] == summary["final"]["bytes_model"]
    assert 'id="label-sets"' not in page([read_run(tmp_path)])


@pytest.mark.few(1)
@pytest.mark.parametrize(("validation", "mentioned"), [(0.0, False), (0.001, True)])
def test_a_missing_estimate_is_reported_only_where_one_was_asked_for(
    tmp_path: Path, validation: float, mentioned: bool
) -> None:
    """0.001 of a client's examples is no example either, which is reported."""
    given = tables(data={"validation": validation}, training={"rounds": 1})
    config = validate(given | {"method": {"name": "fedavg"}, "name": "plain"})
    record(tmp_path, config, prepare(config), ignore_event)
    summary = summary_of(tmp_path)
    assert summary["unmeasured_mass"] == pytest.approx(1.0)
    assert any("The estimate leaves out 100 %" in s for s in summary["why"]) == mentioned
    assert summary["why"]


@pytest.mark.slow
def test_a_run_says_whether_tuning_will_pay(tmp_path: Path) -> None:
    """From the server's labelled examples alone, also in rounds after tuning."""
    method = {"tune": "kl", "tune_part": "all", "tune_rounds": 1}
    config = validate(tables(method=method) | {"name": "pays"})
    experiment = record(tmp_path / "run", config, prepare(config), ignore_event)
    content, last = summary_of(tmp_path / "run"), experiment.outcome.last.server
    first, second = content["label_sets"]["rounds"]
    assert first["loss_after"] < first["loss_before"]
    assert second["loss_before"] is None
    assert list(second["optima"]) == ["aggregate", "mse", "pairwise", "kl", "gain_se"]
    errors = second["optima"].pop("gain_se")
    assert list(second["optima"].values()) == last["tuning"]["accuracy"].tolist()
    assert list(errors.values()) == last["tuning"]["gain_se"].tolist()
    assert content["label_sets"]["labelled"] == 50
    assert first["optima"] != second["optima"]
    assert content["final"]["sets_optimum_kl"] == second["optima"]["kl"]
    assert content["final"]["sets_aggregate"] == second["optima"]["aggregate"]
    aggregate = first["optima"]["aggregate"]
    gains = {
        k: f"{100 * (first['optima'][k] - aggregate):+.1f} ± {100 * e:.1f}"
        for k, e in first["optima"]["gain_se"].items()
    }
    (sentence,) = (s for s in content["why"] if s.startswith("Will tuning pay?"))
    assert f"In round 1 the aggregate has {aggregate:.1%} on the server's 50 labelled" in sentence
    mse, pairwise, kl = (f"{k} {v}" for k, v in gains.items())
    assert f"with its standard error: {kl}; beside it {mse}, {pairwise}. With mode" in sentence
    assert not any("gain_se" in k or "labelled" in k for k in content["final"])
    text = re.sub(r"(<[^>]*>\s*)+", "|", page([read_run(tmp_path / "run")]))
    assert f"|1|{aggregate:.1%}|{'|'.join(gains.values())}|" in text
    assert "will tuning pay? (50 labelled examples)" in text
    assert "optima of MSE and of the pairwise loss did not tell in our runs" in text
    summary = (tmp_path / "run" / "summary.json").read_text()
    (tmp_path / "run" / "summary.json").write_text(summary.replace('"private"', '"public"'))
    assert "of the pairwise loss did not tell" not in page([read_run(tmp_path / "run")])
    without = validate(tables(method=method, server={"validation": 0}) | {"name": "none"})
    record(tmp_path / "none", without, prepare(without), ignore_event)
    assert "optima" not in (tmp_path / "none" / "summary.json").read_text()
    assert BLIND in summary_of(tmp_path / "none")["why"]
    assert "labelled examples)" not in page([read_run(tmp_path / "none")]).lower()


@pytest.mark.parametrize(
    ("gain", "error", "answer"),
    [
        (0.05, 0.02, "Yes. In round 1"),
        (-0.05, 0.02, "No: this loss leads away from the truth. In round 1"),
        (0.05, 0.026, "Cannot tell: the gain is within two standard errors. In round 1"),
        (0.0, 0.0, "Cannot tell: no example changed. In round 1"),
    ],
)
def test_will_tuning_pay_is_answered(gain: float, error: float, answer: str) -> None:
    """By the first round that measured it, whatever later ones say."""
    of = {"mse": 0.01, "pairwise": 0.01, "kl": error}
    first = SetRound(1, 0, optima=Optima(0.5, 0.5, 0.5, 0.5 + gain, of))
    late = SetRound(9, 0, optima=Optima(0.9, 0.1, 0.1, 0.1, of))
    sets = LabelSets(
        mode="public", tune="kl", labelled=500, holders=(1,), absent_rounds=(0,),
        rounds=(SetRound(0, 0), first, late),
    )  # fmt: skip
    (sentence,) = sentences(sets, ("cat",))
    start = f"Will tuning pay? {answer} the aggregate has 50.0% on the server's 500"
    assert sentence.startswith(start)
    assert ("kl +0.0 (no example changed);" in sentence) == (not error)
    assert "± 0.0" not in sentence
    assert "tried for round 1" not in sentence
    (sentence,) = sentences(replace(sets, rounds=(late,)), ("cat",))
    assert "Forecasts were tried for round 1 alone." in sentence


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "advised"),
    [
        ({}, True),
        ({"tune_part": "all"}, False),
        ({"tune_rounds": 3}, False),
        ({"mode": "public"}, False),
        ({"tune": "mse"}, False),
        ({"tune_steps": 0}, False),
    ],
)
def test_kl_of_the_head_in_all_rounds_is_advised_against(
    options: dict[str, Any], advised: bool, mlp: Model
) -> None:
    given = {"tune": "kl"} | options
    setting = Setting(mlp, (0.2,) * 5, server_inputs=torch.zeros(3, 12))
    method = recipes.labelset_fedavg(setting, **given)
    server = {"sets": {"held": torch.ones(1, 1)}, "absent": {"rounds": torch.zeros(1)}}
    sets = described(method, server, [SetRound(1, 0)])
    assert sets is not None
    assert any("tune_rounds = 3" in s for s in sentences(sets, ("cat",), method)) == advised


@pytest.mark.parametrize(
    ("mode", "tune", "first"),
    [("private", "mse", "mse"), ("public", "pairwise", "pairwise"), ("private", "none", "kl")],
)
def test_the_runs_loss_comes_first_and_a_doubt_where_there_is_one(
    mode: str, tune: str, first: str
) -> None:
    optima = Optima(0.5, 0.6, 0.55, 0.45, {"mse": 0.02, "pairwise": 0.03, "kl": 0.011})
    texts = {"mse": "mse +10.0 ± 2.0", "pairwise": "pairwise +5.0 ± 3.0", "kl": "kl -5.0 ± 1.1"}
    sets = LabelSets(
        mode=mode,
        tune=tune,
        holders=(1,),
        absent_rounds=(0,),
        rounds=(SetRound(4, 0, optima=optima),),
    )
    (sentence,) = sentences(sets, ("cat",))
    others = ", ".join(v for k, v in texts.items() if k != first)
    assert f"standard error: {texts[first]}; beside it {others}." in sentence
    unclear = (mode, tune) == ("private", "mse")
    assert ("Will tuning pay? Cannot tell: with mode" in sentence) == unclear
    doubted = "optima of mse and pairwise did not tell in our runs" in sentence
    assert doubted == (mode == "private")
    old = replace(optima, gain_se=None)  # of a folder of an earlier version
    without = replace(sets, rounds=(SetRound(4, 0, optima=old),))
    assert "±" not in sentences(without, ("cat",))[0]


def test_tuning_that_raises_its_loss_is_reported() -> None:
    """In any recorded round; the worst is named with its numbers; rounding is ignored."""

    def sentences_of(*losses: tuple[float, float] | tuple[None, None]) -> list[str]:
        rounds = tuple(SetRound(t, 0, *pair) for t, pair in enumerate(losses, start=1))
        return sentences(LabelSets(holders=(1,), absent_rounds=(0,), rounds=rounds), ("cat",))

    assert sentences_of((0.5, 0.4), (0.139, 3.0), (None, None)) == [
        "Central tuning raised its loss from 0.139 to 3 in round 2; lower tune_lr."
    ]
    assert sentences_of((0.5, 0.6), (0.3, 0.9), (0.9, 0.2)) == [
        "Central tuning raised its loss from 0.3 to 0.9 in round 2, the most of 2 such rounds of "
        "3; lower tune_lr."
    ]
    assert sentences_of((0.5, 0.4), (0.3, 0.3), (0.0, 5e-7), (0.2, 0.20001), (None, None)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "warned"), [(0.5, True), (0.001, False)])
def test_a_run_whose_tuning_diverges_says_so(lr: float, warned: bool, tmp_path: Path) -> None:
    method = {"tune": "kl", "tune_part": "all", "tune_steps": 20, "tune_lr": lr}
    config = validate(tables(method=method) | {"name": "astray"})
    record(tmp_path, config, prepare(config), ignore_event)
    summary = summary_of(tmp_path)
    raised = [r["loss_after"] > r["loss_before"] for r in summary["label_sets"]["rounds"]]
    assert any(raised) == warned
    sentence = [s for s in summary["why"] if s.startswith("Central tuning raised its loss from")]
    assert len(sentence) == warned
    assert all(s.endswith("; lower tune_lr.") for s in sentence)


PRIVATE: dict[str, Any] = {"mode": "private", "tune": "mse", "tune_over": "union"}


@pytest.mark.parametrize("mode", ["private", "public"])
def test_clients_with_a_single_label_are_named(mode: str, mlp: Model) -> None:
    """In private mode alone; the controls: a client of two labels, and one of none."""
    rows = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    method = recipes.labelset_fedavg(Setting(mlp, (0.2,) * 5), mode=mode)
    server = {"sets": {"held": rows}, "absent": {"rounds": torch.zeros(2)}}
    sets = described(method, server, [SetRound(1, 0)])
    assert sets is not None
    assert sets.single == (1, 3)
    texts = [s for s in sentences(sets, ("cat", "dog")) if "client 1, client 3" in s]
    assert len(texts) == (mode == "private")


def test_sentences_name_labels_without_clients_and_labels_absent_at_times() -> None:
    one = SetRound(9, 2, 0.5, 0.4, 0.25, 0.75)
    sets = LabelSets(holders=(1, 0, 2), absent_rounds=(4, 9, 0), rounds=(one,), **PRIVATE)
    texts = sentences(sets, ("cat", "dog", "cow"))
    assert texts == [
        'No client holds "dog": the rows of the head stay as they began.',
        'Rounds of 9 in which no client of the cohort held a label: "cat" (4).',
        "In the last round central tuning moved the mass on the 2 absent labels from 25.0% to "
        "75.0%.",
        BLIND,
    ]
    calm = LabelSets(holders=(1,), absent_rounds=(0,), rounds=(replace(one, absent=0),), **PRIVATE)
    assert sentences(calm, ("cat",)) == [BLIND]
    assert sentences(replace(calm, tune="none"), ("cat",)) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["private", "holders", "public"])
@pytest.mark.parametrize("over", [None, "union", "all"])
def test_rows_of_labels_without_clients_are_reported_to_move_where_they_do(
    mode: str, over: str | None, tmp_path: Path
) -> None:
    options = {"tune_over": over} if over else {"tune": "none"}
    given = tables(shift={"labels_per_client": 2, "cover": False, "clients": 3})
    method = {"mode": mode} | given["method"] | options
    if not over:
        del method["tune_steps"]
    config = validate(given | {"method": method, "name": "rows", "seeds": {"run": 1}})
    experiment = record(tmp_path, config, prepare(config), ignore_event)
    summary, last = summary_of(tmp_path), experiment.outcome.last.server
    sets = summary["label_sets"]
    assert sets["mode"] == mode
    assert (sets["tune"], sets["tune_over"]) == ("mse" if over else "none", over)
    absent = [k for k, n in enumerate(sets["holders"]) if not n]
    assert absent
    first = experiment.prepared.federation(None).params
    rows = [k for k, v in first.items() if k.startswith("head.")]
    stay = all(torch.equal(first[k][absent], last["params"][k][absent]) for k in rows)
    assert stay == (mode != "public" and over != "all")
    sentence = next(s for s in summary["why"] if s.startswith("No client holds"))
    assert ("stay as they began" in sentence) == stay
    assert ("softmax is over all labels" in sentence) == (mode == "public")
    assert ("central tuning moves all rows" in sentence) == (over == "all")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "labelled", "expected"), [(2, 50, [1, 2, 3]), (0, 50, [1, 3]), (0, 0, [3])]
)
def test_rounds_that_are_kept_unevaluated(
    rounds: int, labelled: int, expected: list[int], tmp_path: Path
) -> None:
    """Rounds that tune alone, and round 1 for its forecast; the control: neither."""
    given = tables(
        training={"rounds": 3, "evaluate_every": 3},
        method={"tune_rounds": rounds},
        server={"validation": labelled},
    )
    config = validate(given | {"name": "early"})
    record(tmp_path, config, prepare(config), ignore_event)
    seen = summary_of(tmp_path)["label_sets"]["rounds"]
    assert [r["round"] for r in seen] == expected
    assert [r["loss_after"] is not None for r in seen] == (
        [True, True, False] if rounds else [True] * len(expected)
    )
