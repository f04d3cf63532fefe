"""FedDRM on a federation: heads stay at their sites, and the server's router is the same."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import ArrayRecord, Message

import fedshift as fs
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.folder.model_file import read_parts
from fedshift.experiments.folder.routers import Fit, load_router, with_fit
from fedshift.experiments.folder.run_models import load_models
from fedshift.experiments.task.preparing import prepare
from fedshift.router.route import Router
from fedshift_deploy.machines import awaited
from fedshift_deploy.sites.own_model import load_own_model
from support.federation_grid import Dies, Watched, events_in, here, served, summary_of

# Of the last round's own models; the others of served.csv need all models in one place.
OWN = ("average_accuracy", "worst_accuracy", "oracle_routed", "router_accuracy")


def experiment(named: str = "feddrm", **more: Any) -> str:
    """Three small clients, two rounds, tested on their own examples."""
    config = validate({
        "name": "run", "data": {"name": "fashion-mnist-mini", "limit": 300},
        "shift": {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 3},
        "model": {"name": "mlp-projected", "hidden": [8]}, "method": {"name": named},
        "training": {"rounds": 2, "steps": 3, "lr": 0.05, "evaluate_every": 1},
    } | more)  # fmt: skip
    return dumps(config)


def same(one: Router, other: Router, x: torch.Tensor) -> bool:
    """Whether two routers send the same queries to the same clients, by the same numbers."""
    return (
        all(a.equal(b) for a, b in zip(one.route(x, 2), other.route(x, 2), strict=True))
        and torch.equal(one.sizes, other.sizes)
        and one.calibration == other.calibration
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Watched]:
    place, text = tmp_path_factory.mktemp("routers"), experiment()
    grid = Watched(text, place / "there", place / "kept")
    return here(text, place / "here"), grid.serve(), grid


@pytest.mark.slow
def test_the_router_is_that_of_one_process(runs: tuple[Path, Path, Watched]) -> None:
    one, there, _ = runs
    x = torch.rand(50, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    fits: list[Fit] = ["trained", "refitted", "moment"]
    routers = {fit: load_router(there, fit=fit) for fit in fits}
    for fit, router in routers.items():
        assert same(router, load_router(one, fit=fit), x), fit
    assert not same(routers["trained"], routers["refitted"], x)
    moment = routers["moment"]
    assert torch.equal(moment.novelty(x), load_router(one, fit="moment").novelty(x))
    assert (one / "router.safetensors").read_bytes() == (there / "router.safetensors").read_bytes()
    # What `Router` itself fits, on the clients' data.
    config = validate(tomllib.loads((one / "config.resolved.toml").read_text()))
    clients = prepare(config).task.clients
    assert same(load_router(one).refitted(clients, tolerance=1e-4), routers["refitted"], x)
    assert same(load_router(one).from_moments(clients), moment, x)


@pytest.mark.slow
def test_heads_and_examples_stay_at_their_sites(runs: tuple[Path, Path, Watched]) -> None:
    one, there, grid = runs
    private = read_parts(one / "model.safetensors")["client0.private"]
    assert private
    parts = read_parts(there / "model.safetensors")
    assert not any(part.startswith("client0") for part in parts)
    assert not private.keys() & parts["params"].keys()
    sent = {
        name for reply in grid.replies if reply.has_content()
        for record in reply.content.array_records.values() for name in record
    }  # fmt: skip
    assert sent  # of an update, a table or sums
    assert not private.keys() & sent
    with pytest.raises(InputError, match=r"models of clients \[0, 1, 2\] are at their sites"):
        load_router(there).predict(torch.rand(2, 1, 28, 28))
    (place,) = (grid.keep / "0" / "models").iterdir()
    model = load_own_model(place)
    net = load_models(one)
    x = torch.rand(5, 1, 28, 28)
    pairs = [net.model(*pair, x)["logits"] for pair in net.served]
    assert torch.equal(model(x)["logits"], pairs[0])
    assert not torch.equal(pairs[1], pairs[0])
    loaded = fs.load(there)
    with pytest.raises(InputError, match="model stayed at its site"):
        loaded.module("client 1")
    with pytest.raises(InputError, match="model stayed at its site"):
        loaded.module()


@pytest.mark.slow
def test_own_models_have_the_accuracies_of_one_process(runs: tuple[Path, Path, Watched]) -> None:
    one, there, _ = (served(run) if isinstance(run, Path) else {} for run in runs)
    assert {name: there[name] for name in OWN} == {name: one[name] for name in OWN}
    assert there["vote_accuracy"] is there["routed_posterior"] is there["system_accuracy"] is None
    alone, sites = summary_of(runs[0]), summary_of(runs[1])
    assert sites["serving"]["client_accuracy"] == alone["serving"]["client_accuracy"]
    assert any("stayed at its site" in sentence for sentence in sites["why"])


@pytest.mark.slow
@pytest.mark.parametrize("dies", [1, 4], ids=["at the first message", "at the fourth message"])
def test_a_server_that_dies_while_the_router_is_fitted(
    dies: int, runs: tuple[Path, Path, Watched], tmp_path: Path
) -> None:
    text, out = experiment(), tmp_path / "run"
    with pytest.raises(Dies):
        Watched(text, out, tmp_path / "kept", dies).serve()
    assert not (out / "summary.json").exists()
    Watched(text, out, tmp_path / "kept").serve()
    for name in ("router.safetensors", "model.safetensors", "summary.json", "served.csv"):
        assert (out / name).read_bytes() == (runs[1] / name).read_bytes(), name


@pytest.mark.slow
def test_by_moments_alone(
    runs: tuple[Path, Path, Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few messages; the events name what the server waits for."""
    monkeypatch.setattr(awaited, "LONG", 0.0)
    grid = Watched(experiment(), tmp_path / "run", tmp_path / "kept", refit=False)
    out = grid.serve()
    assert grid.about_routers <= 4
    x = torch.rand(50, 1, 28, 28)
    assert same(load_router(out, fit="moment"), load_router(runs[1], fit="moment"), x)
    for absent in ("refitted", "momnet"):
        with pytest.raises(InputError, match=f'fit "{absent}"'):
            load_router(out, fit=absent)  # type: ignore[arg-type]
    waits = [e["what"] for e in events_in(out) if e["event"] == "waiting"]
    assert {"have registered", "have scored round 2"} <= {*waits}
    assert any("message 2 of the router's fits" in text for text in waits)


