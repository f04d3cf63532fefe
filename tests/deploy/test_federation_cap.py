"""The cap that `deploy init` writes: chosen from the number of clients; runs have the same bits."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.engine.run import Round, run
from fedshift.engine.traffic import Meter
from fedshift.experiments.config.load import load_config, validate
from fedshift.experiments.config.schema import Config, Method, Training
from fedshift.experiments.config.shift import Split
from fedshift.experiments.experiment import federation_of, method_of
from fedshift.experiments.measures.caps import beyond, cap_named, cap_text, with_cap
from fedshift.experiments.on_flower import configured_site, on_grid, strategy_of
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid, client_app
from fedshift.server.cap import capped
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
        training, sentence = with_cap(Method(), Training(), clients)
        cap = training.max_weight
        assert cap is not None
        assert 1 / clients <= cap <= 1
        assert clients == 1 or cap <= 1 / 2
        assert clients <= 6 or cap == pytest.approx(3 / clients)
        assert clients == 1 or f"{cap:.3g} of 1" in sentence
    assert with_cap(Method(), Training(cohort=10), 100)[0].max_weight == 0.3


@pytest.mark.parametrize(
    "config",
    [
        Config(training=Training(max_weight=0.9)),
        Config(shift=Split(clients=2), training=Training(max_weight=0.5)),
        Config(method=Method.model_validate({"name": "fedpals", "lam": 1.0, "cap": 0.4})),
    ],
    ids=["training", "just the least", "method"],
)
def test_an_experiment_that_names_its_own_keeps_it(config: Config) -> None:
    training, sentence = with_cap(config.method, config.training, config.clients)
    assert training == config.training
    cap = cap_named(config.method, config.training)
    assert sentence == f"No client gets a weight above {cap:.3g}, as the experiment says."


NAMED = {
    "less than an even share": (
        3, 0.1, 0, "No client gets a weight above 1/3: 0.1 is less than 1/3, the least for 3 cl"),
    "of a cohort": (
        10, 0.1, 4, "No client gets a weight above 1/4: 0.1 is less than 1/4, the least for 4 cl"),
    "the same with more clients": (12, 0.1, 0, "No client gets a weight above 0.1, as the exp"),
    "none": (3, 1.0, 0, "No cap, as the experiment says: one client can have all the weight of a"),
    "one client": (1, 0.5, 0, "A round has one client, which has all of its weight: no cap can"),
    "one in a round": (8, 0.5, 1, "A round has one client, which has all of its weight: no cap"),
    "one by choice": (8, None, 1, "A round has one client, which has all of its weight: no cap"),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_a_cap_is_worth_is_what_clients_get(case: str) -> None:
    """The number in the sentence is a liar's weight in a round, computed by the round itself."""
    clients, cap, cohort, words = NAMED[case]
    training = Training(max_weight=cap, cohort=cohort or None)
    capped_training, sentence = with_cap(Method(), training, clients)
    assert sentence.startswith(words)
    assert capped_training.max_weight == (cap or 1.0)
    present = cohort or clients
    claims = torch.tensor([1e9, *[1.0] * (present - 1)], dtype=torch.float64)
    most = float(capped(claims / claims.sum(), cap or 1.0).max())
    number = re.search(r"above (?:1/(\d+)|([\d.]+))[:,]", sentence)
    if number is None:
        assert most == pytest.approx(1.0)
    else:
        share = 1 / int(number[1]) if number[1] else float(number[2])
        assert most == pytest.approx(share)


def test_a_missing_cap_is_reported() -> None:
    assert cap_text(Method(), Training(), 3).startswith("No cap, since the experiment names")


def test_an_even_share_above_a_small_cap_is_no_suspicion() -> None:
    """The control: a client with more than its even share is one."""
    even, n = torch.full((3,), 1 / 3, dtype=torch.float64), torch.tensor([5.0, 5.0, 5.0])
    assert not [*beyond(even, n, 0.1)]
    ((client, why),) = beyond(torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64), n, 0.1)
    assert client == 2
    assert why == "by what it registered it would have 0.600 of the weight; the cap leaves it 0.333"


def test_sites_of_nearly_one_size_are_no_suspicion() -> None:
    """250 rows beside 248, and up to a tenth above the cap; the control is a little more."""
    n = torch.tensor([250.0, 248.0]).double()
    for cap in (0.5, 1.0):
        assert not [*beyond(n / n.sum(), n, cap)]
        assert not [*beyond(torch.tensor([0.549, 0.451]).double(), n, cap)]
        ((client, why),) = beyond(torch.tensor([0.551, 0.449]).double(), n, cap)
        assert client == 0
        assert ("the cap leaves it 0.500" in why) == (cap < 1)


@pytest.mark.parametrize("cap", [0.5, 0.9, 0.95, 0.999])
def test_a_liar_is_named_whatever_the_cap(cap: float) -> None:
    """A tenth above 0.95 is no weight; the control is less than halfway from the cap to 1."""
    n = torch.tensor([1e9, 100.0, 100.0]).double()
    ((client, why),) = beyond(n / n.sum(), n, cap)
    assert client == 0
    assert f"the cap leaves it {cap:.3f}" in why
    assert "10,000,000 times the median" in why
    some = min(1.1 * cap, (1 + cap) / 2) - 1e-6
    assert not [*beyond(torch.tensor([some, (1 - some) / 2, (1 - some) / 2]).double(), n, cap)]


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
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    return list(run(algorithm, federation_of(config.method, prepared), config.training.rounds))[-1]


def by_messages(text: str) -> Round:
    config = validate(tomllib.loads(text), text=text)
    prepared = prepare(config)
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    federation = federation_of(config.method, prepared)
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

    monkeypatch.setattr("fedshift_deploy.federation.serve", interrupted)
    assert call("server", str(folder)) == 130
    again = f"; go on with `fedshift deploy server {folder} --resume {folder / 'run'}`" * played
    assert capsys.readouterr().err == f"interrupted{again}\n"
