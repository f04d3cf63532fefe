"""Server optimisers against their formulas written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import numpy_generator
from fedshift.server.optimizers import Adam, ServerOptimizer, Sgd, Yogi
from fedshift.tree import Params
from support.by_hand import max_difference
from support.federations import make_clients, make_federation

ROUNDS = 6


def deltas() -> np.ndarray:
    """Changes [ROUNDS, 3] whose sizes rise and fall, so that Yogi's sign takes both values."""
    source = numpy_generator(0, "deltas")
    scale = np.array([1e-4, 3.0, 1.0, 1e-2, 1e-3, 0.5])[:, None]
    return scale * source.normal(size=(ROUNDS, 3))


def followed(optimizer: ServerOptimizer) -> list[np.ndarray]:
    """theta after each round, from theta = (1, 2, 3)."""
    params = {"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([3.0]).double()}
    state, seen = optimizer.init(params), []
    for delta in torch.tensor(deltas()):
        params, state = optimizer(params, {"a": delta[:2], "b": delta[2:]}, state)
        seen.append(torch.cat([params["a"], params["b"]]).numpy())
    return seen


def by_hand(kind: str, lr: float, b1: float, b2: float, tau: float) -> list[np.ndarray]:
    """Reddi et al. 2021, Algorithm 2, with v_0 = tau^2 and no bias correction."""
    theta, m, v = np.array([1.0, 2.0, 3.0]), np.zeros(3), np.full(3, tau**2)
    seen = []
    for delta in deltas():
        m = b1 * m + (1 - b1) * delta
        square = delta**2
        if kind == "adam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * np.sign(v - square)
        theta = theta + lr * m / (np.sqrt(v) + tau)
        seen.append(theta)
    return seen


@pytest.mark.parametrize("numbers", [(0.01, 0.9, 0.99, 1e-3), (0.3, 0.0, 0.5, 0.1)])
@pytest.mark.parametrize(("kind", "make"), [("adam", Adam), ("yogi", Yogi)])
def test_six_rounds_by_hand(kind: str, make: Callable[..., Any], numbers: Any) -> None:
    ours, expected = followed(make(*numbers)), by_hand(kind, *numbers)
    for a, b in zip(ours, expected, strict=True):
        assert np.abs(a - b).max() < 1e-13
    other = by_hand("yogi" if kind == "adam" else "adam", *numbers)
    assert np.abs(ours[-1] - other[-1]).max() > 1e-4
    wrong = by_hand(kind, *numbers[:3], numbers[3] * 2)
    assert np.abs(ours[-1] - wrong[-1]).max() > 1e-4


def test_without_memory_adam_is_the_sign_of_the_change() -> None:
    """b1 = b2 = 0 and tau -> 0: theta + lr delta / |delta|."""
    steps = np.diff([np.array([1.0, 2.0, 3.0]), *followed(Adam(0.1, 0.0, 0.0, 1e-12))], axis=0)
    assert np.abs(steps - 0.1 * np.sign(deltas())).max() < 1e-6
    with_memory = np.diff(
        [np.array([1.0, 2.0, 3.0]), *followed(Adam(0.1, 0.9, 0.0, 1e-12))], axis=0
    )
    assert np.abs(with_memory - 0.1 * np.sign(deltas())).max() > 1e-2


@pytest.mark.parametrize("make", [Adam, Yogi])
def test_a_large_tau_is_momentum(make: Callable[..., Any]) -> None:
    """tau -> inf with lr = c * 2 tau: v stays tau^2, so theta + c m, m a running mean of delta."""
    tau = 1e6
    ours = followed(make(lr=2 * tau, beta1=0.9, beta2=0.99, tau=tau))
    theta, m = np.array([1.0, 2.0, 3.0]), np.zeros(3)
    for seen, delta in zip(ours, deltas(), strict=True):
        m = 0.9 * m + 0.1 * delta
        theta = theta + m
        # Adam's v shrinks by 0.99 a round towards delta^2, Yogi's by (1 - b2) delta^2 only.
        loose = 0.05 * np.abs(theta - np.array([1.0, 2.0, 3.0])).max() + 1e-6
        assert np.abs(seen - theta).max() < (loose if make is Adam else 1e-6)


def test_yogi_forgets_large_changes_slowly() -> None:
    """After one change of size 100, Adam's v decays by b2 a round and Yogi's hardly."""
    params = {"w": torch.zeros(1).double()}
    moments = {}
    for make in (Adam, Yogi):
        optimizer, state = make(), make().init(params)
        for size in (100.0, *[0.1] * 50):
            state = optimizer(params, {"w": torch.tensor([size]).double()}, state)[1]
        moments[make] = float(state["v.w"])
    assert moments[Adam] == pytest.approx(100.0 * 0.99**50 + 0.01 * (1 - 0.99**50), rel=1e-4)
    assert moments[Yogi] == pytest.approx(100.0 - 50 * 0.01 * 0.01, rel=1e-4)


@pytest.mark.parametrize("make", [Adam, Yogi])
def test_no_change_moves_nothing_at_first(make: Callable[..., Any]) -> None:
    params = {"w": torch.tensor([1.0, -2.0])}
    same, state = make()(params, {"w": torch.zeros(2)}, make().init(params))
    assert torch.equal(same["w"], params["w"])
    assert (state["v.w"] > 0).all()
    moved, _ = make()(params, {"w": torch.tensor([0.0, 1e-3])}, make().init(params))
    assert moved["w"][0] == 1.0
    assert moved["w"][1] > -2.0


def test_names_with_dots_keep_their_moments_apart() -> None:
    """A parameter may be called "m.v" or "v.m": prefixes are taken off once."""
    params = {"m.v": torch.ones(2), "v.m": torch.ones(3), "m": torch.ones(1)}
    state = Adam().init(params)
    after, state = Adam()(params, {k: torch.ones_like(v) for k, v in params.items()}, state)
    assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in params.items()}
    assert len(state) == 6


