"""SCAFFOLD: frozen parts, buffers, schedules, refusals, and that it helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.scaffold import Option, Scaffold
from fedshift.client.local import Local
from fedshift.engine.run import Federation
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from support.by_hand import (
    THREE,
    final,
    max_difference,
    quadratic_federation,
    quadratic_model,
    theta,
    uniform_fedavg,
)
from support.federations import TARGET, double, make_clients, make_federation, one_job


def test_frozen_parameters_have_no_control(setting: Setting, federated: Any) -> None:
    local = replace(setting.local, only=("head",))
    for option in ("I", "II"):
        done = final(Scaffold(setting.model, option, local=local), federated(), 2)
        assert all(not v.any() for k, v in done.server["control"].items() if k.startswith("body"))
        assert done.server["control"]["head.bias"].any()


@pytest.mark.parametrize("option", ["I", "II"])
def test_buffers_have_no_control(option: Option, normed: Model) -> None:
    federation = make_federation(normed, make_clients(sizes=(16, 24)))
    algorithm = Scaffold(normed, option, local=Local(batch=8))
    done = final(algorithm, federation, 2)
    assert done.server["control"].keys() == federation.params.keys()
    assert int(done.server["buffers"]["body.1.num_batches_tracked"]) == 6
    update, _ = algorithm.client_update(*one_job(algorithm, federation)[1:5])
    assert update["control"].keys() == federation.params.keys()
    # The extra pass of option I sees batches too; it must not move the running statistics.
    plain, _ = FedAvg(normed, local=Local(batch=8)).client_update(
        *one_job(FedAvg(normed, local=Local(batch=8)), federation)[1:5]
    )
    assert max_difference(update["buffers"], plain["buffers"]) == 0


def test_a_schedule_over_rounds_is_accounted_for(setting: Setting, federated: Any) -> None:
    """The rate is constant within a round, and eta Q uses that round's."""
    falling = replace(setting.local, lr=lambda t: 0.1 / t)
    federation = double(federated())
    got = final(Scaffold(setting.model, local=falling), federation, 2)
    first = final(Scaffold(setting.model, local=setting.local), federation, 1)
    second = Scaffold(setting.model, local=replace(setting.local, lr=0.05))
    resumed = final(second, federation, 2, after=first)
    assert max_difference(got.server["control"], resumed.server["control"]) == 0
    constant = final(Scaffold(setting.model, local=setting.local), federation, 2)
    assert max_difference(got.server["control"], constant.server["control"]) > 1e-3


def test_what_is_not_sound_is_refused(mlp: Model) -> None:
    with pytest.raises(InputError, match=r"0\.9; give Local\(momentum=0\), or use option=\"I\""):
        Scaffold(mlp, local=Local(momentum=0.9))
    adam = Local(optimizer="adam")
    with pytest.raises(InputError, match=r'Local\(optimizer="sgd"\), or use option="I"'):
        Scaffold(mlp, local=adam)
    assert Scaffold(mlp, "I", local=adam).local == adam
    with pytest.raises(InputError, match='unknown SCAFFOLD option "ii"; allowed: I, II'):
        recipes.scaffold(Setting(mlp, TARGET), option="ii")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one local phase; give one Local"):
        Scaffold(mlp, local=(Local(), Local()))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="c is a weighted mean; give a Mean, not <object"):
        Scaffold(mlp, combine=object())  # type: ignore[arg-type]


def test_more_local_steps_help_on_unlike_clients() -> None:
    """Distance to the minimiser after equal rounds: 8 corrected steps beat 8 plain ones and 1."""
    model, even = quadratic_model(), torch.ones(3)
    best = THREE.minimiser(even)

    def miss(algorithm: FedAvg | Scaffold, steps: int) -> float:
        federation: Federation = quadratic_federation((steps,) * 3, (5.0, 5.0))
        return float((theta(final(algorithm, federation, 15)) - best).norm())

    local = Local(lr=0.05, batch=1)
    controlled, plain = Scaffold(model, "II", THREE, local), uniform_fedavg(model, local)
    plain = replace(plain, objective=THREE)
    assert miss(controlled, 8) < miss(plain, 8) / 3
    assert miss(controlled, 8) < miss(controlled, 1) / 3