def changed(change: Any) -> type[Watched]:
    """A grid on which the first answer about routers is another one."""

    class Changed(Watched):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            sent = list(messages)
            if sent[0].metadata.message_type == "query.router" and change is None:
                self.absent.add(sent[1].metadata.dst_node_id)
            replies = super().send_and_receive(sent, **given)
            if change is not None and "answer.0" in replies[0].content.array_records:
                change(replies[0].content)
            return replies

    return Changed


def tripled(content: Any) -> None:
    answer = content["answer.0"].to_torch_state_dict()
    more = {k: v * 3 if k == "n" else v for k, v in answer.items()}
    content["answer.0"] = ArrayRecord(more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "no moment layer: clients [1] are not connected"),
        (lambda content: content.pop("answer.0"), "no moment layer: client 2 sent []"),
        (tripled, "client 2 sent sums of more examples than it has"),  # it would count for more
    ],
)
def test_a_client_that_is_gone_or_lies(change: Any, words: str, tmp_path: Path) -> None:
    """The run ends well, without the layer, and says why."""
    out = changed(change)(experiment(), tmp_path / "run", tmp_path / "kept").serve()
    assert any(words in why for why in summary_of(out)["why"])
    if change is None:
        assert not (out / "router.safetensors").exists()
        with pytest.raises(DataError, match="no refit"):
            load_router(out, fit="moment")
    assert load_router(out).clients == [0, 1, 2]


@pytest.mark.slow
def test_a_damaged_file_of_fits(runs: tuple[Path, Path, Watched], tmp_path: Path) -> None:
    router, path = load_router(runs[1]), tmp_path / "router.safetensors"
    whole = (runs[1] / "router.safetensors").read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        with_fit(router, path, "moment")
    path.write_bytes(whole.replace(b"moment/gamma", b"moment/gamna"))
    with pytest.raises(DataError, match="damaged"):
        with_fit(router, path, "moment")
