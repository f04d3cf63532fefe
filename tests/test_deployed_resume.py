"""A federation whose server was killed: the run goes on where clients keep nothing."""

from __future__ import annotations

import os
import signal
import time
import tomllib
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import SIZES, Setting, make_federation
from every_method import MAKE

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Message

from fedshift.cli.deploy import _unfinished
from fedshift.engine.checkpoint import read_checkpoint, write_checkpoint
from fedshift.engine.rounds import Federation, Round, first_state, run
from fedshift.errors import DataError, InputError
from fedshift.experiments import deployed
from fedshift.experiments.folder import record
from fedshift.experiments.load import dumps, validate
from fedshift.experiments.on_flower import configured_site
from fedshift.experiments.task import prepare
from fedshift.experiments.training import silent
from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play
from fedshift.seeds import Seeds
from fedshift.testing.fuzz import different

ROUNDS = 5


def over(
    algorithm: Any, federation: Federation, rounds: int, after: Round | None = None
) -> list[Round]:
    """Rounds on nodes that have nothing of before."""

    def site(i: int) -> Site:
        return Site(algorithm, federation.clients[i], federation.seeds.batch)

    strategy = AlgorithmStrategy(
        algorithm, clients=len(federation.clients), classes=5, seeds=Seeds.of(0), cohort=4,
        after=after,
    )  # fmt: skip
    return list(islice(play(strategy, LocalGrid(client_app(site), len(SIZES)), ROUNDS), rounds))


@pytest.mark.parametrize("name", ["fedavg", "fedpals", "feddyn"])
def test_the_rest_of_a_run(name: str, setting: Setting, tmp_path: Path) -> None:
    """From a checkpoint, with new nodes; FedDyn's clients keep something, and it differs."""
    federation = make_federation(setting.model)
    algorithm = MAKE[name](setting)
    (*_, whole) = run(algorithm, federation, ROUNDS, cohort=4)
    *_, second = over(algorithm, federation, 2)
    write_checkpoint(tmp_path, second, {})
    saved = read_checkpoint(tmp_path)
    assert saved is not None
    rest = over(algorithm, federation, ROUNDS, saved.round)
    assert [one.t for one in rest] == [3, 4, 5]
    kept = any(first_state(algorithm, federation, 0).values())
    assert kept == (name == "feddyn")
    assert bool(different(rest[-1].server, whole.server)) == kept


# Methods with a router need networks with one.
@pytest.mark.parametrize("name", [name for name in MAKE if "feddrm" not in name])
def test_who_keeps_nothing_at_first_never_does(name: str, setting: Setting) -> None:
    """So the first state says whether a run can go on without its clients' states."""
    federation = make_federation(setting.model)
    algorithm = MAKE[name](setting)
    if any(first_state(algorithm, federation, 0).values()):
        return
    (*_, last) = run(algorithm, federation, 2)
    assert not any(tree for state in last.states.values() for tree in state.values())


def test_other_counts_are_another_federation(setting: Setting) -> None:
    algorithm, federation = MAKE["fedpals"](setting), make_federation(setting.model)
    *_, first = over(algorithm, federation, 1)
    clients = list(federation.clients)
    clients[2] = clients[2]._replace(x=clients[2].x[:-1], y=clients[2].y[:-1], w=clients[2].w[:-1])
    fewer = make_federation(setting.model, tuple(clients))
    with pytest.raises(DataError, match='clients registered another "labels" than when this run'):
        over(algorithm, fewer, ROUNDS, first)


def text_of(method: str) -> str:
    options = {"ess": 0.9} if method == "fedpals" else {}
    config = validate({
        "name": "run", "data": {"name": "fashion-mnist-mini"},
        "shift": {"kind": "sparsity", "labels_per_client": 3, "clients": 3},
        "model": {"name": "linear"}, "method": {"name": method, **options},
        "training": {"rounds": ROUNDS, "steps": 2, "evaluate_every": 2, "lr": 0.05},
    })  # fmt: skip
    return dumps(config)


class Dies(BaseException):
    """What nothing catches."""


class Mortal(LocalGrid):
    """A grid whose server dies while round `last` is under way."""

    last = 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        asked = list(messages)
        t = [m.content["run"]["round"] for m in asked if m.metadata.message_type == "train"]
        if t and t[0] == self.last:
            raise Dies
        return list(super().send_and_receive(asked, timeout=timeout))


def served(text: str, out: Path, last: int = 0) -> None:
    """The deployed app's server, over clients that have nothing of before."""
    grid = Mortal(client_app(partial(configured_site, text)), 3)
    grid.last = last
    given = {"experiment": text, "out": str(out), "patience": 60.0, "timeout": 60.0}
    deployed.server_app(grid, SimpleNamespace(run_config=given))  # type: ignore[arg-type]


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in folder.iterdir() if p.is_file() and p.name != "events.jsonl")
    return {p.name: p.read_bytes() for p in found}


def in_process(text: str, folder: Path) -> Path:
    folder.mkdir()
    config = validate(tomllib.loads(text), text=text)
    record(folder, config, prepare(config), silent)
    return folder


def test_the_deployed_app_goes_on(tmp_path: Path) -> None:
    text = text_of("fedpals")
    with pytest.raises(Dies):
        served(text, tmp_path / "run", last=4)
    assert _unfinished(tmp_path / "run", None) == tmp_path / "run"
    served(text, tmp_path / "run")
    told = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"after": 3' in told
    here = in_process(text, tmp_path / "here")
    assert files(tmp_path / "run") == files(here)
    with pytest.raises(InputError, match="this run is complete"):
        _unfinished(tmp_path / "run", None)


def test_where_clients_keep_something_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(Dies):
        served(text_of("scaffold"), tmp_path / "run", last=4)
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(InputError, match="no checkpoint: .* clients of this method keep something"):
        _unfinished(tmp_path / "run", None)
    with pytest.raises(InputError, match="leave out --out"):
        _unfinished(tmp_path / "run", tmp_path)


@pytest.mark.slow
def test_kill_9_of_the_server_process(tmp_path: Path) -> None:
    """Real processes: what runs the server's part is killed in round 3, and started again."""
    from loopback import loopback, processes

    text = text_of("fedpals")
    killed: list[int] = []

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2 and not killed:
            here = processes(f"127.0.0.1:{fed.port}").items()  # not another federation's
            killed.extend(pid for pid, args in here if "flwr-serverapp" in args)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    with loopback(tmp_path / "federation", text, 3) as fed:
        for client in range(3):
            fed.join(client)
        fed.heard = kill
        with pytest.raises(Exception, match="the run finished"):
            fed.play(tmp_path / "run")
        assert killed
        began = time.monotonic()
        fed.play(tmp_path / "run")
        assert fed.events[0]["after"] >= 2
        print(f"{time.monotonic() - began:.0f} s, after round {fed.events[0]['after']}")
    assert files(tmp_path / "run") == files(in_process(text, tmp_path / "here"))
    assert torch.get_num_threads() == 1
