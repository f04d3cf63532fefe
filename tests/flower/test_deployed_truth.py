"""What a deployed run records: who measured, which clients dropped out, how to repeat it."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedshift import estimate_target_accuracy, pals_weights
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.data import Examples, label_counts
from fedshift.evaluation.scores import score
from fedshift.experiments.config.load import dumps, validate
from fedshift.experiments.config.schema import Config
from fedshift.experiments.folder.model_file import read_parts
from fedshift.experiments.on_flower import configured_site
from fedshift.experiments.task.preparing import prepare
from fedshift.flower import LocalGrid, Site, client_app, play
from fedshift.recipes import Setting
from fedshift.record.folder import SERVING, read_run
from fedshift.report.page import page
from fedshift_deploy.chosen import CHOICES, SITE
from fedshift_deploy.machines.remote_sums import overhear
from support.every_method import MAKE
from support.federation_grid import dealt, here, serve, served, summary_of
from support.federations import SIZES, make_federation
from support.flower_runs import sites, strategy_of
from support.small_runs import text_of

SHIFT = {"kind": "sparsity", "labels_per_client": 3, "clients": 3}


def config_of(method: str = "fedpals", shift: Any = SHIFT, **training: Any) -> Config:
    """Two rounds of three small clients, all evaluated."""
    options = {"ess": 0.9} if method == "fedpals" else {}
    return validate({
        "name": "run", "data": {"name": "fashion-mnist-mini"},
        "shift": shift,
        "model": {"name": "linear"}, "method": {"name": method, **options},
        "training": {"rounds": 2, "steps": 1, "evaluate_every": 1, "lr": 0.05} | training,
    })  # fmt: skip


def validating_site(text: str, client: int) -> Site:
    """A site that validates on its first 20 training examples, and client 2 on none."""
    site = configured_site(text, client)
    few = 0 if client == 2 else 20
    return replace(site, validation=Examples(site.data.x[:few], site.data.y[:few]))


@pytest.mark.slow
def test_the_estimate_is_of_what_clients_measured(tmp_path: Path) -> None:
    config = config_of()
    text, out = dumps(config), tmp_path / "run"
    serve(LocalGrid(client_app(partial(validating_site, text)), 3), text, out, site="sites:own")
    model, task = prepare(config).model, prepare(config).task
    parts = read_parts(out / "model.safetensors")
    at = [score(model, parts["params"], parts["buffers"], validating_site(text, i).validation, 10)  # type: ignore
          for i in range(3)]  # fmt: skip
    right, total = (torch.stack([getattr(s, k) for s in at]) for k in ("correct", "total"))
    estimate = estimate_target_accuracy(right.numpy(), total.numpy(), task.target.numpy())
    final = served(out)
    assert final["estimated_accuracy"] == pytest.approx(estimate.accuracy, rel=1e-12)
    rows = list(csv.DictReader((out / "clients.csv").open()))
    assert [row["n_validation"] for row in rows] == ["20", "20", "0"]
    serve(dealt(text), text, tmp_path / "dealt")  # the control
    other = served(tmp_path / "dealt")
    assert other["estimated_accuracy"] != final["estimated_accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["last", "best"])
def test_the_same_examples_give_the_files_of_one_process(keep: str, tmp_path: Path) -> None:
    config = config_of("scaffold", keep=keep)
    serve(dealt(dumps(config)), dumps(config), tmp_path / "there", site=CHOICES[SITE])
    here(dumps(config), tmp_path / "here")
    for name in ("summary.json", "metrics.csv", "clients.csv", "model.safetensors"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert not (tmp_path / "here" / "deployment.json").exists()
    pages = [page([read_run(tmp_path / name)]) for name in ("there", "here")]
    assert ["sent sums by label" in one for one in pages] == [True, False]


def smaller_site(text: str, client: int) -> Site:
    """Half, a third or a quarter of what is dealt; client 1 cannot train on it."""
    site = configured_site(text, client)
    dealt, n = site.data, len(site.data.y) // (client + 2)
    x = dealt.x[:n] * (torch.inf if client == 1 else 1.0)
    return replace(site, data=dealt._replace(x=x, y=dealt.y[:n], w=dealt.w[:n]))


@pytest.mark.slow
def test_gap_and_tables_are_of_the_data_that_clients_have(tmp_path: Path) -> None:
    text, out = text_of("fedpals"), tmp_path / "run"
    events = serve(LocalGrid(client_app(partial(smaller_site, text)), 3), text, out)
    counts = torch.stack([label_counts(smaller_site(text, i).data, 10) for i in range(3)]).numpy()
    target = prepare(validate(tomllib.loads(text), text=text)).task.target.numpy()
    left = pals_weights(counts[[0, 2]], target, ess=0.9)
    distance = pytest.approx(float((left.residual**2).sum() ** 0.5))
    first = next(event for event in events if event["event"] == "round")
    assert [d["client"] for d in first["dropped"]] == [1]
    assert first["gap"] == distance
    # The weights of the rounds that were played: client 1 was in none.
    rows = list(csv.DictReader((out / "clients.csv").open()))
    assert [int(row["n"]) for row in rows] == counts.sum(1).tolist()
    played = [left.weights[0], 0.0, left.weights[1]]
    assert [float(row["weight"]) for row in rows] == pytest.approx(played)
    summary = summary_of(out)
    assert (summary["ess"], summary["distance"]) == (pytest.approx(left.ess), distance)
    whole = pals_weights(counts, target, ess=0.9)  # the control: what it would have had
    assert whole.weights[1] > 0.1


class Leaving(LocalGrid):
    """Client 1 fails in round 1; the node of client 2 is gone in round 2, also for evaluation."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        kinds = {(m.metadata.message_type, m.content["run"]["round"]) for m in sent
                 if m.metadata.message_type != "query.register"}  # fmt: skip
        names = list(super().push_messages(sent))
        for name, message in zip(names, sent, strict=True):
            if kinds == {("train", 1)} and message.metadata.dst_node_id == 1007:
                self.to_pull[name] = Message(Error(2, "the disk is on fire"), reply_to=message)
        if kinds == {("evaluate", 1)}:
            self.absent = {1014}
        return names