def test_without_momentum_fedavgm_is_fedavg(setting: Setting, federated: Any) -> None:
    def final(algorithm: FedAvg, rounds: int) -> Params:
        return list(run(algorithm, federated(), rounds))[-1].server["params"]

    plain = recipes.fedavg(setting)
    assert max_difference(final(recipes.fedavgm(setting, momentum=0.0), 2), final(plain, 2)) == 0
    assert max_difference(final(recipes.fedavgm(setting, momentum=0.9), 1), final(plain, 1)) == 0
    assert max_difference(final(recipes.fedavgm(setting, momentum=0.9), 2), final(plain, 2)) > 1e-3


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_one_round_of_a_recipe(setting: Setting, federated: Any, name: str) -> None:
    """theta + lr m / (sqrt(v) + tau), with FedAvg's change as delta."""
    federation = federated()
    algorithm = recipes.recipe(name).make(setting, lr=0.05, tau=0.01)
    got = next(run(algorithm, federation, 1)).server["params"]
    mean = next(run(recipes.fedavg(setting), federation, 1)).server["params"]
    for key, first in federation.params.items():
        delta = (mean[key] - first).double()
        sign = torch.sign(1e-4 - delta**2) if name == "fedyogi" else None
        v = 1e-4 - 0.01 * (1e-4 - delta**2) if sign is None else 1e-4 - 0.01 * delta**2 * sign
        expected = first + 0.05 * 0.1 * delta / (v.sqrt() + 0.01)
        assert float((got[key] - expected).abs().max()) < 1e-6
    assert max_difference(got, mean) > 1e-2


def test_buffers_are_averaged_and_not_adapted(normed: Model) -> None:
    federation, local = make_federation(normed, make_clients(sizes=(16, 32))), Local(batch=8)
    plain = next(run(FedAvg(normed, local=local), federation, 1)).server["buffers"]
    adam = next(run(FedAvg(normed, local=local, server=Adam()), federation, 1)).server
    assert max_difference(plain, adam["buffers"]) == 0
    assert not any("running" in k for k in adam["optimizer"])


def test_two_server_steps_at_once_are_refused(setting: Setting) -> None:
    """A configured server step is never dropped silently."""
    heavy = Setting(setting.model, setting.target, setting.local, Sgd(0.5, momentum=0.3))
    for make in (recipes.fedadam, recipes.fedyogi):
        with pytest.raises(InputError, match=r"brings its own server step: leave out Sgd\(lr=0\.5"):
            make(heavy)
    with pytest.raises(
        InputError, match=r"fedavgm sets the server's momentum: leave it out of Sgd"
    ):
        recipes.fedavgm(heavy)
    slow = Setting(setting.model, setting.target, setting.local, Sgd(0.5))
    assert recipes.fedavgm(slow, momentum=0.9).server == Sgd(0.5, momentum=0.9)
