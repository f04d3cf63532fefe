"""`training.prior` on a federation: the correction of one process, from sums alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import ArrayRecord, Message

from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.folder.model_file import read_parts
from fedshift.experiments.folder.run_models import load_models
from fedshift_deploy.machines import deployed
from fedshift_deploy.machines.deployable import check_start, configured
from support.federation_grid import Dies, Watched, events_in, here, summary_of
from support.own_sites import FILE, deploy, joined, places, resolved, together

# Beside times and what is true of a federation alone.
FILES = ("metrics.csv", "clients.csv")


def experiment(prior: str, **more: Any) -> str:
    """Three small clients, two rounds."""
    return dumps(validate({
        "name": "run", "data": {"name": "fashion-mnist-mini", "limit": 400},
        "shift": {"kind": "dirichlet-per-client", "beta": 0.5, "clients": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"rounds": 2, "steps": 5, "lr": 0.1, "evaluate_every": 2, "prior": prior},
    } | more))  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Watched]:
    place, text = tmp_path_factory.mktemp("priors"), experiment("calibrated")
    grid = Watched(text, place / "there", place / "kept")
    return here(text, place / "here"), grid.serve(), grid


def test_the_corrected_model_is_that_of_one_process(runs: tuple[Path, Path, Watched]) -> None:
    one, there, grid = runs
    for name in FILES:
        assert (one / name).read_bytes() == (there / name).read_bytes(), name
    mine, sent = (read_parts(folder / "model.safetensors") for folder in (one, there))
    assert all(v.equal(sent["uncorrected"][name]) for name, v in mine["uncorrected"].items())
    # In one process all clients' logits are of one pass, and round in other places.
    for name, v in mine["params"].items():
        torch.testing.assert_close(v, sent["params"][name], rtol=1e-5, atol=1e-7)
    given, expected = summary_of(there), summary_of(one)
    assert given["corrected"]["form"] == expected["corrected"]["form"] == "calibrated"
    assert given["corrected"]["counts"] == expected["corrected"]["counts"]
    for name in ("scale", "bias", "prior"):
        assert given["corrected"][name] == pytest.approx(expected["corrected"][name], rel=1e-5)
    corrected = {k: v for k, v in expected["final"].items() if k.endswith("_corrected")}
    assert len(corrected) == 4
    assert {k: given["final"][k] for k in corrected} == pytest.approx(corrected)
    assert grid.traffic.messages["query.calibrate"] >= 2 * 3


def test_sums_alone_leave_a_client(runs: tuple[Path, Path, Watched]) -> None:
    _, _, grid = runs
    K, width = 10, {"loss": 1, "gradient": 11, "hessian": 121, "counts": 10}
    sent = [
        {k: v.numpy().size for k, v in reply.content.array_records["sums"].items()}
        for reply in grid.replies
        if reply.has_content() and "sums" in reply.content.array_records
    ]
    assert sent
    assert all(one == width for one in sent)
    assert sum(width.values()) == (K + 1) ** 2 + 2 * K + 2


@pytest.mark.slow
def test_a_target_without_a_calibrator_asks_for_scores_alone(tmp_path: Path) -> None:
    text = experiment("target")
    grid = Watched(text, tmp_path / "there", tmp_path / "kept")
    there, one = grid.serve(), here(text, tmp_path / "here")
    assert summary_of(there)["corrected"] == summary_of(one)["corrected"]
    assert "query.calibrate" not in grid.traffic.messages
    models, done = load_models(there), load_models(one)
    assert all(v.equal(done.shared[0][k]) for k, v in models.shared[0].items())
    assert not models.shared[0]["head.bias"].equal(models.uncorrected[0]["head.bias"])


@pytest.mark.slow
def test_a_server_that_goes_on_corrects_once(
    runs: tuple[Path, Path, Watched], tmp_path: Path
) -> None:
    """Checkpoints have the model as trained, before the correction."""

    class Killed(Watched):
        def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
            sent = list(messages)
            if sent and sent[0].metadata.message_type == "query.calibrate":
                raise Dies
            return super().send_and_receive(sent, **given)

    text, out = experiment("calibrated"), tmp_path / "run"
    with pytest.raises(Dies):
        Killed(text, out, tmp_path / "kept").serve()
    (checkpoint, *_) = sorted((out / "checkpoints").rglob("*.safetensors"))
    Watched(text, out, tmp_path / "kept", 1).serve()
    assert checkpoint.name
    assert (out / "model.safetensors").read_bytes() == (runs[1] / "model.safetensors").read_bytes()


# The node of the grid that is client 2.
LIAR = 1000 + 7 * 2


class Liar(Watched):
    """One client's sums count each example a thousand times."""

    def send_and_receive(self, messages: Iterable[Message], **given: Any) -> list[Message]:
        replies = super().send_and_receive(messages, **given)
        for reply in replies:
            records = reply.content.array_records
            if "sums" in records and reply.metadata.src_node_id == LIAR:
                sums = records["sums"].to_torch_state_dict()
                more = ArrayRecord({k: v * 1000 for k, v in sums.items()})
                reply.content["sums"] = more
        return replies