@pytest.mark.slow
def test_clients_that_drop_out_are_reported_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SERVING, "fedshift deploy server /f --host h --port 1")
    text, out = dumps(config_of()), tmp_path / "run"
    events = serve(Leaving(client_app(partial(configured_site, text)), 3), text, out)
    lost = [e for e in events if e["event"] == "dropped"]
    assert [(e["round"], e["client"], e["kind"], e["reason"]) for e in lost] == [
        (1, 1, "error", "the disk is on fire"), (2, 2, "lost", "its node is not connected"),
    ]  # fmt: skip
    order = [(e["event"], e.get("round")) for e in events if e["event"] in ("dropped", "round")]
    assert order == [("dropped", 1), ("round", 1), ("dropped", 2), ("round", 2)]

    rounds = [e for e in events if e["event"] == "round"]
    mean = [0.0, 0.0, 0.0]
    for event in rounds:
        for i, weight in zip(event["cohort"], event["weights"], strict=True):
            mean[i] += weight / 2
    rows = list(csv.DictReader((out / "clients.csv").open()))
    assert [float(row["weight"]) for row in rows] == pytest.approx(mean)
    assert rows[2]["n_validation"] == "0"  # it measured nothing after round 2
    assert any("of 2 of 3 clients" in why for why in summary_of(out)["why"])

    drawn = page([read_run(out)])
    assert "the disk is on fire" in drawn
    command = "fedshift deploy server /f --host h --port 1 --patience 5 --timeout 7"
    assert command in drawn
    assert perform(app, ["run", "--resume", str(out)]) == 2
    assert f"`{command} --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_the_audit_reads_what_clients_registered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Client 0 claims a single label, and client 1 a size that differs from its data."""
    shift = {"kind": "dirichlet-per-client", "beta": 1.0, "clients": 12}
    text, out = dumps(config_of(shift=shift)), tmp_path / "run"
    serve(dealt(text, 12), text, out, site=CHOICES[SITE])
    facts = json.loads((out / "deployment.json").read_text())
    sizes = list(facts["registered"]["n"])
    facts["registered"]["labels"][0] = [sizes[0], *[0] * 9]
    facts["registered"]["n"][1] = 10**9
    audit = ["audit", "marginals", str(out), "--format", "json"]
    assert perform(app, audit) == 0
    honest = json.loads(capsys.readouterr().out)
    (out / "deployment.json").write_text(json.dumps(facts))
    assert perform(app, audit) == 0
    lying = json.loads(capsys.readouterr().out)
    assert honest["sizes"] == []
    assert lying["sizes"] == [{"client": 1, "registered": 10**9, "dealt": sizes[1]}]
    verdicts = [report["clients"][0]["verdict"] for report in (honest, lying)]
    assert verdicts == ["consistent", "inconsistent"]

    (out / "deployment.json").write_text(json.dumps(facts | {"dealt": False}))
    assert perform(app, audit) == 2
    del facts["registered"]["labels"]
    (out / "deployment.json").write_text(json.dumps(facts))
    assert perform(app, audit) == 2


