"""Private label sets on Flower: the engine's messages, and no other with rows of the head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import Examples
from fedshift.engine.backends import Job, Reply, loop
from fedshift.engine.run import Federation, run
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from fedshift.tree import Parts, flatten

pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
from flwr.app import Message

from fedshift.errors import InputError
from fedshift.flower import LocalGrid, client_app, play
from fedshift.flower.records import parts_of
from support.federations import CLASSES, SIZES, TARGET
from support.flower_runs import sites, strategy_of

Heard = dict[tuple[int, int], tuple[Parts, Parts]]
ROUNDS = 3


class Tapped(LocalGrid):
    """A grid that records messages: (kind, round, client) -> both directions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard: dict[tuple[str, int, int], tuple[Message, Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        names = list(super().push_messages(sent))
        for name, message in zip(names, sent, strict=True):
            node = message.metadata.dst_node_id
            client = int(self.contexts[node].node_config["partition-id"])
            t = int(message.content["run"]["round"]) if "run" in message.content else 0
            self.heard[message.metadata.message_type, t, client] = message, self.to_pull[name]
        return names


def by_engine(algorithm: Any, federation: Federation) -> Heard:
    messages: Heard = {}

    def tapped(update: Any, jobs: Iterable[Job]) -> Any:
        for job in jobs:
            (reply,) = loop(update, [job])
            assert isinstance(reply, Reply)
            messages[job.t, job.client] = (job.message, reply.update)
            yield reply

    list(run(algorithm, federation, ROUNDS, cohort=4, backend=tapped))
    return messages


def odd(a: Parts, b: Parts) -> list[str]:
    x, y = flatten(a), flatten(b)
    return [k for k in x.keys() | y.keys() if k not in x or k not in y or not x[k].equal(y[k])]


@pytest.mark.parametrize("name", ["labelset_fedavg", "labelset_scaffold"])
def test_messages_are_the_engines(name: str, mlp: Model, federated: Any) -> None:
    """Bit for bit, in both directions, in every round; no other message has a tensor."""
    setting = Setting(mlp, TARGET, Local(lr=0.1, epochs=1, batch=16))
    algorithm, federation = getattr(recipes, name)(setting), federated()
    grid = Tapped(client_app(sites(algorithm, federation)), len(SIZES))
    list(play(strategy_of(algorithm, federation, cohort=4), grid, ROUNDS))
    here = by_engine(algorithm, federation)
    there = {
        (t, i): (parts_of(down.content), parts_of(up.content))
        for (kind, t, i), (down, up) in grid.heard.items()
        if kind == "train"
    }
    assert here.keys() == there.keys()
    assert len(here) == 4 * ROUNDS
    assert [k for k in here for pair in zip(here[k], there[k], strict=True) if odd(*pair)] == []
    rest = [pair for key, pair in grid.heard.items() if key[0] != "train"]
    assert len(rest) == len(SIZES)  # registrations
    assert not any(down.content.array_records for down, _ in rest)
    # The control: another batch order is another message.
    other = by_engine(algorithm, replace(federation, seeds=Seeds(batch=1)))
    assert all(odd(here[k][1], other[k][1]) for k in here.keys() & other.keys())


@pytest.mark.parametrize("mode", ["private", "public"])
def test_no_client_is_sent_whole_heads(mode: Any, mlp: Model, federated: Any) -> None:
    """Scores and sums of the server's model are refused before a message goes out."""
    federation = federated()
    setting = Setting(mlp, TARGET, Local(lr=0.1, steps=1))
    algorithm = recipes.labelset_fedavg(setting, mode=mode)
    site, x = sites(algorithm, federation), federation.clients[0].x[:2]
    app = client_app(lambda i: replace(site(i), validation=Examples(x, torch.arange(2))))
    grid = Tapped(app, len(SIZES))
    given = {} if mode == "private" else {"evaluates": lambda t: True}
    strategy = strategy_of(algorithm, federation, **given)
    if mode == "private":
        with pytest.raises(InputError, match="are sent all of them; score it on the server"):
            strategy_of(algorithm, federation, evaluates=lambda t: True)
        *_, played = play(strategy, grid, 1)
        with pytest.raises(InputError, match="are sent all of them; score it on the server"):
            strategy.questions(played, grid)
        with pytest.raises(InputError, match='or take mode = "public"'):
            strategy.ask_for_sums("calibrate", {}, range(2), strategy.begin(grid))
    else:  # the control: there is something to keep back
        list(play(strategy, grid, 1))
        assert len(strategy.scores) == len(SIZES)
    sent = [parts_of(down.content) for down, _ in grid.heard.values()]
    heads = {tuple(p["params"]["head.bias"].shape) for p in sent if "params" in p}
    assert ((CLASSES,) in heads) == (mode == "public")
    assert heads
