"""A run folder has every model that the run served: its numbers can be computed from its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.run import run
from fedshift.errors import DataError, InputError
from fedshift.evaluation.scores import score
from fedshift.evaluation.serving import serve
from fedshift.experiments.config.load import load_config, validate
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.model_file import model_parts, served_in, took_part
from fedshift.experiments.folder.routers import load_router
from fedshift.experiments.folder.run_models import RunModels, load_models, sizes_in
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.routing_details import details
from fedshift.experiments.measures.served import TOLERANCE, measure, models
from fedshift.experiments.task.preparing import prepare
from fedshift.files import clean
from fedshift.model import Model, build
from fedshift.models.routed import Routed, projection
from fedshift.recipes import Setting
from fedshift.router.quality import calibration_error
from fedshift.router.score import posterior
from fedshift.tree import Parts, flatten, size_in_bytes, unflatten
from support.every_method import MAKE
from support.federations import CLASSES, FEATURES, SIZES, TARGET, make_federation

CLIENTS, SHAPE = 8, (1, 28, 28)
SMALL: dict[str, Any] = {
    "data": {"name": "fashion-mnist-mini", "validation": 0.2, "limit": 160},
    "shift": {"kind": "shards", "shards_per_client": 2, "clients": CLIENTS, "target": "clients"},
    "model": {"name": "mlp-projected", "hidden": [8]},
    "training": {"rounds": 3, "steps": 10, "batch": 8, "cohort": 3, "evaluate_every": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedpals": {"ess": 0.9},
    "feddisk": {"density_rounds": 1, "hidden": [6]},
    "made": {"density_rounds": 1, "hidden": [6]},
    "krum": {"byzantine": 0},
    "multikrum": {"byzantine": 0, "keep": 2},
}
# One recipe for each way in which a client comes to the model that it serves.
WAYS = (
    "ditto", "fedavg", "fedbabu", "feddrm", "fedpac", "fedper", "labelset_ditto",
    "labelset_fedavg", "local_only",
)  # fmt: skip
# They refuse networks with running statistics.
ROBUST = ("fedmedian", "fedtrimmed", "krum", "multikrum", "rfa", "rfa under fedpals")
OTHERS = [pytest.param(m, marks=pytest.mark.slow) for m in recipes.__all__ if m not in WAYS]


def made(folder: Path, method: str, **shift: Any) -> Path:
    """The folder of a small run, in which a client or two never took part."""
    options = dict(OPTIONS.get(method, {}))
    if {"tune", "tune_rounds"} & recipes.recipe(method).options.keys() == {"tune_rounds"}:
        options["tune_rounds"] = 1
    given = SMALL | {"shift": SMALL["shift"] | shift, "method": {"name": method, **options}}
    config = validate(given)
    record(folder, config, prepare(config), ignore_event)
    return folder


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


def measured_again(folder: Path, loaded: RunModels) -> tuple[dict[str, Any], dict[str, Any]]:
    """The "final" and "serving" of summary.json, computed from these models and data."""
    task = prepare(load_config(folder / "config.resolved.toml")).task
    sizes = sizes_in(folder / "clients.csv")
    taken, classes = torch.zeros_like(sizes), len(task.classes)
    taken[list(loaded.took_part)] = sizes[list(loaded.took_part)]
    served = serve(loaded.model, loaded.served, task.tests)
    whole = loaded.shared[0].keys() == loaded.model.init()[0].keys()
    shared = serve(loaded.model, [loaded.shared], [task.test]).labels[0] if whole else None
    metrics, _ = measure(3, served, sizes, taken, shared)
    pairs = zip(loaded.served, task.validation, strict=True)
    accuracies = [
        score(loaded.model, *pair, examples, classes).accuracy for pair, examples in pairs
    ]
    return clean(vars(metrics) | {"client_accuracy": accuracies}), clean(
        details(served, taken, classes)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [*WAYS, *OTHERS])
def test_a_summary_follows_from_its_files(method: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "run", method)
    loaded, written = load_models(folder), summary(folder)
    assert 0 < len(loaded.took_part) < len(loaded.served) == CLIENTS
    final, serving = measured_again(folder, loaded)
    assert {k: written["final"][k] for k in final} == final
    assert {k: written["serving"][k] for k in serving} == serving
    assert written["final"]["target_accuracy"] == final["system_accuracy"]


@pytest.mark.slow
def test_another_head_has_other_numbers(tmp_path: Path) -> None:
    """The control: the comparison detects a change in one client's head at the server."""
    folder = made(tmp_path / "run", "fedpac")
    model, written = folder / "model.safetensors", summary(folder)
    tensors = load_file(model)
    one = next(k for k in sorted(tensors) if k.endswith(".private/head.weight"))
    save_file(tensors | {one: -tensors[one]}, model)
    final, _ = measured_again(folder, load_models(folder, shape=SHAPE))
    assert final["average_accuracy"] != written["final"]["average_accuracy"]


@pytest.mark.slow
def test_routers_refitted_from_files_are_those_of_the_run(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "feddrm")
    written, router, loaded = summary(folder)["final"], load_router(folder), load_models(folder)
    assert router.clients == list(loaded.took_part)
    task = prepare(load_config(folder / "config.resolved.toml")).task
    served = serve(loaded.model, loaded.served, task.tests)
    for name, fitted in (
        ("refitted", router.refitted(task.clients, tolerance=TOLERANCE)),
        ("moment", router.from_moments(task.clients)),
    ):
        believed = posterior(fitted.logits(task.test.x), router.sizes)
        right = served.routed(believed.argmax(1)) == served.y
        assert written[f"{name}_accuracy"] == float(right.double().mean())
        assert written[f"{name}_ece"] == calibration_error(believed, served.origin)


