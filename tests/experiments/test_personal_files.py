"""Experiment files for personalised methods: mistakes are reported in terms of the file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.cli.app import main
from fedshift.datasets import Dataset, Samples
from fedshift.errors import InputError
from fedshift.experiments.config.load import load_config, validate
from fedshift.experiments.config.networks import network
from fedshift.experiments.task.feature_shift import check_images, grey_note
from fedshift.experiments.task.preparing import prepare

CLOTHES = """\
[data]
name = "fashion-mnist-mini"
validation = 0.0
limit = 200
[shift]
kind = "shards"
shards_per_client = 2
clients = 4
target = "clients"
[model]
name = "mlp"
[training]
rounds = 1
epochs = 2
"""
HEART: dict[str, dict[str, Any]] = {
    "data": {"name": "heart-disease", "validation": 0.0},
    "shift": {"kind": "natural", "clients": 4, "target": "clients"},
    "model": {"name": "mlp"},
}


@pytest.fixture
def refused(tmp_path: Path) -> Any:
    """The message on CLOTHES with some `-c` options, without the file's folder."""

    def message(*overrides: str) -> str:
        file = tmp_path / "f.toml"
        file.write_text(CLOTHES)
        with pytest.raises(InputError) as caught:
            load_config(file, overrides)
        return str(caught.value).removeprefix(f"{tmp_path}/")

    return message


@pytest.mark.parametrize("name", ["confree_drm_repo", "fedpac_drm_repo", "fedrep_drm_repo"])
def test_a_method_that_counts_steps_names_itself_and_the_key(name: str, refused: Any) -> None:
    assert refused(f"method.name={name}") == (
        f"f.toml:14: training.steps: {name} counts steps, as the code that it follows (10 per "
        "round); set training.steps = 10 and leave out training.epochs"
    )
    assert refused(f"method.name={name}", "training.epochs=").endswith("set training.steps = 10")
    one = refused(f"method.name={name}", "training.epochs=", "training.steps=1")
    assert one == (
        f"-c training.steps: {name} gives 1 in 2 of the steps to its first phase; "
        "1 is too few, give 2 or more"
    )


@pytest.mark.parametrize("name", ["fedrep", "fedper", "fedpac", "fedas", "fedbabu", "confree"])
def test_a_network_without_a_body_is_refused_before_training(name: str, refused: Any) -> None:
    tuned = ["method.tune_rounds=0"] if name == "fedbabu" else []
    assert refused(f"method.name={name}", "model.name=linear", *tuned) == (
        'f.toml: -c model.name = "linear" has no body, only a last layer, and '
        f'method.name "{name}" treats body and head apart; use a network with both, as "mlp", '
        '"lenet" or "lenet-gn"'
    ).removeprefix("f.toml: ")
    assert '"mlp" without hidden layers' in refused(
        f"method.name={name}", "model.hidden=[]", *tuned
    )


def test_a_method_that_routes_needs_a_network_that_can(refused: Any) -> None:
    message = refused("method.name=feddrm")
    assert message.startswith('f.toml:11: model.name "mlp" has no branch that tells clients apart')
    assert message.endswith(
        "use one of lenet-gn, lenet-gn-small, resnet18-projected, mlp-projected"
    )


def test_networks_for_vectors_are_named_by_what_the_method_needs() -> None:
    config = validate({"model": {"name": "lenet-gn"}}).model
    with pytest.raises(InputError, match='the data are rows of numbers; use "mlp-projected"$'):
        network(config, (13,), 2, 0, clients=4)
    with pytest.raises(InputError, match=r'use "mlp" or "linear"$'):
        network(config, (13,), 2, 0)


def test_more_clients_than_looks_names_the_keys(refused: Any) -> None:
    assert refused("shift.clients=9", "shift.transform=fashion") == (
        "-c shift.clients: shift: "
        'transform = "fashion" has looks for 8 clients, and shift.clients = 9; '
        'set shift.clients = 8 or fewer, or shift.transform = "wide", which has 54'
    )
    message = refused("shift.clients=55", "shift.transform=wide")
    assert message.endswith("set shift.clients = 54 or fewer")


def test_looks_and_noise_need_images() -> None:
    rows = Samples(torch.zeros(3, 13), torch.tensor([0, 1, 1]))
    data = Dataset("heart-disease", rows, rows, ("no", "yes"), "", "", "")
    check_images(validate(HEART).shift, data)
    for key, value in (("transform", "fashion"), ("noise", 0.5)):
        changed = HEART | {"shift": HEART["shift"] | {key: value}}
        with pytest.raises(InputError) as caught:
            check_images(validate(changed).shift, data)
        assert str(caught.value) == (
            f"shift.{key} changes images, and heart-disease has none; leave shift.{key} out"
        )


@pytest.mark.parametrize("name", ["heart-disease", "retina"])
def test_sites_that_are_clients_ask_for_their_target(name: str) -> None:
    config = validate({"data": {"name": name}, "shift": {"kind": "natural", "clients": 4}})
    with pytest.raises(InputError, match=rf'clients of {name} .*set shift\.target = "clients"$'):
        prepare(config)


def test_colours_on_grey_images_are_noted() -> None:
    """On grey images "bits" has two gammas alone; "wide" three, posterised or not."""
    shift = {"kind": "iid", "clients": 8, "target": "clients"}

    def note(transform: str, clients: int = 8, channels: int = 1) -> str | None:
        changed = shift | {"transform": transform, "clients": clients}
        return grey_note(validate({"shift": changed}).shift, torch.zeros(2, channels, 4, 4), 0)

    assert note("bits") == (
        'shift.transform = "bits" differs in hue and saturation, which grey images do not have: of '
        'the 8 looks only 2 differ here. shift.transform = "fashion" has eight for grey images.'
    )
    assert "of the 54 looks only 6 differ" in str(note("wide", 54))
    assert note("fashion") is None
    assert note("none") is None
    assert note("bits", channels=3) is None
    assert note("bits", clients=2) is None


@pytest.mark.slow
def test_a_run_of_one_round_on_grey_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes come before training and at the end; one round has no deviation; scores are named."""
    monkeypatch.chdir(tmp_path)
    Path("f.toml").write_text(CLOTHES)
    words = ["fedshift", "run", "f.toml", "--out", "o", "-c", "shift.transform=bits"]
    monkeypatch.setattr(sys, "argv", [*words, "-c", "method.name=fedper"])
    main()
    out, err = capsys.readouterr()
    note = "differs in hue and saturation, which grey images do not have: of the 4 looks only 2"
    assert f'note: shift.transform = "bits" {note}' in err
    assert note in " ".join(out.split())
    summary = json.loads(Path("o/summary.json").read_text())
    assert note in summary["why"][-1]
    assert summary["last"]["vote_accuracy_sd"] is None
    assert re.search(r"vote of all models\s+│\s+[\d.]+ │\s+│", out)
    accuracy = f"{100 * summary['last']['average_accuracy']:.1f}"
    assert re.search(rf"run: done  loss [\d.]+ system [\d.]+% own {accuracy}%\n", err)
    page = Path("o/report.html").read_text()
    assert "Share of right answers, in the last round. Own models" in page
