"""A federation of real processes on loopback: TLS, a key per client. Minutes, so slow.

One SuperLink and three SuperNodes for all of these tests, in this order: the last one kills a
SuperNode.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from fedshift.engine.run import play_round, run, start
from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, load_config, validate
from fedshift.experiments.experiment import record
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.on_flower import built_from
from fedshift.experiments.task.preparing import prepare
from fedshift.tree import flatten
from fedshift_deploy.keys import write_client_key
from support.loopback import Loopback, gone, loopback, processes

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "loopback" / "experiment.toml"
FILES = (
    "summary.json", "model.safetensors", "metrics.csv", "clients.csv", "lock.json",
    "config.resolved.toml",
)  # fmt: skip
PRIVATE_SETS = (
    "shift.kind=label-sets", "shift.samples=300", "shift.target=union", "server.unlabeled=100",
    "method.mode=private", "method.tune=mse", "data.validation=0",
)  # fmt: skip
# Personal models, messages before round 1, and SCAFFOLD's control variates on private label sets.
METHODS: dict[str, tuple[str, ...]] = {
    "ditto": (),
    "feddisk": ("method.density_rounds=1", "training.rounds=3"),
    "labelset_scaffold": PRIVATE_SETS,
}
# What only clients have after a run, of networks that a run folder of a deployment has not.
KEEPS = (
    "method.name=feddrm", "model.name=mlp-projected", "shift.kind=iid", "shift.target=clients",
    "shift.labels_per_client=", "data.limit=600",
)  # fmt: skip


def experiment(*changes: str) -> str:
    """The example's TOML with few steps and these changes.

    Every message starts a process of seconds at each client, also for an evaluation.
    """
    short = ["training.rounds=2", "training.steps=3", "training.evaluate_every=2", *changes]
    return dumps(load_config(EXAMPLE, short))


def in_process(text: str, folder: Path) -> Path:
    config = validate(tomllib.loads(text), text=text)
    folder.mkdir()
    record(folder, config, prepare(config), ignore_event)
    return folder


def odd(here: Path, there: Path) -> list[str]:
    """The files in which two run folders differ."""
    return [f for f in FILES if (here / f).read_bytes() != (there / f).read_bytes()]


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    folder = tmp_path_factory.mktemp("loopback") / "federation"
    with loopback(folder, experiment(), 3) as made:
        yield made
    assert gone(str(folder)), processes(str(folder))


def test_fewer_clients_than_expected(fed: Loopback, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^0 of 3 clients are connected after 1 s; start the oth"):
        fed.play(tmp_path / "run", patience=1.0)


def test_a_key_that_the_server_does_not_know(fed: Loopback, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(fed.place(0), stranger)
    for name in ("key", "key.pub"):
        (stranger / name).unlink()
    write_client_key(stranger / "key")
    process = fed.joining(stranger, "--patience", "1")
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert "does not let this client in" in errors
    assert errors.splitlines()[-1].startswith("error: ") or "for 1 s now" in errors
    for client in range(3):
        fed.join(client)


@pytest.mark.parametrize("name", METHODS)
def test_the_run_folder_of_one_process(name: str, fed: Loopback, tmp_path: Path) -> None:
    text = experiment(f"method.name={name}", *METHODS[name])
    fed.play(tmp_path / "there", experiment=text)
    assert odd(in_process(text, tmp_path / "here"), tmp_path / "there") == []
    if name == "ditto":
        other = in_process(experiment(f"method.name={name}", "seeds.run=4"), tmp_path / "other")
        assert "model.safetensors" in odd(other, tmp_path / "there")


def test_what_clients_keep(fed: Loopback, tmp_path: Path) -> None:
    """FedDRM: the server's parts and every client's, tensor by tensor."""
    text = experiment(*KEEPS)
    fed.play(tmp_path / "run", experiment=text, plan="states")
    there = load_file(tmp_path / "run" / "states.safetensors")
    algorithm, federation, _ = built_from(text)
    *_, last = run(algorithm, federation, 2)
    states = {f"client {i} {part}": v for i, s in last.states.items() for part, v in s.items()}
    here = flatten(last.server | states)
    assert here.keys() == there.keys()
    assert [k for k, v in here.items() if not v.equal(there[k])] == []
    assert any(k.startswith("client 2 ") for k in here)


def test_another_model_and_other_classes(fed: Loopback, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="client 1 has another model than the server"):
        fed.play(tmp_path / "model", site="support.deployed_apps:other_network")
    with pytest.raises(InputError, match="client 1 has label 10, and the server expects 10 class"):
        fed.play(tmp_path / "classes", site="support.deployed_apps:other_classes")


def test_clients_that_fail_and_one_that_is_killed(fed: Loopback, tmp_path: Path) -> None:
    """One client raises, sends NaN, misses the deadline; then another's SuperNode is killed."""
    text = experiment("training.rounds=8", "method.ess=0.9", "training.evaluate_every=8")
    killed = []

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 5:
            killed.append(fed.node(2))
            os.kill(killed[0], signal.SIGKILL)

    # Three times what a round takes on an idle machine; longer on a busy one.
    timeout, fed.heard = max(20.0, 2 * fed.slowest) if fed.slowest else 90.0, kill
    # Client 2 takes its time in round 6: it must not have answered before it is killed.
    plan = f"raise 1 1;nan 2 1;hang-{timeout + 5:g} 3 1;hang-{timeout / 2:g} 6 2"
    fed.play(tmp_path / "run", experiment=text, plan=plan, timeout=timeout)
    rounds = {e["round"]: e for e in fed.events if e["event"] == "round"}
    reasons = {
        t: {d["client"]: d["reason"] for d in e.get("dropped", [])} for t, e in rounds.items()
    }
    assert reasons[1].keys() == {1}
    assert reasons[1][1].endswith("the disk is on fire")
    assert "non-finite numbers" in reasons[2][1]
    assert reasons[3] == {1: "no answer in time"}
    assert rounds[5]["clients"] == [0, 1, 2]  # it is back, and 2 has weight
    assert killed
    away = [t for t in range(6, 9) if reasons[t]]
    # `deploy client` joins again by itself: sooner or later, as the machine is idle or busy.
    assert away
    assert away[0] in (6, 7)  # a busy machine may kill it late
    assert away == list(range(away[0], away[0] + len(away)))
    assert all(reasons[t].keys() == {2} for t in away)
    check_drop_outs(fed, tmp_path / "run", rounds)
    check_rounds(text, rounds, tmp_path / "run")
    printed, code = fed.leave(2)
    assert printed.count("was ended by signal 9, perhaps for lack of memory; joining again") == 1
    assert code == 143


