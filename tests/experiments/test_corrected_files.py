"""A corrected model in a run folder: its last layer, the correction, and what stays uncorrected."""

from __future__ import annotations

import csv
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.errors import DataError, InputError
from fedshift.evaluation.scores import score
from fedshift.experiments.config.load import validate
from fedshift.experiments.folder.model_file import (
    CORRECTION,
    UNCORRECTED,
    read_parts,
    with_correction,
)
from fedshift.experiments.folder.run_models import load_models
from fedshift.experiments.task.preparing import prepare
from fedshift.server.prior import Correction, prior_shift
from support.federation_grid import here

PRIORS = ("none", "target", "calibrated")


def experiment(prior: str, **more: Any) -> str:
    """Three small clients, two rounds, and a target that differs from their mixture."""
    from fedshift.experiments.config.load import dumps

    return dumps(validate({
        "name": "run", "data": {"name": "fashion-mnist-mini", "limit": 400},
        "shift": {"kind": "dirichlet-per-client", "beta": 0.5, "clients": 3},
        "model": {"name": "mlp", "hidden": [8]}, "method": {"name": "fedavg"},
        "training": {"rounds": 2, "steps": 5, "lr": 0.1, "evaluate_every": 1, "prior": prior},
    } | more))  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("priors")
    return {prior: here(experiment(prior), place / prior) for prior in PRIORS}


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def correction_of(folder: Path) -> Correction:
    of = summary_of(folder)["corrected"]
    return Correction(of["scale"], np.array(of["bias"]), np.array(of["correctable"]))


@pytest.mark.slow
def test_uncorrected_by_default(runs: dict[str, Path]) -> None:
    parts = read_parts(runs["none"] / "model.safetensors")
    assert CORRECTION not in parts
    assert load_models(runs["none"]).corrected is None
    for prior in PRIORS[1:]:
        before = load_models(runs[prior]).uncorrected
        assert all(v.equal(parts["params"][k]) for k, v in before[0].items()), prior
        final = {name: summary_of(runs[name])["final"]["target_accuracy"] for name in PRIORS}
        assert final[prior] == final["none"]


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS[1:])
def test_the_file_has_the_corrected_model(prior: str, runs: dict[str, Path]) -> None:
    models, done = load_models(runs[prior]), correction_of(runs[prior])
    config = validate(tomllib.loads(experiment(prior)))
    test = prepare(config).task.test
    uncorrected = models.model(*models.uncorrected, test.x)["logits"].double().numpy()
    z = models.model(*models.shared, test.x)["logits"]
    assert np.allclose(z.numpy(), done.of(uncorrected), atol=1e-4)
    final = summary_of(runs[prior])["final"]
    assert score(models.model, *models.shared, test, 10).accuracy == pytest.approx(
        final["target_accuracy_corrected"], abs=1e-9
    )
    assert final["target_accuracy_corrected"] != final["target_accuracy"]
    changed = {k for k, v in models.shared[0].items() if not v.equal(models.uncorrected[0][k])}
    assert changed == ({"head.bias"} if prior == "target" else {"head.bias", "head.weight"})


@pytest.mark.slow
def test_twice_is_refused(runs: dict[str, Path]) -> None:
    parts = read_parts(runs["target"] / "model.safetensors")
    model, done = load_models(runs["target"]).model, correction_of(runs["target"])
    with pytest.raises(InputError, match="corrected for a target already"):
        with_correction(parts, model, done, (1, 28, 28))
    # The control: as it was trained, it is corrected, and comes out the same.
    plain = read_parts(runs["none"] / "model.safetensors")
    again = with_correction(plain, model, done, (1, 28, 28))
    assert all(v.equal(parts["params"][k]) for k, v in again["params"].items())
    assert again[UNCORRECTED].keys() == {"head.weight", "head.bias"}