class Slow(LocalGrid):
    """Client 3 fails at once, and the others answer when pulled again; 4 is missing.

    `code` is Flower's error for 4. `reported` are the drop-outs that the server reports, `early`
    those before the second pull.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.reported: list[tuple[int, str]] = []
        self.early: list[tuple[int, str]] = []
        self.code = ErrorCode.NODE_UNAVAILABLE

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = list(messages)
        names = list(self.push_messages(sent))
        if sent[0].metadata.message_type != "train":
            return list(self.pull_messages(names))
        by_node = {m.metadata.dst_node_id: (n, m) for n, m in zip(names, sent, strict=True)}
        name, message = by_node[1021]
        self.to_pull[name] = Message(Error(2, "the disk is on fire"), reply_to=message)
        first = list(self.pull_messages([name]))
        self.early = list(self.reported)
        name, message = by_node[1028]
        gone = Message(Error(self.code, "not available"), reply_to=message)
        message.metadata.__dict__["_message_id"] = "sent to 4"
        gone.metadata.__dict__.update(_src_node_id=1, _reply_to_message_id="sent to 4")
        self.to_pull[name] = gone
        rest = [n for n in names if n != by_node[1021][0]]
        return first + list(self.pull_messages(rest))


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (ErrorCode.NODE_UNAVAILABLE, "lost", "its node is no longer connected"),
        # A SuperNode that was killed and is back has not answered what it took before.
        (ErrorCode.MESSAGE_UNAVAILABLE, "timeout", "no answer in time"),
        (ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "timeout", "no answer in time"),
    ],
)
def test_a_failure_is_reported_while_others_are_working(
    mlp: Any, setting: Setting, code: int, kind: str, reason: str
) -> None:
    algorithm, federation = MAKE["fedavg"](setting), make_federation(mlp)
    grid = Slow(client_app(sites(algorithm, federation)), len(SIZES))
    grid.code = code
    strategy = strategy_of(
        algorithm, federation, dropping=lambda t, one: grid.reported.append((one.client, one.kind))
    )
    overhear(grid, strategy.hear)
    (played,) = play(strategy, grid, 1)
    assert grid.early == [(3, "error")]
    assert grid.reported == [(3, "error"), (4, kind)]
    assert played.dropped == ((3, "the disk is on fire", "error"), (4, reason, kind))
    assert strategy.traffic.clients == len(SIZES) - 2
    down, _ = strategy.traffic.each()
    whole = strategy_of(algorithm, federation)
    list(play(whole, LocalGrid(client_app(sites(algorithm, federation)), len(SIZES)), 1))
    assert down == whole.traffic.each()[0]  # the mean over those that answered
