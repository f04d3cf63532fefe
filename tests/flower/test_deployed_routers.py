"""FedDRM on a federation: heads stay at their sites, and the server's router is the same."""

from __future__ import annotations

import json
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
from support.federation_grid import Dies, Watched, here, served

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
    summary = json.loads((runs[1] / "summary.json").read_text())
    assert (
        summary["serving"]["client_accuracy"]
        == json.loads((runs[0] / "summary.json").read_text())["serving"]["client_accuracy"]
    )
    assert any("stayed at its site" in sentence for sentence in summary["why"])


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
def test_by_moments_alone(runs: tuple[Path, Path, Watched], tmp_path: Path) -> None:
    grid = Watched(experiment(), tmp_path / "run", tmp_path / "kept", refit=False)
    out = grid.serve()
    assert grid.about_routers <= 4
    x = torch.rand(50, 1, 28, 28)
    assert same(load_router(out, fit="moment"), load_router(runs[1], fit="moment"), x)
    with pytest.raises(InputError, match='no fit "refitted"; there is moment'):
        load_router(out, fit="refitted")
    with pytest.raises(InputError, match='fit "momnet"'):
        load_router(out, fit="momnet")  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_the_server_waits_for_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "LONG", 0.0)
    out = Watched(experiment(), tmp_path / "run", tmp_path / "kept", refit=False).serve()
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    waits = [e["what"] for e in events if e["event"] == "waiting"]
    assert {"have registered", "have scored round 2"} <= {*waits}
    assert [text for text in waits if "router" in text][:2] == [
        f"have answered message {n} of the router's fits" for n in (1, 2)
    ]


@pytest.mark.slow
def test_a_client_that_is_gone_or_sends_nonsense(tmp_path: Path) -> None:
    """The run ends well, without a refit, and says why."""

    class Fewer(Watched):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            sent = list(messages)
            if sent[0].metadata.message_type == "query.router":
                self.absent.add(sent[1].metadata.dst_node_id)
            return super().send_and_receive(sent, **given)

    out = Fewer(experiment(), tmp_path / "gone", tmp_path / "kept").serve()
    summary = json.loads((out / "summary.json").read_text())
    assert any("no refitted layer: clients [1] did not answer" in why for why in summary["why"])
    assert any("no moment layer: clients [1] are not connected" in why for why in summary["why"])
    assert not (out / "router.safetensors").exists()
    with pytest.raises(DataError, match="missing: this run has no refit"):
        load_router(out, fit="moment")
    assert load_router(out).clients == [0, 1, 2]

    class Odd(Watched):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            replies = super().send_and_receive(messages, **given)
            for reply in replies[:1]:
                records = reply.content.array_records
                if "answer.0" in records:
                    del reply.content["answer.0"]
            return replies

    out = Odd(experiment(), tmp_path / "odd", tmp_path / "kept2").serve()
    summary = json.loads((out / "summary.json").read_text())
    assert any("no moment layer: client 2 sent [], not ['n'" in why for why in summary["why"])


@pytest.mark.slow
def test_a_client_that_claims_moments_of_more_examples(tmp_path: Path) -> None:
    """It would count for more in the router: the layer is left out, with the reason."""

    class Liar(Watched):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            replies = super().send_and_receive(messages, **given)
            records = replies[0].content.array_records
            if "answer.0" in records:
                answer = records["answer.0"].to_torch_state_dict()
                more = ArrayRecord({k: v * 3 if k == "n" else v for k, v in answer.items()})
                replies[0].content["answer.0"] = more
            return replies

    out = Liar(experiment(), tmp_path / "liar", tmp_path / "kept").serve()
    summary = json.loads((out / "summary.json").read_text())
    assert any("client 2 sent sums of more examples than it has" in why for why in summary["why"])


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