@pytest.mark.slow
def test_a_classifier_without_bias_keeps_it_beside(tmp_path: Path) -> None:
    folder = here(experiment("calibrated", method={"name": "fedetf"}), tmp_path / "run")
    parts = read_parts(folder / "model.safetensors")
    assert CORRECTION in parts
    assert UNCORRECTED not in parts
    models = load_models(folder)
    assert models.corrected is not None
    assert models.corrected.before == {}
    assert models.uncorrected[0].keys() == models.shared[0].keys()
    assert np.array_equal(models.corrected.correction.bias, correction_of(folder).bias)


def test_a_damaged_correction(runs: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from fedshift.tree import flatten

    folder = tmp_path / "run"
    shutil.copytree(runs["target"], folder)
    parts = read_parts(folder / "model.safetensors")
    parts[CORRECTION] = {"scale": parts[CORRECTION]["scale"]}
    save_file(flatten(parts), folder / "model.safetensors")
    with pytest.raises(DataError, match='damaged \\(part "correction" is none of this model'):
        load_models(folder)


def test_another_target_from_the_record_alone(runs: dict[str, Path]) -> None:
    """For the run's own target the correction from its summary equals the original."""
    import fedshift as fs

    result = fs.load(runs["calibrated"])
    corrected = result.for_target(list(result.summary.target))
    x = torch.rand(20, 1, 28, 28)
    assert np.allclose(
        corrected.predict(x).probabilities, result.predict(x).probabilities, atol=1e-6
    )
    plain = fs.load(runs["target"])
    assert plain.summary.corrected is not None
    shift = prior_shift(np.full(10, 0.1), plain.summary.corrected.trained_on)
    z = plain.models.model(*plain.models.uncorrected, x)["logits"].double().numpy()
    even = plain.for_target([0.1] * 10).predict(x).probabilities
    expected = torch.from_numpy(shift.of(z)).softmax(1).numpy()
    assert np.allclose(even, expected, atol=1e-6)


def test_answers_of_each_form_are_counted(runs: dict[str, Path]) -> None:
    """corrected.csv gives the accuracies, and the estimates, of both forms without the model."""
    by_prior = dict[str, tuple[dict[str, Any], dict[str, Any]]]()
    for prior in PRIORS:
        facts, counts = summary_of(runs[prior]), dict[str, Any]()
        places = {name: i for i, name in enumerate(facts["classes"])}
        with (runs[prior] / "corrected.csv").open() as file:
            rows = list(csv.DictReader(file))
        forms = [name for name in rows[0] if name not in ("set", "true", "predicted")]
        assert forms == ["trained", "target", *["calibrated"] * (prior != "target")]
        for row in rows:
            table = counts.setdefault(row["set"], np.zeros((len(forms), 10, 10)))
            table[:, places[row["true"]], places[row["predicted"]]] = [int(row[f]) for f in forms]
        right = counts["target"].diagonal(axis1=1, axis2=2).sum(1) / counts["target"][0].sum()
        recall = counts["validation"].diagonal(axis1=1, axis2=2)
        recall = recall / np.maximum(counts["validation"].sum(2), 1)
        estimates = recall @ np.array(facts["target"])
        by_prior[prior] = (
            dict(zip(forms, right, strict=True)),
            dict(zip(forms, estimates, strict=True)),
        )
        final, form = facts["final"], facts["corrected"]["form"]
        assert by_prior[prior][0]["trained"] == pytest.approx(final["target_accuracy"])
        assert by_prior[prior][0][form] == pytest.approx(final["target_accuracy_corrected"])
        assert by_prior[prior][1]["trained"] == pytest.approx(final["estimated_accuracy"])
        moved = final["estimated_accuracy_corrected"]
        assert (
            moved is None if prior == "none" else by_prior[prior][1][form] == pytest.approx(moved)
        )
    # A run without a correction keeps what runs of either form would have measured.
    assert by_prior["none"] == by_prior["calibrated"]
    assert by_prior["none"][0]["target"] == by_prior["target"][0]["target"]
