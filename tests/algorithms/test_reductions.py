"""Methods that are another one at an end of their options: the same bits, and a control apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.client.local import Local
from fedshift.client.shares import CountAdjusted
from fedshift.data import client_data
from fedshift.engine.run import Federation
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.server.combine import Mean
from fedshift.server.weights import Uniform
from support.by_hand import final, max_difference
from support.comparing import same
from support.federations import CLASSES, FEATURES, make_federation

Make = Callable[[Setting], Any]


class Law(NamedTuple):
    """Both give one model after `rounds`; the control, on the same federation, gives another."""

    ours: Make
    theirs: Make
    control: Make
    rounds: int = 2
    cohort: int | None = None


def even(setting: Setting) -> Any:
    return replace(recipes.fedavg(setting), combine=Mean(Uniform()))


def vls(distill: float, suppress: float) -> Make:
    return lambda s: recipes.fedvls(s, distill=distill, suppress=suppress)


def balanced(setting: Setting) -> Any:
    objective = CountAdjusted(CLASSES, least=1e-6)
    return replace(recipes.fedavg(setting), objective=objective)


def of_fedper(extra: Any) -> Make:
    return lambda s: replace(recipes.fedper(s), extras=(extra,))


def pac(**options: Any) -> Make:
    return lambda s: recipes.fedpac(s, **options)


def prox(mu: float) -> Make:
    return lambda s: recipes.fedprox(s, mu=mu)


def steps(setting: Setting, count: int = 4) -> Setting:
    return replace(setting, local=replace(setting.local, epochs=None, steps=count), rounds=4)


fedavg = recipes.fedavg
LAWS = {
    "fedprox": Law(prox(0.0), fedavg, prox(1.0)),
    "fedsam": Law(lambda s: recipes.fedsam(s, rho=0.0), fedavg, recipes.fedsam),
    "moon": Law(lambda s: recipes.moon(s, mu=0.0), fedavg, recipes.moon),
    "moon, first": Law(lambda s: recipes.moon(s, mu=5.0), fedavg, prox(1.0), 1),
    "fedntd": Law(lambda s: recipes.fedntd(s, beta=0.0), fedavg, recipes.fedntd),
    "feddecorr": Law(lambda s: recipes.feddecorr(s, beta=0.0), fedavg, recipes.feddecorr),
    "fedvls": Law(vls(0.0, 0.0), balanced, vls(1.0, 0.0)),
    "fedvls, suppressed": Law(vls(0.0, 0.0), balanced, vls(0.0, 0.1)),
    "fedrs": Law(lambda s: recipes.fedrs(s, alpha=1.0), fedavg, recipes.fedrs),
    "fedavgm": Law(lambda s: recipes.fedavgm(s, momentum=0.0), fedavg, recipes.fedavgm),
    "feddisco": Law(lambda s: recipes.feddisco(s, a=0.0, b=0.0), fedavg, recipes.feddisco),
    "afl": Law(lambda s: recipes.afl(s, gamma=0.0), fedavg, recipes.afl),
    "afl, sampled": Law(lambda s: recipes.afl(s, gamma=0.0), fedavg, recipes.afl, cohort=3),
    "afl, one domain": Law(
        lambda s: recipes.afl(s, gamma=9.0, domains=(0,) * 6), fedavg, recipes.afl
    ),
    "afl, a domain each": Law(
        lambda s: recipes.afl(s, domains=tuple(range(6))), recipes.afl, fedavg, cohort=4
    ),
    "scaffold, first": Law(recipes.scaffold, even, fedavg, 1),
    "fedala, first": Law(recipes.fedala, fedavg, even, 1),
    "fedala without mixing": Law(
        lambda s: replace(fedavg(s), extras=(FedAla(None),)), fedavg, recipes.fedala
    ),
    "fedala_drm_repo": Law(
        lambda s: recipes.fedala_drm_repo(steps(s)), lambda s: fedavg(steps(s, 2)), fedavg
    ),
    "fedpac, first": Law(pac(lam=5.0), pac(lam=0.0), recipes.fedrep, 1),
    "fedpac is fedrep": Law(
        pac(lam=0.0, collaborate=False, head_lr=0.1, head_epochs=2),
        lambda s: recipes.fedrep(s, head_epochs=2), recipes.fedpac, cohort=4,
    ),
    "fedas is fedper": Law(of_fedper(FedAs(None, fisher=False)), recipes.fedper, recipes.fedas),
    "fedas without aligning": Law(
        of_fedper(FedAs(None, fisher=False)), recipes.fedper,
        of_fedper(FedAs(Local(batch=16), fisher=False)),
    ),
    "fedas_drm_repo, first": Law(
        lambda s: recipes.fedas_drm_repo(steps(s, 10)), lambda s: recipes.fedper(steps(s, 8)),
        recipes.fedper, 1,
    ),
    "fedrep is fedbabu": Law(
        lambda s: recipes.fedrep(s, head_epochs=0), lambda s: recipes.fedbabu(s, tune_rounds=0),
        recipes.fedrep,
    ),
    "fedpac_drm_repo": Law(
        lambda s: recipes.fedpac_drm_repo(steps(s), mu=0.0),
        lambda s: recipes.fedrep_drm_repo(steps(s)), lambda s: recipes.fedpac_drm_repo(steps(s)),
    ),
    "ditto trains as its inner method": Law(recipes.ditto, fedavg, even),
    "fedavgft": Law(lambda s: recipes.fedavgft(steps(s), tune_rounds=2),
                    lambda s: fedavg(steps(s)), fedavg),
    "fedsamft": Law(lambda s: recipes.fedsamft(s, tune_rounds=0), recipes.fedsam, fedavg),
    "fedproxft": Law(
        lambda s: recipes.fedproxft(steps(s), mu=0.0, tune_rounds=1),
        lambda s: recipes.fedavgft(steps(s), tune_rounds=1), prox(1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_the_same_bits_at_an_end(name: str, setting: Setting, federated: Any) -> None:
    law = LAWS[name]
    ours, theirs, control = (
        final(make(setting), federated(), law.rounds, cohort=law.cohort).server["params"]
        for make in (law.ours, law.theirs, law.control)
    )
    assert max_difference(ours, theirs) == 0
    assert max_difference(ours, control) > 1e-5


@pytest.mark.parametrize(
    "name", ["fedprox mu", "moon", "fedala, first", "fedas is fedper", "afl, one domain"]
)
def test_with_running_statistics_too(name: str, normed: Model) -> None:
    """Passes that train nothing leave BatchNorm's statistics alone."""
    law = LAWS.get(name, LAWS["fedprox"])
    setting = Setting(normed, (0.2,) * 5, Local(epochs=1, batch=7))
    federation = make_federation(normed)
    ours, theirs = (
        final(make(setting), federation, law.rounds).server for make in (law.ours, law.theirs)
    )
    assert max_difference(ours["params"], theirs["params"]) == 0
    assert max_difference(ours["buffers"] | {}, theirs["buffers"]) == 0