@pytest.mark.slow
def test_one_model_for_a_target_elsewhere(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", "fedavg", target="uniform")
    for loaded in (load_models(folder), load_models(str(folder), shape=SHAPE)):
        assert (loaded.served, loaded.took_part) == ((), ())
        task = prepare(load_config(folder / "config.resolved.toml")).task
        measured = score(loaded.model, *loaded.shared, task.test, len(task.classes))
        assert measured.accuracy == summary(folder)["final"]["target_accuracy"]
        assert measured.loss == summary(folder)["final"]["target_loss"]


@pytest.fixture
def mlp() -> Model:
    """A network with BatchNorm and a router."""
    stages = (
        lambda: nn.Sequential(nn.Linear(FEATURES, 10), nn.BatchNorm1d(10), nn.ReLU()),
        lambda: projection(10, 6),
    )
    return build(lambda: Routed(stages, 6, CLASSES, len(SIZES), shared=1), seed=2)


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """Batch sizes that leave no batch of one example."""
    return Setting(mlp, TARGET, Local(lr=0.1, epochs=1, batch=16))


def parts_of(name: str, setting: Setting) -> tuple[Parts, Any, Any]:
    """The parts of a run's file, the models that its clients serve, and its last round."""
    method, federation = MAKE[name](setting), make_federation(setting.model)
    last = list(run(method, federation, 3, cohort=2))[-1]
    served = models(method, last, federation)
    shared = last.server.get("params", {}), last.server.get("buffers", {})
    first = federation.params, federation.buffers
    parts = model_parts(shared, first, served, last.states)
    # What a worker or a checkpoint brings back shares no memory: the file is the same.
    states = {i: copied(state) for i, state in last.states.items()}
    apart = models(method, last._replace(states=states), federation)
    assert flatten(model_parts(shared, first, apart, states)).keys() == flatten(parts).keys()
    return parts, served, last


def copied(parts: Parts) -> Parts:
    return {part: {k: v.clone() for k, v in tree.items()} for part, tree in parts.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [n for n in MAKE if n not in ROBUST])
def test_models_of_every_method_come_back(name: str, setting: Setting) -> None:
    """Bit for bit, with buffers, for clients that took part and those that never did."""
    parts, served, last = parts_of(name, setting)
    again = unflatten(flatten(copied(parts)), ("params", "buffers"))
    who = took_part(again, len(served), Path("model.safetensors"))
    assert who == tuple(sorted(last.states))
    assert 0 < len(who) < len(served)
    for i, pair in enumerate(served):
        for a, b in zip(pair, served_in(again, i, i in who), strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(v, b[k]) for k, v in a.items())


def test_what_is_shared_is_written_once(setting: Setting) -> None:
    """A head per client for FedPer, the first model once for Ditto's clients that never took part,
    and for FedAvg nothing but who took part."""
    size = size_in_bytes({"params": setting.model.init()[0]})
    plain, _, last = parts_of("fedavg", setting)
    assert set(flatten({k: v for k, v in plain.items() if k.startswith("client")})) == {
        "clients/took_part"
    }
    assert plain["clients"]["took_part"].nonzero().flatten().tolist() == sorted(last.states)
    ditto, _, last = parts_of("ditto", setting)
    prefixes = {k.partition(".")[0] for k, tree in ditto.items() if tree and k.startswith("client")}
    assert prefixes == {"clients", *(f"client{i}" for i in last.states)}
    # All but the branch, which Ditto trains nowhere: it is the server's, bit for bit.
    moved = {k for k in ditto["params"] if not k.startswith("router.")}
    # Before a norm, a bias has a gradient of 0 but for rounding, and may not move.
    assert moved - {"body.0.0.bias"} <= ditto["first"].keys() <= moved
    heads = {k: v for k, v in parts_of("fedper", setting)[0].items() if k.endswith(".private")}
    assert all(tree.keys() <= {"head.weight", "head.bias"} for tree in heads.values())
    assert size_in_bytes(heads) < len(last.states) * size / 2


def spoilt(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    model = folder / "model.safetensors"
    save_file(change(load_file(model)), model)


@pytest.mark.slow
def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a run folder \(no config.resolved.toml\); give one"):
        load_models(tmp_path)
    folder = made(tmp_path / "run", "fedper")
    with pytest.raises(DataError, match="give the shape of one input as in training"):
        load_models(folder, shape=(1, 20, 20))
    spoilt(folder, lambda t: t | {"clients/took_part": torch.ones(CLIENTS - 1).long()})
    with pytest.raises(DataError, match="damaged .it does not say which of 8 clients took part"):
        load_models(folder, shape=SHAPE)
    spoilt(folder, lambda t: {k: v for k, v in t.items() if k != "clients/took_part"})
    with pytest.raises(InputError, match="of a version of fedshift that did not keep the models"):
        load_models(folder, shape=SHAPE)
    (folder / "summary.json").unlink()
    with pytest.raises(InputError, match="this run is not complete; `fedshift run --resume"):
        load_models(folder, shape=SHAPE)


@pytest.mark.slow
def test_a_folder_of_an_older_version_has_its_router(tmp_path: Path) -> None:
    """It has the heads of those that took part, and nothing of the others."""
    folder = made(tmp_path / "run", "feddrm")
    now, x = load_router(folder, shape=SHAPE), torch.rand(5, *SHAPE)
    spoilt(
        folder, lambda t: {k: v for k, v in t.items() if not k.startswith(("first", "clients/"))}
    )
    then = load_router(folder, shape=SHAPE)
    assert then.clients == now.clients
    assert torch.equal(then.predict(x), now.predict(x))
    assert not math.isnan(float(then.scores(x).amax()))
