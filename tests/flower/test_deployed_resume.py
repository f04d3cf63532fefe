"""After a kill of the server a federation's run goes on from the states on its clients' disks."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import SIZES, make_federation
from support.small_runs import files_of, text_of

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Message

from fedshift.engine.run import Federation, Round, run
from fedshift.engine.storage.checkpoint import read_checkpoint, write_checkpoint
from fedshift.errors import DataError, InputError
from fedshift.experiments.on_flower import configured_site
from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play
from fedshift.flower.client import partition
from fedshift.flower.kept import Kept, folder_of
from fedshift.seeds import Seeds
from fedshift_deploy.command import unfinished
from support.federation_grid import Dies, here, serve
from support.fuzz import different

ROUNDS = 5


class Mortal(LocalGrid):
    """A grid whose server dies while round `last` is under way, before or after it was trained.

    Each is a run of Flower's of its own.
    """

    runs = count(1)

    def __init__(self, app: Any, clients: int, last: int, trained: bool) -> None:
        super().__init__(app, clients)
        self.last, self.trained, number = last, trained, next(self.runs)
        for context in self.contexts.values():
            context.run_id = number

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        t = [m.content["run"]["round"] for m in sent if m.metadata.message_type == "train"]
        dies = bool(t) and t[0] == self.last
        if dies and not self.trained:
            raise Dies
        replies = list(super().send_and_receive(sent, timeout=timeout))
        if dies:
            raise Dies
        return replies


NAME = "0123456789abcdef" * 2


def over(
    algorithm: Any, federation: Federation, last: int = 0, after: Round | None = None,
    keep: Path | None = None, trained: bool = False,
) -> list[Round]:  # fmt: skip
    """Rounds on new nodes that have only the folder `keep`, until the server dies in `last`."""

    def site(i: int) -> Site:
        return Site(algorithm, federation.clients[i], federation.seeds.batch)

    strategy = AlgorithmStrategy(
        algorithm, clients=len(federation.clients), classes=5, seeds=Seeds.of(0), cohort=4,
        after=after, name=NAME if keep else "",
    )  # fmt: skip
    grid = Mortal(_own(site, keep), len(SIZES), last, trained)
    played: list[Round] = []
    with suppress(Dies):
        for one in play(strategy, grid, ROUNDS):
            played.append(one)
    return played


def _own(site: Any, keep: Path | None) -> Any:
    """A client app, of which every node has a folder of its own."""
    if keep is None:
        return client_app(site)
    apps = [client_app(site, keep=keep / str(i)) for i in range(len(SIZES))]
    return lambda message, context: apps[partition(context)](message, context)


@pytest.mark.few(1)
@pytest.mark.parametrize("trained", [False, True], ids=["before", "after it was trained"])
@pytest.mark.parametrize(
    "name", ["fedavg", "fedpals", "feddyn", "scaffold", "ditto", "moon", "fedala", "fedpac"]
)
def test_the_rest_of_a_run(name: str, trained: bool, setting: Setting, tmp_path: Path) -> None:
    """From a checkpoint, on nodes with only their folders: the result of an uninterrupted run."""
    federation = make_federation(setting.model)
    algorithm = MAKE[name](setting)
    (*_, whole) = run(algorithm, federation, ROUNDS, cohort=4)
    rest: list[Round] = []
    for last in (3, 4, 0):  # killed twice: what the first run trained and lost is not in the way
        rest += over(algorithm, federation, last, rest[-1] if rest else None, tmp_path, trained)
        write_checkpoint(tmp_path / "server", rest[-1], {})
        saved = read_checkpoint(tmp_path / "server")
        assert saved is not None
        rest[-1] = saved.round
    assert [one.t for one in rest] == [1, 2, 3, 4, 5]
    assert different(rest[-1].server, whole.server) == []
    for i, state in whole.states.items():
        if any(state.values()):
            recalled = Kept(tmp_path / str(i) / NAME, i, -1, ROUNDS).recall()
            assert recalled is not None
            assert different(recalled, state) == []


def test_without_a_folder_it_differs(setting: Setting) -> None:
    federation, algorithm = make_federation(setting.model), MAKE["scaffold"](setting)
    (*_, whole) = run(algorithm, federation, ROUNDS, cohort=4)
    *_, second = over(algorithm, federation, 3)
    assert second.t == 2
    *_, rest = over(algorithm, federation, 0, second)
    assert different(rest.server, whole.server)


def test_what_a_client_kept(tmp_path: Path) -> None:
    """The last valid round is read; rounds that the server lost are removed; damage is reported."""
    folder = folder_of(tmp_path, NAME)
    old, new = Kept(folder, 3, run=1, after=0), Kept(folder, 3, run=2, after=4)
    assert old.recall() is None
    for t in (2, 4, 5):
        old.remember({"control": {"w": torch.full((2,), float(t))}}, t)
    assert old.recall() == {"control": {"w": pytest.approx(torch.full((2,), 5.0))}}
    recalled = new.recall()
    assert recalled is not None
    assert recalled["control"]["w"].tolist() == [4.0, 4.0]
    assert [p.name for p in folder.iterdir()] == ["round-00000004"]
    new.remember({"control": {"w": torch.zeros(2)}}, 6)
    assert new.recall() is not None
    assert Kept(folder, 3, run=3, after=3).recall() is None  # of a run that never came so far
    new.remember({}, 7)
    (folder / "round-00000007" / "round.json").write_text("{}")
    with pytest.raises(DataError, match=r"round-00000007.*damaged"):
        new.recall()


@pytest.mark.parametrize("name", ["../" * 8 + "etc", "", "A" * 32, "0" * 31, "0" * 32 + "\n"])
def test_a_name_never_leaves_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no name of a run"):
        folder_of(tmp_path, name)


def test_other_counts_are_another_federation(setting: Setting) -> None:
    algorithm, federation = MAKE["fedpals"](setting), make_federation(setting.model)
    *_, first = over(algorithm, federation, 2)
    clients = list(federation.clients)
    clients[2] = clients[2]._replace(x=clients[2].x[:-1], y=clients[2].y[:-1], w=clients[2].w[:-1])
    fewer = make_federation(setting.model, tuple(clients))
    with pytest.raises(DataError, match=r'client \d registered another "labels"'):
        over(algorithm, fewer, 0, first)


def served(text: str, out: Path, last: int = 0) -> None:
    """The deployed app's server, with new clients that have only their folders."""
    serve(
        Mortal(_own(partial(configured_site, text), out.parent / "nodes"), 3, last, True), text, out
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedpals", "scaffold", "labelset_ditto"])
def test_the_deployed_app_goes_on(method: str, tmp_path: Path) -> None:
    text = text_of(method)
    with pytest.raises(Dies):
        served(text, tmp_path / "run", last=4)
    assert unfinished(tmp_path / "run", None) == tmp_path / "run"
    served(text, tmp_path / "run")
    log = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"after": 3' in log
    alone = files_of(here(text, tmp_path / "here"))
    assert files_of(tmp_path / "run") == alone
    with pytest.raises(InputError, match="this run is complete"):
        unfinished(tmp_path / "run", None)
    served(text, tmp_path / "run-2")  # another run of the same federation starts from nothing
    assert files_of(tmp_path / "run-2") == alone


@pytest.mark.slow
def test_there_may_be_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(Dies):
        served(text_of("scaffold"), tmp_path / "run", last=1)
    with pytest.raises(InputError, match="no checkpoint"):
        unfinished(tmp_path / "run", None)
    with pytest.raises(InputError, match="leave out --out"):
        unfinished(tmp_path / "run", tmp_path)
