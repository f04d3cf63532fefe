"""Clients that answer too late, and those that are asked again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.engine.backends import ClientUpdate, Job, Reply
from fedshift.engine.checks.gate import Gate
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Federation, Round, play_round, run, start
from fedshift.errors import InputError, TrainingError
from fedshift.experiments.engines import InProcess, backend_of, processes
from fedshift.experiments.experiment import run_experiment
from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play
from fedshift.flower.rounds import answered
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from support.federations import SIZES, make_federation
from support.fuzz import different
from support.odd_work import Once, asleep, killed
from support.small_runs import config_of


def terminated(flag: Path | None = None) -> None:
    """Terminate this process; where there is a flag, the next one as well."""
    if flag is not None:
        flag.unlink()
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def setting(mlp: Model) -> Setting:
    return Setting(mlp, (0.2,) * 5, Local(lr=0.1, epochs=None, steps=1, batch=8))


@pytest.fixture
def federation(mlp: Model) -> Federation:
    return replace(make_federation(mlp), gate=Gate(on_bad="drop"))


def played(
    federation: Federation, algorithm: Any, once: Callable[[ClientUpdate], Once], **limits: Any
) -> list[Round]:
    """Two rounds by two workers."""
    with workers(federation.clients, 2, **limits) as team:

        def backend(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
            return team(once(update), jobs)

        return list(run(algorithm, federation, 2, backend=backend))


@pytest.mark.slow
def test_a_late_client_drops_out(setting: Setting, federation: Federation, tmp_path: Path) -> None:
    """The round has the others alone, and the next round has all clients."""
    algorithm = recipes.scaffold(setting)
    first, second = played(
        federation, algorithm, lambda update: Once(update, tmp_path / "flag", asleep), deadline=3.0
    )
    assert first.dropped == ((3, "no answer in time", "timeout"),)
    assert second.dropped == ()
    server = start(algorithm, federation).server
    others, everyone = torch.tensor([0, 1, 2, 4, 5]), torch.arange(len(SIZES))
    here = play_round(algorithm, federation, server, {}, others, 1)
    assert different(first.server, here.server) == []
    again = play_round(algorithm, federation, here.server, here.states, everyone, 2)
    assert different(second.server, again.server) == []
    assert different(first.server, next(run(algorithm, federation, 1)).server)  # the control


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(
    setting: Setting, federation: Federation, tmp_path: Path
) -> None:
    algorithm = recipes.scaffold(setting)
    once = lambda update: Once(update, tmp_path / "flag", killed)  # noqa: E731
    rounds = played(federation, algorithm, once, retries=1)
    whole = list(run(algorithm, federation, 2))
    assert different(rounds[-1].server, whole[-1].server) == []
    assert rounds[0].dropped == ()
    (tmp_path / "flag").unlink()
    with pytest.raises(TrainingError, match="trained client 3 ended without an answer, exit code"):
        played(federation, algorithm, once)


@pytest.mark.slow
def test_a_signal_to_all_processes_is_the_main_ones(
    setting: Setting, federation: Federation, tmp_path: Path
) -> None:
    """`systemctl stop` sends it: new processes finish the round, without retries."""
    algorithm = recipes.fedavg(setting)
    rounds = played(federation, algorithm, lambda u: Once(u, tmp_path / "flag", terminated))
    assert (tmp_path / "flag").exists()
    assert rounds[0].dropped == ()
    assert different(rounds[-1].server, list(run(algorithm, federation, 2))[-1].server) == []
    (tmp_path / "flag").unlink()
    again = partial(terminated, tmp_path / "flag")
    with pytest.raises(TrainingError, match="trained client 3 ended without an answer"):
        played(federation, algorithm, lambda u: Once(u, tmp_path / "flag", again))


@pytest.mark.parametrize("limits", [{"deadline": 0.0}, {"retries": -1}])
def test_limits_out_of_range(limits: dict[str, Any], federation: Federation) -> None:
    with (
        pytest.raises(InputError, match="allowed: deadline > 0, retries >= 0"),
        workers(federation.clients, 1, **limits),
    ):
        pass


@pytest.mark.slow
def test_nothing_ends_a_client_in_this_process() -> None:
    training = {"rounds": 1, "steps": 1, "on_bad_reply": "drop", "deadline": 60.0, "retries": 1}
    config = config_of("fedavg", training=training)
    for engine in (InProcess(), backend_of("stacked"), backend_of("auto")):
        with pytest.raises(InputError, match="training.deadline needs clients in processes of th"):
            run_experiment(config, engine=engine)
    params = run_experiment(config, engine=processes(1)).outcome.params
    plain = {"deadline": None, "retries": 0}
    usual = run_experiment(config_of("fedavg", training=training | plain))
    assert different({"params": params}, {"params": usual.outcome.params}) == []


@pytest.mark.slow
def test_no_client_is_asked_again_in_this_process() -> None:
    config = config_of("fedavg", training={"rounds": 1, "steps": 1, "retries": 2})
    for engine in (InProcess(), backend_of("stacked"), backend_of("dense")):
        with pytest.raises(InputError, match="training.retries = 2 asks clients again whose proc"):
            run_experiment(config, engine=engine)
    assert run_experiment(config, engine=backend_of("dense", 1)).outcome.final.round == 1


def over(algorithm: Any, federation: Federation, failing: dict[int, int], **more: Any) -> Any:
    """(rounds on Flower, messages sent) where client i fails in its first failing[i] attempts."""
    clients: list[int] = []

    def site(i: int) -> Site:
        clients.append(i)
        if clients.count(i) <= failing.get(i, 0) + 1 and clients.count(i) > 1:  # it registers first
            raise OSError("the disk of this client is asleep")
        return Site(algorithm, federation.clients[i], federation.seeds.batch)

    strategy = AlgorithmStrategy(
        algorithm, clients=len(SIZES), classes=5, seeds=Seeds.of(0), timeout=60.0, **more
    )
    return list(play(strategy, LocalGrid(client_app(site), len(SIZES)), 2)), clients


def test_flower_asks_failed_clients_again(setting: Setting, federation: Federation) -> None:
    algorithm = recipes.scaffold(setting)
    rounds, clients = over(algorithm, federation, {2: 1, 4: 3}, retries=2)
    assert [[one.client for one in r.dropped] for r in rounds] == [[4], []]
    assert rounds[0].dropped[0].reason.endswith("the disk of this client is asleep")
    assert [clients.count(i) for i in range(6)] == [3, 3, 4, 3, 5, 3]
    once, _ = over(algorithm, federation, {2: 1, 4: 3})
    assert [one.client for one in once[0].dropped] == [2, 4]


def test_a_round_is_not_trained_twice(setting: Setting, federation: Federation) -> None:
    """The answer was lost: the client's state has moved, and must not move again."""
    for method, refused in ((recipes.scaffold, True), (recipes.fedavg, False)):
        algorithm = method(setting)
        grid = LocalGrid(
            client_app(lambda i, a=algorithm: Site(a, federation.clients[i])), len(SIZES)
        )
        strategy = AlgorithmStrategy(algorithm, clients=len(SIZES), classes=5, seeds=Seeds.of(0))
        for attempt in range(2):
            sent = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
            replies = answered(grid, sent, 60.0, 0)
            failures = [r.content.config_records.get("failure") for r in replies]
            reasons = [str(one["reason"]) for one in failures if one is not None]
            assert len(reasons) == (len(SIZES) if refused and attempt else 0), reasons
            assert all("round 1 was trained here before" in why for why in reasons)


def test_limits_of_the_strategy(setting: Setting) -> None:
    with pytest.raises(InputError, match="timeout=0.0, retries=0; allowed: timeout > 0"):
        AlgorithmStrategy(recipes.fedavg(setting), clients=6, classes=5, timeout=0.0)
