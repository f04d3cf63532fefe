"""Tasks by writers and with noise, and what a run says of feature shift and of example weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import datasets, recipes
from fedshift.algorithms.method import Method
from fedshift.data import client_data
from fedshift.datasets import writers
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.config.custom import Custom
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.config.networks import network
from fedshift.experiments.config.schema import Network
from fedshift.experiments.experiment import method_of, record
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.distances import measured_shift
from fedshift.experiments.task.feature_shift import writer_ids
from fedshift.experiments.task.preparing import Prepared, prepare
from fedshift.recipes import Setting
from fedshift.record.folder import read_run
from fedshift.report.page import page
from fedshift.seeds import numpy_generator
from fedshift.shifts import domain_auc, group_shares, label_distances, noise_pool
from fedshift.shifts.noise import Shared
from support.writer_fixtures import EACH, OTHERS, WRITERS, write_digits

SHIFT = {"kind": "writers", "clients": 6, "target": "test"}


@pytest.fixture(scope="module", autouse=True)
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = write_digits(tmp_path_factory.mktemp("digits"))
        patch.setenv("FEDSHIFT_DATA", str(folder))
        yield


def tables(method: dict[str, Any] | None = None, **shift: Any) -> dict[str, Any]:
    return {
        "data": {"name": "femnist-digits", "validation": 0.0},
        "shift": SHIFT | shift,
        "model": {"name": "mlp", "hidden": (12,)},
        "method": method or {"name": "fedavg"},
        "training": {"rounds": 2, "batch": 20, "lr": 0.05},
    }


def ready(**shift: Any) -> Prepared:
    return prepare(validate(tables(**shift)))


def origins(prepared: Prepared) -> list[set[int]]:
    """The writers of each client, identified by their images."""
    train = writers.leaf(datasets.find("femnist-digits"))[0]
    images = (train.x.float().div(127.5) - 1).numpy()
    of = {x.tobytes(): int(w) for x, w in zip(images, train.site, strict=True)}
    return [{of[x.numpy().tobytes()] for x in client.x} for client in prepared.task.clients]


@pytest.mark.slow
def test_whole_writers_go_to_clients_and_the_test_file_is_the_test() -> None:
    prepared = ready()
    by_client = origins(prepared)
    assert [len(each) for each in by_client] == [WRITERS // 6] * 6
    assert len(set().union(*by_client)) == WRITERS
    assert [len(c.y) for c in prepared.task.clients] == [EACH * WRITERS // 6] * 6
    assert len(prepared.task.test) == OTHERS * EACH
    assert prepared.task.target.tolist() == pytest.approx([0.1] * 10)
    assert prepared.task.target_validation is None
    by_seed = prepare(validate(tables() | {"seeds": {"run": 1}}))
    assert origins(by_seed) != by_client


@pytest.mark.slow
def test_noise_is_the_pools_and_grows_with_the_client() -> None:
    """Client by client; the test set is clean unless asked for."""
    clean, noisy = ready(), ready(noise=0.5)
    ids = writer_ids("femnist-digits")[: WRITERS * EACH]
    parts, pool = group_shares(ids, 6, numpy_generator(0, "writers")), noise_pool(0.5, 6)
    x = datasets.load("femnist-digits").train.x
    spread = []
    for part, look, one, other in zip(
        parts, pool, clean.task.clients, noisy.task.clients, strict=True
    ):
        assert torch.equal(one.x, x[part].float().div(127.5).sub(1))
        assert torch.allclose(other.x, look(x[part].float().div(255)).sub(0.5).div(0.5))
        spread.append(float((one.x - other.x).std()))
    assert spread == sorted(spread)
    assert spread[0] > 0.05
    assert torch.equal(clean.task.test.x, noisy.task.test.x)
    tested = ready(noise=0.5, noisy_test=True).task.test
    assert torch.equal(tested.y, clean.task.test.y)
    assert not torch.equal(tested.x, clean.task.test.x)
    assert -1.0 <= tested.x.min() <= tested.x.max() <= 1.0


@pytest.mark.slow
def test_noise_needs_no_writers() -> None:
    prepared = ready(kind="iid", noise=0.4)
    assert float((prepared.task.clients[5].x - ready(kind="iid").task.clients[5].x).std()) > 0.1


def test_shared_looks_deal_a_set_evenly() -> None:
    images = torch.rand(10, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    pool = noise_pool(0.5, 3)
    seen = Shared(pool, 1)(images)
    through = [
        [i for i, look in enumerate(pool) if torch.equal(look(image[None])[0], other)]
        for image, other in zip(images, seen, strict=True)
    ]
    assert [len(each) for each in through] == [1] * 10
    assert sorted(np.bincount([each[0] for each in through]).tolist()) == [3, 3, 4]
    assert torch.equal(seen, Shared(pool, 1)(images))
    with pytest.raises(InputError, match="looks in the pool"):
        Shared(())


@pytest.mark.slow
def test_clients_can_keep_tests_of_their_own_writers() -> None:
    """Writers of both files are one pool; a writer that occurs in both is counted once."""
    prepared = prepare(validate(tables(target="clients", noise=0.2)))
    sizes = [
        len(c.y) + len(t) for c, t in zip(prepared.task.clients, prepared.task.tests, strict=True)
    ]
    assert sum(sizes) == (WRITERS + OTHERS) * EACH
    assert sorted(sizes) == [5 * EACH, *[6 * EACH] * 5]
    limited = tables(target="clients")
    limited["data"]["limit"] = 300
    assert len(prepare(validate(limited)).data.train) == 300


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        ({"target": "drawn"}, 'kind "writers" deals all writers .* set target to "test"'),
        ({"noise": -0.1}, "shift.noise = -0.1: must be at least 0"),
        ({"noisy_test": True}, "noisy_test needs noise"),
        ({"noise": 0.1, "noisy_test": True, "target": "clients"}, "other than"),
        ({"noise": 0.1, "transform": "bits", "target": "clients"}, "give one of them"),
        ({"beta": 0.3}, '"beta" is not an option of kind "writers"'),
        ({"kind": "natural"}, 'kind "natural" has its own target'),
    ],
)
def test_what_cannot_be_is_refused(shift: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(tables(**shift))


@pytest.mark.slow
def test_writers_need_a_data_set_that_has_them() -> None:
    config = tables()
    config["data"]["name"] = "fashion-mnist-mini"
    message = 'shift.kind = "writers": unknown data set with writers "fashion-mnist-mini"'
    with pytest.raises(InputError, match=message):
        prepare(validate(config))
    with pytest.raises(InputError, match="there are 30 groups"):
        ready(clients=31)


def test_the_configuration_comes_back() -> None:
    config = validate(tables(noise=0.5, noisy_test=True))
    import tomllib

    assert validate(tomllib.loads(dumps(config))) == config


@pytest.mark.parametrize(("name", "width"), [("mlp-moon", 256), ("lenet-moon", 16)])
def test_moons_head_is_a_network_by_name(name: str, width: int) -> None:
    table: Any = {"hidden": (12,)} if name == "mlp-moon" else {"projection": width}
    model = network(Network.model_validate({"name": name} | table), (1, 28, 28), 10, seed=0)
    params, buffers = model.init()
    assert model(params, buffers, torch.zeros(2, 1, 28, 28))["features"].shape == (2, width)
    with pytest.raises(InputError, match="not for"):
        validate(tables() | {"model": {"name": "mlp", "projection": 3}})


# ---------------------------------------------------------------- densities from a file

DISK = {"name": "feddisk", "density_rounds": 1, "hidden": (8,)}


@pytest.mark.parametrize("method", ["feddisk", "made"])
def test_a_run_without_rounds_to_train_is_refused(method: str) -> None:
    given = tables({"name": method, "density_rounds": 4}, noise=0.5)
    given["training"]["rounds"] = 5
    message = r"training.rounds = 5, of which the first 5 fit densities .* training.rounds = 5 \+ T"
    with pytest.raises(InputError, match=message):
        validate(given)
    given["training"]["rounds"] = 6
    validate(given)


def test_a_method_gets_the_shape_of_an_input_and_the_seed_of_first_weights() -> None:
    given: list[Setting] = []

    def make(setting: Setting) -> Method:
        given.append(setting)
        return recipes.fedavg(setting)

    config = validate(tables() | {"seeds": {"run": 3, "init": 5}})
    prepared = prepare(config)
    custom = Custom(method=replace(recipes.recipe("fedavg"), make=make))
    method_of(config.method, config.training, replace(prepared, custom=custom))()
    assert (given[0].shape, given[0].seed) == ((1, 28, 28), 5)
    assert given[0].clients == len(prepared.task.clients)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: None) -> Path:
    """A run of FedDisk under feature shift."""
    place = tmp_path_factory.mktemp("runs") / "disk"
    given = tables(DISK, noise=0.5)
    given["training"] = {"rounds": 4, "batch": 20, "lr": 0.05}
    config = validate(given)
    record(place, config, prepare(config), ignore_event)
    return place


@pytest.mark.slow
def test_a_run_says_what_its_weights_are_worth(folder: Path) -> None:
    data = json.loads((folder / "summary.json").read_text())
    shares = data["importance"]["share"]
    assert len(shares) == 6
    assert all(0.15 <= s <= 1.0 for s in shares)
    assert data["importance"]["ess"] == pytest.approx([100 * s for s in shares])
    sentence = next(s for s in data["why"] if s.startswith("Example weights leave"))
    assert f"client {shares.index(min(shares))}: {min(shares):.0%}." in sentence


@pytest.mark.slow
def test_weights_are_reported_where_clients_test_on_their_own_data(tmp_path: Path) -> None:
    given = tables(DISK, noise=0.5, target="clients")
    given["training"] = {"rounds": 4, "batch": 20, "lr": 0.05}
    config = validate(given)
    record(tmp_path, config, prepare(config), ignore_event)
    data = json.loads((tmp_path / "summary.json").read_text())
    assert data["serving"] is not None
    assert sum(s.startswith("Example weights leave") for s in data["why"]) == 1


@pytest.mark.slow
def test_the_report_shows_both(folder: Path) -> None:
    run = read_run(folder)
    text = page([run])
    differences, weights = run.summary.differences, run.summary.importance
    assert differences is not None
    assert weights is not None
    assert 'id="differences"' in text
    assert 'id="importance"' in text
    assert "client 5: noise 0.5 against client 0: noise 0.083" in text
    assert "can be told apart</title>" in text
    assert "Too few examples" not in text
    assert f"{differences.mean['domain_auc']:.3f}" in text


@pytest.mark.slow
def test_degenerate_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    direct = {"estimator": "direct", "temper": 1.0, "density_epochs": 20, "least_ess": 0.95}
    given = tables(DISK | direct, noise=0.5)
    given["training"]["rounds"] = 4
    config = validate(given)
    with pytest.raises(
        TrainingError, match=r"less than least_ess = 0.95 allows.*feddisk lower temper"
    ):
        record(tmp_path / "run", config, prepare(config), ignore_event)


# ---------------------------------------------------------------- measures


@pytest.mark.slow
def test_measures_are_those_of_the_shifts_module() -> None:
    prepared = ready(noise=0.5, clients=8)
    counts = np.random.default_rng(0).integers(1, 30, (8, 10)).astype(np.float64)
    measured = measured_shift(prepared.task, counts, 3)
    assert measured["clients"] == [0, 1, 3, 4, 6, 7]
    drawn = [prepared.task.clients[i].x.numpy() for i in measured["clients"]]
    assert np.array_equal(measured["domain_auc"], domain_auc(drawn, 3, most=200), equal_nan=True)
    js = label_distances(counts).js
    assert np.array_equal(measured["js"], js[np.ix_(measured["clients"], measured["clients"])])
    assert measured["mean_all"]["js"] == pytest.approx(js[np.tril_indices(8, -1)].mean())
    assert measured["mean_all"]["js"] != pytest.approx(js.mean())
    assert measured["mean"]["domain_auc"] > 0.8


def test_clients_too_small_for_a_classifier_are_left_out() -> None:
    prepared = ready(clients=2)
    one, two = prepared.task.clients
    small = client_data(one.x[:4], one.y[:4], 0)
    task = replace(prepared.task, clients=(small, two))
    measured = measured_shift(task, prepared.task.table()["labels"].numpy(), 0)
    assert measured["clients"] == [1]
    assert measured["mean"]["domain_auc"] is None


@pytest.mark.slow
@pytest.mark.parametrize("large", [0, 1])
def test_a_report_on_clients_too_small_for_a_classifier_says_so(tmp_path: Path, large: int) -> None:
    config = validate(tables(noise=0.5, clients=3))
    prepared = prepare(config)
    few = [client_data(c.x[:4], c.y[:4], i) for i, c in enumerate(prepared.task.clients)]
    task = replace(prepared.task, clients=(*prepared.task.clients[:large], *few[large:]))
    record(tmp_path, config, replace(prepared, task=task), ignore_event)
    run = read_run(tmp_path)
    differences = run.summary.differences
    assert differences is not None
    assert len(differences.clients) == large
    text = page([run])
    assert "Too few examples: no two clients have enough training inputs" in text
    assert "can be told apart</title>" not in text
    assert f"{differences.mean_all['js']:.3f}" in text
