"""The router of a run folder is that of the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.outcome import Experiment
from fedshift.experiments.folder.routers import load_router
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.task.preparing import prepare
from fedshift.router.route import Router

SHAPE = (1, 28, 28)


def run(folder: Path, method: str = "feddrm", **training: Any) -> Experiment:
    """Two rounds of two steps on 160 pictures of four clients."""
    config = validate({
        "data": {"name": "fashion-mnist-mini", "validation": 0.0, "limit": 160},
        "shift": {"kind": "shards", "shards_per_client": 2, "clients": 4, "target": "clients"},
        "model": {"name": "lenet-gn-small"}, "method": {"name": method},
        "training": {"rounds": 2, "steps": 2, "batch": 8, "evaluate_every": 2} | training,
    })  # fmt: skip
    return record(folder, config, prepare(config), ignore_event)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Experiment]:
    folder = tmp_path_factory.mktemp("runs") / "feddrm"
    return folder, run(folder)


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def of_run(made: Experiment) -> Router:
    last = made.outcome.last
    return Router.of(made.algorithm, last.server, last.states)


@pytest.mark.slow
def test_a_run_folder_has_its_router(trained: tuple[Path, Experiment]) -> None:
    folder, made = trained
    x, original = made.prepared.task.test.x, of_run(made)
    for router in (load_router(folder), load_router(str(folder), shape=SHAPE)):
        assert torch.equal(router.sizes, original.sizes)
        for prior in ("posterior", "density"):
            routed, meant = router.route(x, 4, prior=prior), original.route(x, 4, prior=prior)
            assert torch.equal(routed.clients, meant.clients)
            assert torch.equal(routed.probabilities, meant.probabilities)
        assert torch.equal(router.predict(x, "mixture"), original.predict(x, "mixture"))
    one = load_router(folder, "density", shape=SHAPE)
    assert torch.equal(one.scores(x), original.scores(x, "density"))
    refitted = one.refitted(made.prepared.task.clients, tolerance=1e-3)
    assert not torch.equal(refitted.scores(x), one.scores(x))


@pytest.mark.slow
def test_only_clients_that_took_part_are_routed_to(tmp_path: Path) -> None:
    made = run(tmp_path / "run", rounds=1, cohort=2)
    router = load_router(tmp_path / "run", shape=SHAPE)
    assert router.clients == of_run(made).clients == made.outcome.last.cohort.tolist()


@pytest.mark.slow
def test_a_shared_head_is_served_by_all(tmp_path: Path) -> None:
    made = run(tmp_path / "run", "feddrm_shared_head", rounds=1)
    x, router = made.prepared.task.test.x, load_router(tmp_path / "run", shape=SHAPE)
    assert router.clients == [0, 1, 2, 3]
    assert torch.equal(router.predict(x), of_run(made).predict(x))


@pytest.mark.slow
def test_other_folders_are_refused(trained: tuple[Path, Experiment], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a run folder \(no config.resolved.toml\); give one"):
        load_router(tmp_path)
    folder = copied(trained[0], tmp_path)
    (folder / "summary.json").rename(folder / "away")
    with pytest.raises(InputError, match="this run is not complete; `fedshift run --resume"):
        load_router(folder)
    (folder / "away").rename(folder / "summary.json")
    text = (folder / "config.resolved.toml").read_text()
    (folder / "config.resolved.toml").write_text(text.replace('"feddrm"', '"fedper"'))
    with pytest.raises(InputError, match='a run of "fedper", which trains no router; give one of'):
        load_router(folder)
    (folder / "config.resolved.toml").write_text(text.replace('"feddrm"', '"feddrm"\nlam = 1.0'))
    with pytest.raises(InputError, match="has trained no router"):
        load_router(folder, shape=SHAPE)


@pytest.mark.slow
def test_damaged_folders_are_refused(trained: tuple[Path, Experiment], tmp_path: Path) -> None:
    folder = copied(trained[0], tmp_path)
    model = folder / "model.safetensors"
    wide = r'"body.2.1.weight" is .120, 256. and in the network of .* .120, 2304.; give the shape'
    with pytest.raises(DataError, match=wide):
        load_router(folder, shape=(1, 60, 60))
    tensors = load_file(model)
    save_file({k: v for k, v in tensors.items() if k != "params/router.head.bias"}, model)
    with pytest.raises(DataError, match='"router.head.bias" is missing and in the network of'):
        load_router(folder, shape=SHAPE)
    sizes = (folder / "clients.csv").read_text()
    (folder / "clients.csv").write_text("client\n0\n")
    with pytest.raises(DataError, match="clients.csv: cannot be read: 'n'; it has the clients'"):
        load_router(folder, shape=SHAPE)
    (folder / "clients.csv").write_text(sizes)
    model.write_bytes(b"nothing")
    with pytest.raises(DataError, match="model.safetensors: cannot be read"):
        load_router(folder, shape=SHAPE)
    model.unlink()
    with pytest.raises(DataError, match="model.safetensors: missing"):
        load_router(folder, shape=SHAPE)
