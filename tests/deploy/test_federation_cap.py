"""The cap that `deploy init` writes: chosen from the number of clients, the same bits as a run."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.engine.run import Round, run
from fedshift.engine.traffic import Meter
from fedshift.experiments.caps import cap_named, with_cap
from fedshift.experiments.config import Config, Method, Training
from fedshift.experiments.config_shift import Split
from fedshift.experiments.experiment import federation_of, method_of
from fedshift.experiments.load import load_config, validate
from fedshift.experiments.on_flower import configured_site, on_grid, strategy_of
from fedshift.experiments.task import prepare
from fedshift.flower import LocalGrid, client_app
from support.command_line import code_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "loopback" / "experiment.toml"
# FedAvg on three clients of very different sizes, for a moment.
SKEWED = [
    word
    for change in (
        "training.rounds=2", "training.steps=3", "method.name=fedavg", "method.ess=",
        "shift.kind=quantity", "shift.labels_per_client=", "shift.beta=0.3",
    )
    for word in ("-c", change)
]  # fmt: skip
Call = Callable[..., int]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    def called(*args: str) -> int:
        return code_of(monkeypatch, "deploy", *args)

    return called


def test_the_cap_of_so_many_clients() -> None:
    for clients in range(1, 200):
        config, said = with_cap(Config(shift=Split(clients=clients)))
        cap = config.training.max_weight
        assert cap is not None
        assert 1 / clients <= cap <= 1
        assert clients == 1 or cap <= 1 / 2
        assert clients <= 6 or cap == pytest.approx(3 / clients)
        assert f"{cap:.3g} of 1" in said
    drawn = Config(shift=Split(clients=100), training=Training(cohort=10))
    assert with_cap(drawn)[0].training.max_weight == 0.3


@pytest.mark.parametrize(
    "config",
    [
        Config(training=Training(max_weight=0.9)),
        Config(training=Training(max_weight=1.0)),
        Config(method=Method.model_validate({"name": "fedpals", "lam": 1.0, "cap": 0.4})),
    ],
    ids=["training", "none", "method"],
)
def test_an_experiment_that_names_its_own_keeps_it(config: Config) -> None:
    kept, said = with_cap(config)
    assert kept == config
    assert said == f"No client gets a weight above {cap_named(config):.3g}, as the experiment says."


def made(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Path:
    folder = tmp_path / "federation"
    assert call("init", str(EXAMPLE), str(folder), *more) == 0
    assert "No client gets a weight above 0.5" in capsys.readouterr().out
    return folder


@pytest.mark.slow
def test_the_file_gives_the_bits_of_the_federation(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(call, tmp_path, capsys, *SKEWED)
    text = (folder / "experiment.toml").read_text()
    app = tomllib.loads((folder / "app" / "pyproject.toml").read_text())
    assert app["tool"]["flwr"]["app"]["config"]["experiment"] == text
    config = load_config(folder / "experiment.toml")
    assert config.training.max_weight == 0.5
    here, there = by_loop(config), by_messages(text)
    assert float(here.weights.max()) == 0.5  # by sizes one has more
    for name, v in here.server["params"].items():
        assert v.equal(there.server["params"][name]), name
    assert torch.equal(here.weights, there.weights)


def by_loop(config: Config) -> Round:
    prepared = prepare(config)
    algorithm = method_of(config, prepared)(**config.method.options)
    return list(run(algorithm, federation_of(config, prepared), config.training.rounds))[-1]


def by_messages(text: str) -> Round:
    config = validate(tomllib.loads(text), text=text)
    prepared = prepare(config)
    algorithm = method_of(config, prepared)(**config.method.options)
    federation = federation_of(config, prepared)
    grid = LocalGrid(client_app(partial(configured_site, text)), len(federation.clients))
    strategy = strategy_of(algorithm, federation, config.training)
    return list(on_grid(grid, strategy, config.training, meter=Meter()))[-1]


@pytest.mark.slow
def test_another_number_of_clients_than_keys(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(call, tmp_path, capsys)
    file = folder / "experiment.toml"
    file.write_text(file.read_text().replace("clients = 3", "clients = 4"))
    assert call("server", str(folder)) == 2
    error = capsys.readouterr().err
    assert "shift.clients = 4, and the federation has the keys of 3 clients; give 3" in error
    file.write_text(file.read_text().replace("max_weight = 0.5", "max_weight = 0"))
    assert call("server", str(folder)) == 2
    assert "training.max_weight = 0: must be more than 0" in capsys.readouterr().err


@pytest.mark.parametrize("played", [False, True])
def test_an_interrupted_server_says_how_to_go_on(
    played: bool,
    call: Call,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a round is over."""
    folder = made(call, tmp_path, capsys)

    def interrupted(_: Path, out: Path, **__: object) -> None:
        if played:
            (out / "checkpoints").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedshift.deploy.federation.serve", interrupted)
    assert call("server", str(folder)) == 130
    again = f"; go on with `fedshift deploy server {folder} --resume {folder / 'run'}`" * played
    assert capsys.readouterr().err == f"interrupted{again}\n"
