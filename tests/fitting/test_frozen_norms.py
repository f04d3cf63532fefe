"""`freeze_norm` with networks of the user's own, from Python and from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedshift as fs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.errors import InputError
from fedshift.experiments.config.load import load_config
from fedshift.experiments.experiment import run_experiment
from support.custom_files import files_in
from support.custom_tasks import Net, hospitals

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "progress": False}
WITH_NORM = """\
import math
from torch import nn


def with_norm(task):
    inputs = math.prod(task.input_shape)
    net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    nn.init.constant_(net[2].running_mean, 0.5)
    return net
"""


def with_norm(task: fs.Task) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    nn.init.constant_(norm.get_buffer("running_mean"), 0.5)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 2))


def means(result: fs.Result) -> Tensor:
    return result.module().get_buffer("1.running_mean")


@pytest.mark.slow
@pytest.mark.parametrize("as_model", [False, True])
def test_the_statistics_of_a_network_of_ones_own_stay(as_model: bool) -> None:
    task = hospitals()
    given = {} if as_model else {"freeze_norm": True}
    net = fs.Model(with_norm(task), freeze_norm=True) if as_model else with_norm
    frozen, free = fs.fit(task, net, **QUICK, **given), fs.fit(task, with_norm, **QUICK)
    assert torch.equal(means(frozen), torch.full((8,), 0.5))
    assert not torch.equal(means(free), torch.full((8,), 0.5))
    changed = frozen.module().get_parameter("1.weight")
    assert not torch.equal(changed, torch.ones(8))


@pytest.mark.parametrize("freeze", ["true", "false"])
def test_and_of_one_that_a_file_names(freeze: str, tmp_path: Path) -> None:
    path = files_in(tmp_path)
    (tmp_path / "net.py").write_text(WITH_NORM)
    given = ("model.name=net.py:with_norm", f"model.freeze_norm={freeze}", "training.rounds=1")
    trained = run_experiment(load_config(path, given))
    stayed = torch.equal(trained.outcome.buffers["2.running_mean"], torch.full((8,), 0.5))
    assert stayed == (freeze == "true")


def test_what_has_nothing_to_freeze_is_refused_in_the_words_of_the_caller() -> None:
    task = hospitals()
    with pytest.raises(InputError, match="the network has no BatchNorm to freeze"):
        fs.fit(task, Net, freeze_norm=True, **QUICK)
    with pytest.raises(InputError, match="not for a network of your own$"):
        fs.fit(task, Net, pretrained=True, **QUICK)
    brings = FedAvg(fs.Model(with_norm(task)))
    with pytest.raises(InputError, match=r"leave freeze_norm out, and give .* Model\(net, freeze"):
        fs.fit(task, None, method=brings, freeze_norm=True, **QUICK)
