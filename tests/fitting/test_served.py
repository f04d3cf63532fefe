"""What `fit` serves: the model corrected for the target, unless `prior` is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedshift as fs
from fedshift.experiments.config.load import load_config
from fedshift.fitting.result import Result
from support.custom_tasks import Net, hospitals, rows

QUICK: dict[str, Any] = {"rounds": 10, "lr": 0.3, "evaluate_every": 5, "progress": False}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {
        prior: fs.fit(hospitals(), Net, **({} if prior == "" else {"prior": prior}), **QUICK)
        for prior in ("", "none", "target", "calibrated")
    }


def served(result: Result) -> dict[str, torch.Tensor]:
    return result.module().state_dict()


def test_calibrated_unless_prior_is_given(results: dict[str, Result]) -> None:
    given, due = results[""], results["calibrated"]
    assert load_config(given.folder / "config.resolved.toml").training.prior == "calibrated"
    assert all(torch.equal(v, served(due)[k]) for k, v in served(given).items())
    assert 'labels (prior="calibrated")' in str(given)
    assert f"as trained         {100 * results['none'].accuracy:.1f} %, uncorrected" in str(given)
    assert "corrected" not in str(results["none"])
    for prior in ("target", "calibrated"):
        trained = results[prior].models.uncorrected[0]
        assert all(torch.equal(v, served(results["none"])[k]) for k, v in trained.items())
        assert not torch.equal(served(results[prior])["head.bias"], trained["head.bias"])


@pytest.mark.parametrize("prior", ["none", "target", "calibrated"])
def test_the_accuracy_is_that_of_the_predictions(prior: str, results: dict[str, Result]) -> None:
    x, y, site = rows()
    north = np.array(site) == "north"
    result = results[prior]
    right = (result.predict(x).names == y)[north].mean()
    assert right == pytest.approx(result.accuracy)
    final = result.summary.final
    assert final.target_accuracy == results["none"].accuracy
    expected = final.target_accuracy if prior == "none" else final.target_accuracy_corrected
    assert result.accuracy == expected
    assert f"target accuracy {100 * result.accuracy:.1f} %" in repr(result)


def test_saved_and_loaded(results: dict[str, Result], tmp_path: Path) -> None:
    x, _, _ = rows()
    given = results[""]
    again = fs.load(given.save(tmp_path / "run"))
    assert np.array_equal(again.predict(x).probabilities, given.predict(x).probabilities)
    assert (again.accuracy, again.estimate) == (given.accuracy, given.estimate)
    assert str(again) == str(given)
    probabilities = again.for_target(list(given.summary.target)).predict(x).probabilities
    assert np.allclose(probabilities, given.predict(x).probabilities, atol=1e-6)


def test_where_nothing_is_validated_the_shares_alone_correct(tmp_path: Path) -> None:
    x, y, site = rows()
    task = fs.Task.from_arrays(x, y, client=site, target="north", validation=0.0)
    result = fs.fit(task, Net, **QUICK)
    assert 'labels (prior="target")' in str(result)
    assert load_config(result.folder / "config.resolved.toml").training.prior == "target"
    with pytest.raises(fs.InputError, match='prior="calibrated" needs validation examples'):
        fs.fit(task, Net, prior="calibrated", **QUICK)


@pytest.mark.slow
def test_clients_that_serve_their_own_models() -> None:
    result = fs.fit(hospitals("clients"), Net, method="ditto", **QUICK)
    assert result.models.corrected is None
    with pytest.raises(fs.InputError, match='prior="target" moves one model to one target'):
        fs.fit(hospitals("clients"), Net, prior="target", **QUICK)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "key",
    [{"class_weights": "balanced"}, {"loss": lambda z, y: -z.log_softmax(1)[range(len(y)), y]}],
    ids=["class weights", "a loss"],
)
def test_weights_of_the_users_stay(key: dict[str, Any]) -> None:
    """A correction would remove their effect; one that is asked for is made."""
    assert fs.fit(hospitals(), Net, **key, **QUICK).models.corrected is None
    assert fs.fit(hospitals(), Net, prior="target", **key, **QUICK).models.corrected is not None


def test_a_prior_that_there_is_not() -> None:
    with pytest.raises(fs.InputError, match="prior"):
        fs.fit(hospitals(), Net, prior="calibrate", **QUICK)


@pytest.mark.slow
def test_a_run_that_goes_on_is_corrected_once(tmp_path: Path) -> None:
    """Checkpoints have the model as trained, and so fit any prior."""

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(numbers: Any) -> None:
        if numbers["round"] == 6:
            raise Stopped

    keys = {**QUICK, "folder": tmp_path / "run"}
    with pytest.raises(Stopped):
        fs.fit(hospitals(), Net, prior="none", callbacks=stop, **keys)
    went_on = fs.fit(hospitals(), Net, resume=True, **keys)
    alone = fs.fit(hospitals(), Net, **QUICK)
    assert all(torch.equal(v, served(alone)[k]) for k, v in served(went_on).items())
    # A complete run is of one prior.
    assert fs.fit(hospitals(), Net, resume=True, **keys).accuracy == went_on.accuracy
    with pytest.raises(fs.InputError, match="prior: calibrated there, none here"):
        fs.fit(hospitals(), Net, prior="none", resume=True, **keys)


@pytest.mark.slow
def test_compare_shows_both() -> None:
    table = fs.compare(hospitals(), Net, ["fedavg", "fedprox"], seeds=3, jobs=1, **QUICK)
    assert table.metric == "target_accuracy"
    row, base = table.row("fedprox"), table.row("fedavg")
    assert row.corrected is not None
    assert row.corrected_difference is not None
    ours, theirs = (one.values("target_accuracy_corrected") for one in (row, base))
    assert row.corrected.mean == pytest.approx(sum(ours.values()) / 3)
    differences = [ours[s] - theirs[s] for s in range(3)]
    assert row.corrected_difference.mean == pytest.approx(sum(differences) / 3)
    assert "Corrected, %" in str(table)
    frame = table.frame()
    assert frame["corrected"].tolist() == [base.corrected.mean, row.corrected.mean]  # type: ignore
    assert table.frame(runs=True)["target_accuracy_corrected"].tolist() == [
        *theirs.values(), *ours.values(),
    ]  # fmt: skip