@pytest.mark.slow
def test_sums_of_more_examples_than_a_client_was_dealt(
    runs: tuple[Path, Path, Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Liar(experiment("calibrated"), tmp_path / "run", tmp_path / "kept").serve()
    (event,) = [e for e in events_in(out) if e["event"] == "unscored"]
    assert event["client"] == 2
    honest = summary_of(runs[1])["corrected"]["counts"]
    left = summary_of(out)["corrected"]["counts"]
    assert all(a <= b for a, b in zip(left, honest, strict=True))
    assert sum(left) < sum(honest)
    # The control: where the counts are not compared, it is believed.
    monkeypatch.setattr(deployed, "validated", lambda task: None)
    free = Liar(experiment("calibrated"), tmp_path / "free", tmp_path / "kept2").serve()
    assert sum(summary_of(free)["corrected"]["counts"]) > 100 * sum(honest)


NONE = {"name": "fashion-mnist-mini", "limit": 400, "validation": 0.0}
CLIENTS = {"target": "clients", "kind": "dirichlet-per-client", "beta": 1.0, "clients": 3}
# CCVR's statistics of 784 features have 1,568 times the bytes of the linear model.
WIDE = {"method": {"name": "ccvr"}, "model": {"name": "linear"}}
OWN = FILE.replace("[training]\n", '[training]\nprior = "target"\n')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (experiment("calibrated", data=NONE), "validation examples"),
        (experiment("target", shift=CLIENTS), "each client serves a model"),
        (experiment("none", **WIDE), r"training.max_reply = \d+"),
        (OWN, "nothing would measure the corrected one"),
        (experiment("calibrated"), ""),
        (experiment("target", data=NONE), ""),
        (experiment("none", method={"name": "ccvr"}), ""),
    ],
)
def test_what_deploy_init_refuses(text: str, words: str) -> None:
    if not words:
        assert check_start(configured(text)) == ""
        return
    with pytest.raises(InputError, match=words):
        check_start(configured(text))


@pytest.mark.slow
def test_sites_calibrate_a_model_for_the_servers_own_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows never leave a site; the model is that of the joined table up to rounding of sums.

    A site's validation rows stand in another order there.
    """
    joined(1, 40).drop(columns="site").to_csv(tmp_path / "north.csv", index=False)
    text = FILE.replace("{well = 0.3, ill = 0.7}", '"north.csv"')
    text = text.replace("[training]\n", '[training]\nprior = "calibrated"\n')
    table = joined()
    folders = places(tmp_path, table, text)
    there = deploy(monkeypatch, folders, tmp_path / "there", resolved(tmp_path, text))
    one = together(tmp_path, table, text)
    given, expected = summary_of(there)["corrected"], summary_of(one)["corrected"]
    assert (given["form"], given["counts"]) == ("calibrated", expected["counts"])
    for name in ("scale", "bias", "prior"):
        assert given[name] == pytest.approx(expected[name], rel=1e-5), name
    parts = [read_parts(folder / "model.safetensors") for folder in (there, one)]
    sent, due_here = (part["params"] | part["uncorrected"] for part in parts)
    assert all(v.equal(sent[name]) for name, v in due_here.items())