def check_drop_outs(fed: Loopback, folder: Path, rounds: dict[int, dict[str, Any]]) -> None:
    """Each is reported before its round ends, is in the server's log, and changes the weights."""
    order = [e for e in fed.events if e["event"] in ("dropped", "round")]
    drops = [(e["round"], e["client"], e["kind"]) for e in order if e["event"] == "dropped"]
    assert drops[:3] == [(1, 1, "error"), (2, 1, "reply"), (3, 1, "timeout")]
    # On a busy machine, client 1 may still be asleep when round 4 asks it.
    later = [one for one in drops[3:] if one != (4, 1, "timeout")]
    assert [one for one in later if one[1] != 2 or one[2] not in ("lost", "timeout")] == []
    for t, client, _ in drops:
        ended = order.index(rounds[t])
        assert [e for e in order[:ended] if (e["round"], e.get("client")) == (t, client)]
    log = (fed.folder / "superlink.log").read_text()
    assert "WARN [fedshift] round 1: client 1 dropped out (error): " in log
    mean = [0.0, 0.0, 0.0]
    for event in rounds.values():
        ids = event.get("cohort", [0, 1, 2])
        # A round of all has the weights of every such round, which its event need not say.
        for i, weight in zip(ids, event.get("weights", whole_weights(folder)), strict=True):
            mean[i] += weight / len(rounds)
    rows = list(csv.DictReader((folder / "clients.csv").open()))
    assert [float(row["weight"]) for row in rows] == pytest.approx(mean)


def whole_weights(folder: Path) -> list[float]:
    """The weights over all clients."""
    algorithm, federation, _ = built_from((folder / "config.resolved.toml").read_text())
    everyone = torch.arange(3)
    first = play_round(algorithm, federation, start(algorithm, federation).server, {}, everyone, 1)
    return [float(w) for w in first.weights]


def check_rounds(text: str, rounds: dict[int, dict[str, Any]], folder: Path) -> None:
    """Every round is that of the clients present, reweighed; their mixture's gap is recorded."""
    algorithm, federation, prepared = built_from(text)
    server, share = start(algorithm, federation).server, federation.table["labels"]
    share = share / federation.table["n"][:, None]
    for t, event in rounds.items():
        ids = torch.tensor(event["clients"])
        played = play_round(algorithm, federation, server, {}, ids, t)
        server = played.server
        gap = float((prepared.task.target - played.weights @ share[ids]).norm())
        if "dropped" in event:
            assert math.isclose(event["gap"], gap, rel_tol=1e-12)
            assert len(ids) == 3 - len(event["dropped"])
    saved = load_file(folder / "model.safetensors")
    assert all(saved[f"params/{k}"].equal(v) for k, v in server["params"].items())
    everyone = torch.arange(3)
    one = play_round(algorithm, federation, start(algorithm, federation).server, {}, everyone, 1)
    assert not saved["params/head.weight"].equal(one.server["params"]["head.weight"])


def test_two_nodes_of_one_partition(fed: Loopback, tmp_path: Path) -> None:
    fed.leave(0)
    if 2 in fed.clients:
        fed.leave(2)
    about = fed.place(0) / "client.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"partition": 1}))
    fed.join(0)
    fed.join(2)
    with pytest.raises(InputError, match="it has the key of client-0 and says that it is client 1"):
        fed.play(tmp_path / "run", patience=180.0)
