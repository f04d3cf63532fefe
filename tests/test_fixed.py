"""Parameters of the network that are not to be trained: `requires_grad=False`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from every_method import MAKE, ROUNDS, Make
from routing import routed_model

from fedshift import recipes
from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply, loop
from fedshift.engine.rounds import Round, run
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.tree import Parts

FIXED = {"body.0.0.weight", "head.bias"}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def partly(names: set[str] = FIXED) -> Model:
    """The network of the contract, of which these parameters are not to be trained."""
    net = routed_model().net
    for name in names:
        net.get_parameter(name).requires_grad_(False)
    return Model(net)


@pytest.fixture
def mlp() -> Model:
    return partly()


def last(rounds: Iterable[Round]) -> Round:
    return list(rounds)[-1]


def noting(sent: list[Parts], backend: Backend = loop) -> Backend:
    """The backend, with a look at all that leaves the clients."""

    def noted(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        for reply in backend(update, jobs):
            sent.append(reply.update)
            yield reply

    return noted


def moved(played: Round, before: dict[str, torch.Tensor]) -> set[str]:
    """Names of parameters of which some model, the server's or a client's, is not as before."""
    trees = [*played.server.values(), *(t for s in played.states.values() for t in s.values())]
    pairs = [(k, v) for tree in trees for k, v in tree.items() if k in before]
    return {k for k, v in pairs if v.shape == before[k].shape and not torch.equal(v, before[k])}


@each
def test_they_stay_and_are_not_sent(make: Make, setting: Setting, federated: Any) -> None:
    sent: list[Parts] = []
    federation = federated()
    played = last(run(make(setting), federation, ROUNDS, backend=noting(sent)))
    names = {name for update in sent for tree in update.values() for name in tree}
    assert sent
    assert not names & FIXED
    before = {k: federation.params[k] for k in FIXED}
    models = [make(setting).at(ROUNDS).model_for(played.server, s) for s in played.states.values()]
    for params in (played.server["params"], *(params for params, _ in models)):
        for name in params.keys() & FIXED:
            rows = torch.isfinite(params[name])  # of labels that are not a client's own
            assert torch.equal(params[name][rows], before[name][rows])
    whole = Setting(routed_model(), setting.target, setting.local)
    assert before.keys() & moved(last(run(recipes.fedavg(whole), federation, 1)), before) == FIXED