def of_even_labels(setting: Setting) -> Federation:
    """Clients that have equally many examples of every class."""
    source = generator(0, "even")
    clients = tuple(
        client_data(torch.randn(n, FEATURES, generator=source), torch.arange(n) % CLASSES, i)
        for i, n in enumerate((10, 25, 15))
    )
    return make_federation(setting.model, clients)


@pytest.mark.parametrize(
    ("make", "theirs"),
    [
        (recipes.balanced_softmax, fedavg),
        (recipes.fedlc, fedavg),
        (recipes.fedrs, fedavg),
        (vls(5.0, 0.0), vls(0.0, 0.0)),
        (lambda s: recipes.fedrs(s, mode="frequency"), fedavg),
    ],
)
def test_even_labels_leave_nothing_to_correct(
    make: Make, theirs: Make, setting: Setting, federated: Any
) -> None:
    assert same(make(setting), theirs(setting), of_even_labels(setting)) == 0
    assert same(make(setting), theirs(setting), federated()) > 1e-4


@pytest.mark.parametrize("make", [recipes.moon, lambda s: recipes.feddecorr(s, beta=2.0)])
def test_terms_of_features_do_nothing_without_hidden_layers(make: Make, setting: Setting) -> None:
    """The features are the inputs, which training does not move."""
    gaps = []
    for hidden in ((), (10,)):
        model = build(lambda h=hidden: Mlp((FEATURES,), h, CLASSES), seed=1)
        here = replace(setting, model=model)
        gaps.append(same(make(here), fedavg(here), make_federation(model)))
    assert gaps[0] == 0
    assert gaps[1] > 1e-4
