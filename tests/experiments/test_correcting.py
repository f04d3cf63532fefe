"""A run's corrected numbers are those of its model with moved logits, computed from its files."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.cli import results
from fedshift.errors import InputError
from fedshift.evaluation.scores import Score, answered
from fedshift.experiments.config.schema import Config
from fedshift.experiments.experiment import Experiment, record, run_experiment
from fedshift.experiments.folder.summary import summary
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.correcting import Corrected, single_answer
from fedshift.experiments.task.preparing import prepare
from fedshift.server.prior import calibrate, calibrated_shift, calibration_sums, prior_shift

TASK: dict[str, Any] = {
    "name": "moved",
    "data": {"name": "fashion-mnist-mini"},
    "shift": {"kind": "sparsity", "labels_per_client": 4, "clients": 3},
    "model": {"name": "linear"},
    "training": {"rounds": 2, "steps": 10, "lr": 0.05},
}


def config(prior: str, **sections: Any) -> Config:
    training = {**TASK["training"], "prior": prior, **sections.pop("training", {})}
    return Config.model_validate({**TASK, **sections, "training": training})


def logits(done: Experiment, examples: Any) -> tuple[np.ndarray, np.ndarray]:
    pair = done.outcome.params, done.outcome.buffers
    out = [z for z, *_ in answered(done.algorithm.model, *pair, examples)]
    return torch.cat(out).double().numpy(), examples.y.numpy()


@pytest.mark.few(1)
@pytest.mark.parametrize("prior", ["none", "target", "calibrated"])
def test_the_numbers_are_those_of_moved_logits(prior: str, tmp_path: Path) -> None:
    settings = config(prior)
    ready = prepare(settings)
    done = record(tmp_path / "run", settings, ready, ignore_event)
    task, T = ready.task, np.asarray(ready.announced)
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    labels = np.array(facts["label_counts"], dtype=float)
    p = np.array(facts["weights"]) @ (labels / labels.sum(1, keepdims=True))
    assert facts["corrected"]["trained_on"] == pytest.approx(p, abs=1e-12)
    correction = prior_shift(T, p)
    assert facts["corrected"]["form"] == ("calibrated" if prior == "calibrated" else "target")
    if prior == "calibrated":
        rows = zip(*(logits(done, examples) for examples in task.validation), strict=True)
        by = calibrate(partial(calibration_sums, *map(np.concatenate, rows)), 10)
        correction = calibrated_shift(by, T)
        # The record alone gives the correction for another target, without training.
        corrected, other = facts["corrected"], np.full(10, 0.1)
        log_p = np.log(np.where(corrected["correctable"], corrected["prior"], 1.0))
        bias = np.where(corrected["correctable"], corrected["calibrator_bias"], 0.0)
        assert calibrated_shift(by, other).bias == pytest.approx(bias + math.log(0.1) - log_p)
    assert facts["corrected"]["bias"] == pytest.approx(correction.bias)
    z, y = logits(done, task.test)
    right = (correction.of(z).argmax(1) == y).mean()
    assert facts["final"]["target_accuracy_corrected"] == right
    assert facts["final"]["target_accuracy"] == pytest.approx((z.argmax(1) == y).mean())
    assert right > facts["final"]["target_accuracy"] + 0.05  # here it must help
    recalls = np.zeros((2, 10))
    for examples in task.validation:
        z, y = logits(done, examples)
        np.add.at(recalls[0], y, correction.of(z).argmax(1) == y)
        np.add.at(recalls[1], y, 1)
    estimate = float(T @ (recalls[0] / np.maximum(recalls[1], 1)))
    given = facts["final"]["estimated_accuracy_corrected"]
    assert given is None if prior == "none" else given == pytest.approx(estimate)


@pytest.mark.slow
def test_the_choice_of_ess_is_made_among_corrected_models() -> None:
    picked = {}
    for prior in ("none", "calibrated"):
        done = run_experiment(config(prior, method={"name": "fedpals", "ess": "auto"}))
        assert done.choice is not None
        rows = done.choice.described().candidates
        picked[prior] = {c.label: c.estimated_accuracy for c in rows}
        best = max(rows, key=lambda c: (c.estimated_accuracy, c.ess_fraction))
        assert done.choice.chosen.label == best.label
        corrected = [c.outcome.corrected for c in done.choice.candidates]
        moved = [c.estimate.accuracy for c in corrected if c and c.estimate]
        assert (list(picked[prior].values()) == moved) == (prior == "calibrated")
    assert picked["none"] != picked["calibrated"]


EVEN = [
    ({"name": "balanced_softmax"}, True), ({"name": "fedrs"}, True),
    ({"name": "labelset_fedavg"}, True), ({"name": "labelset_fedavg", "mode": "public"}, False),
    ({"name": "fedlc"}, False), ({"name": "ccvr", "virtual": 20}, True),
]  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize(("method", "even"), EVEN)
def test_methods_that_take_the_shares_out_are_corrected_from_even_ones(
    method: dict[str, Any], even: bool
) -> None:
    """Over the labels that any client with weight has."""
    done = run_experiment(config("target", method=method))
    moved = done.outcome.corrected
    assert moved is not None
    given = moved.trained_on[moved.trained_on > 0]
    assert (given == 1 / len(given)).all() == even
    assert moved.trained_on.sum() == pytest.approx(1)


@pytest.mark.slow
def test_a_model_that_is_at_the_target_is_not_moved_again() -> None:
    settings = config("target", method={"name": "ccvr_target", "virtual": 20})
    done = run_experiment(settings)
    moved, T = done.outcome.corrected, np.asarray(prepare(settings).announced)
    assert moved is not None
    assert (moved.trained_on == T).all()
    assert np.abs(moved.correction.bias[T > 1e-3]).max() < 1e-12
    assert (moved.correction.bias[T == 0] < -20).all()  # labels outside T are left out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ccvr", "ccvr_target"])
def test_a_model_of_a_round_before_ccvrs_is_one_of_its_clients_labels(name: str) -> None:
    """For example with keep = "best", and where patience ends training."""
    method = {"name": name, "virtual": 20, "ridge": 1e60}  # its head is 0
    options = {"keep": "best", "evaluate_every": 1, "rounds": 3}
    done = run_experiment(config("target", method=method, training=options))
    assert done.outcome.last.t < 3
    plain = run_experiment(config("target", training=options | {"rounds": done.outcome.last.t}))
    one, other = done.outcome.corrected, plain.outcome.corrected
    assert one is not None
    assert other is not None
    assert (one.trained_on == other.trained_on).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"shift": {**TASK["shift"], "target": "clients"}},
            'training.prior = "calibrated" moves one model to one target, and here each client '
            "serves a model on its examples; leave it out",
        ),
        (
            {"data": {"name": "fashion-mnist-mini", "validation": 0.0}},
            'training.prior = "calibrated" needs validation examples at the clients, and none has '
            'any; raise data.validation, or take "target"',
        ),
    ],
    ids=["clients", "no validation"],
)
def test_what_cannot_be_corrected_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        run_experiment(config("calibrated", **change))
    assert str(refused.value) == message


def test_labels_that_hardly_anyone_has_are_named() -> None:
    done = run_experiment(
        config("target", shift={**TASK["shift"], "target": "uniform", "clients": 2})
    )
    moved = done.outcome.corrected
    assert moved is not None
    absent = moved.trained_on < 1e-3
    assert absent.any()
    assert (moved.correction.correctable == ~absent).all()
    why = [s for s in summary(done).why if s.startswith("The prior correction cannot help")]
    assert len(why) == 1
    assert why[0].count('"') == 2 * absent.sum()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["iwerm", "fedpals_joint"])
def test_examples_that_were_weighed_to_the_target_need_no_correction(method: str) -> None:
    settings = config("target", method={"name": method, "clip": 1e6})
    done = run_experiment(settings)
    moved, T = done.outcome.corrected, np.asarray(done.prepared.announced)
    assert moved is not None
    plain = run_experiment(config("target")).outcome.corrected
    assert plain is not None
    here = (T > 0) & (plain.trained_on > 0)  # one label of the target is at no client
    expected = np.where(here, T, 0.0) / T[here].sum()
    assert moved.trained_on == pytest.approx(expected, abs=1e-9)
    # One number for all labels moves no answer.
    assert np.ptp(moved.correction.bias[here]) < 1e-6
    assert np.ptp(plain.correction.bias[here]) > 0.1  # the control


@pytest.mark.slow
def test_a_correction_that_does_harm_is_reported() -> None:
    """Of useless logits; the control: no such sentence where the correction helps."""
    warned = {}
    for steps in (1, 60):
        done = run_experiment(
            config(
                "calibrated",
                training={"rounds": 1, "steps": steps, "lr": 1e-6 if steps == 1 else 0.05},
            )
        )
        moved, plain = done.outcome.corrected, done.outcome.estimate
        assert moved is not None
        assert moved.estimate is not None
        warned[steps] = any("train longer" in s for s in summary(done).why)
        worse = moved.estimate.accuracy < plain.accuracy - plain.standard_error
        assert warned[steps] == worse
    assert not warned[60]


def test_a_correction_that_leaves_one_answer_is_reported() -> None:
    """Control: nothing is said of two answers, nor of a model that had one as trained."""

    def answering(*predicted: int) -> Score:
        return Score(torch.zeros(2), torch.tensor([3, 1]), torch.tensor(predicted), 0.0)

    def said(moved: Score, plain: Score) -> list[str]:
        even = np.full(2, 0.5)
        answers = {"target": {"trained": plain}}
        of = Corrected("target", prior_shift(even, even), even, None, moved, None, answers, None)
        return single_answer(of, ["well", "ill"])

    one, both = answering(4, 0), answering(2, 2)
    assert '"well" for every test row' in said(one, both)[0]
    assert said(one, one) == said(both, one) == []


def test_the_printed_numbers_are_of_the_model_that_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a prior set; the control: without one the estimate is of the model as trained."""
    for prior in ("none", "calibrated"):
        settings = config(prior, method={"name": "fedpals", "ess": "auto"})
        done = record(tmp_path / prior, settings, prepare(settings), ignore_event)
        results.show_run(tmp_path / prior, tmp_path / "page.html", choice=done.choice)
        printed = capsys.readouterr().out
        assert done.choice is not None
        chosen = done.choice.chosen.estimates("calibrated" if prior == "calibrated" else "none")
        assert printed.count(f"{100 * chosen['estimated_accuracy']:.1f} ±") >= 2
        assert ("model.safetensors has the corrected model" in printed) == (prior != "none")
