"""What recipes refuse: each row is a call of the setting, the key at fault, what was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.optimizers import Sgd
from fedshift.server.robust import Geometric, Krum, Trimmed
from support.federations import FEATURES, TARGET

X = torch.zeros(40, FEATURES)


def options(name: str, **given: Any) -> Callable[[Setting], Any]:
    return lambda s: getattr(recipes, name)(s, **given)


def steps(name: str, count: int) -> Callable[[Setting], Any]:
    local = Local(steps=count, batch=8)
    return lambda s: getattr(recipes, name)(replace(s, local=local, rounds=4))


def tune(name: str = "labelset_fedavg", **given: Any) -> Callable[[Setting], Any]:
    return lambda s: getattr(recipes, name)(replace(s, server_inputs=X), **given)


def disk(**given: Any) -> Callable[[Setting], Any]:
    return lambda s: recipes.feddisk(replace(s, shape=(FEATURES,)), **given)


def part(name: str, **changes: Any) -> Callable[[Setting], Any]:
    return lambda s: getattr(recipes, name)(replace(s, **changes))


NAN = float("nan")
ROWS: list[tuple[Callable[[Setting], Any], tuple[str, ...]]] = [
    (options("fedprox", mu=-1.0), ("mu", "-1")),
    (options("moon", mu=-1.0), ("mu", "-1")),
    (options("fedntd", beta=-0.5), ("beta", "-0.5")),
    (options("fedntd", beta=NAN), ("beta", "nan")),
    (options("feddecorr", beta=-0.1), ("beta", "-0.1")),
    (options("fedvls", distill=-1.0), ("distill", "-1")),
    (options("fedvls", suppress=float("inf")), ("suppress", "inf")),
    (options("fedrs", alpha=-0.1), ("alpha", "-0.1")),
    (options("fedrs", mode="indicater"), ("mode", '"indicator"')),
    (options("fedlc", tau=0.0), ("tau", "0")),
    (options("fedetf"), ("FedETF", "EtfHead")),
    (options("fedgela"), ("FedGELA", "EtfHead")),
    (options("afl", whole=True), ("whole", "domains")),
    (options("fedpals"), ("lam", "ess")),
    (lambda s: recipes.fedavgm(replace(s, server=Sgd(1.0, 0.5))), ("momentum", "leave it out")),
    (lambda s: recipes.fedadam(replace(s, server=Sgd(0.5))), ("fedadam", "leave out")),
    (options("feddrm", lam=1.5), ("lam", "1.5")),
    (options("feddrm_shared_head", lam=NAN), ("lam", "nan")),
    (part("feddrm", head=()), ("head", "feddrm_shared_head")),
    *((part(name, head=head), ("Setting.head", "head.")) for name in
      ("fedper", "fedrep", "fedbabu", "fedpac", "fedas") for head in
      (("haed.",), ("head.", "fc."), ("head", "body"))),
    *((part(name, local=Local(only=("body.",))), ("only=",)) for name in
      ("fedrep", "fedbabu", "fedpac")),
    (options("fedrep", head_epochs=-1), ("head_epochs", "-1")),
    (options("fedpac", lam=-1.0), ("lam", "-1")),
    (options("fedas", align_epochs=-1), ("align_epochs", "-1")),
    (options("fedala", layers=0), ("layers", "0")),
    (options("fedala", mix_lr=0.0), ("lr", "0")),
    (options("fedala", share=1.5), ("share", "1.5")),
    (options("fedbabu", tune_part="haed"), ("tune_part", '"head"')),
    *((part(name, rounds=4), ("tune_rounds=", "of 4 rounds", "local_only")) for name in
      ("fedavgft", "fedproxft", "fedsamft")),
    (options("fedavgft"), ("tune_rounds=100", "Setting(..., rounds=...)")),
    (options("fedavgft", tune_rounds=-1), ("tune_rounds", "-1")),
    *((options(name), (name, "Local(steps=10)")) for name in recipes.__all__
      if name.endswith("_drm_repo")),
    *((steps(name, 1), (name, "1 is too few")) for name in
      ("fedrep_drm_repo", "ditto_drm_repo", "fedala_drm_repo", "fedas_drm_repo")
      if name in recipes.__all__),
    (options("ccvr"), ("rounds",)),
    (part("ccvr", rounds=1), ("2 rounds",)),
    (options("confree", alpha=-0.1), ("alpha", "-0.1")),
    (options("confree", scope="tensors"), ("scope", '"tensor"')),
    (options("confree", host="fedreb"), ("host", '"fedrep"')),
    (options("confree", host="fedala", head_epochs=3), ("head_epochs=3", "fedala")),
    (options("fedtrimmed", share=0.5), ("share", "0.5")),
    (options("krum", byzantine=-1), ("byzantine", "-1")),
    (options("multikrum", keep=0), ("keep", "0")),
    (lambda s: Trimmed(NAN), ("share", "nan")),
    (lambda s: Krum(1, 0), ("keep", "0")),
    (lambda s: Geometric(steps=0), ("steps", "0")),
    (options("labelset_fedavg", tune="mse"), ("tune", "server_inputs=")),
    (options("labelset_fedavg", tune="pair"), ("tune", '"pair"', "pairwise")),
    (options("labelset_fedavg", tune_steps=3), ("tune_steps", 'tune="none"')),
    (tune(tune="kl", tune_over="union"), ("over", "kl")),
    (tune(tune="kl", tune_temperature="fitted"), ("tune_temperature", "server_examples=")),
    (tune(tune="kl", tune_steps=-1), ("steps", "-1")),
    (tune(tune="kl", tune_lr=0.0), ("lr", "0")),
    (tune(tune="kl", tune_rounds=-1), ("rounds", "-1")),
    (tune(tune="kl", tune_steps=0, tune_moments="kept"), ("tune_moments", "tune_steps=0")),
    (tune(tune="kl", tune_steps=0, tune_stop="held-out"), ("tune_stop", "tune_steps=0")),
    (tune(tune="kl", tune_steps=0, tune_weights="confidence"), ("tune_weights", "tune_steps=0")),
    (disk(density_rounds=0), ("density_rounds", "0")),
    (disk(hidden=(0,)), ("hidden", "0")),
    (disk(temper=0.0), ("temper", "0")),
    (disk(most=1.0), ("most", "1")),
    (disk(low=1.0, high=1.0), ("low", "high")),
    (disk(density="normal"), ("density", '"normal"')),
    (disk(estimator="ratio"), ("estimator", '"ratio"')),
    (disk(estimator="equal", temper=0.5), ("temper", "equal")),
    (disk(ratio_epochs=3), ("ratio_epochs", "classifier")),
    (disk(estimator="equal", density_epochs=2), ("density_epochs", "equal")),
    (disk(estimator="true", ordering="random"), ("ordering", "true")),
    (disk(estimator="equal", most=3.0), ("most", "equal")),
    (disk(estimator="equal", useful=0.1), ("useful", "equal")),
    (disk(least_ess=0.25), ("least_ess", "useful")),
    (disk(tau=0.1), ("tau", "mu")),
    (lambda s: recipes.feddisk(replace(s, shape=(FEATURES,), rounds=21)), ("21", "rounds=21 + T")),
    (lambda s: recipes.feddisk(replace(s, shape=(4,), two_values=(0.0, 1.0)), low=-2.0),
     ("low", "0 or 1")),
    (lambda s: recipes.fedprox(s, mu="strong"), ("mu", "strong")),
    (lambda s: recipes.fedprox(s.model), ("Setting(model, target)",)),
    (lambda s: recipes.recipe("fedprx"), ('"fedprx"', '"fedprox"')),
    (lambda s: recipes.recipe("afl", {"weights": "fedpals"}), ("afl", 'weights = "fedpals"')),
    (lambda s: recipes.recipe("moon", {"weights": "fedpal"}), ("weights", '"fedpals"')),
    (lambda s: recipes.made_by(lambda: 3), ("function of one Setting",)),
    (lambda s: replace(s, head="head."), ("head", '("head.",)')),
    (lambda s: replace(s, target=(0.5, 0.4)), ("target", "sum to 1")),
    (lambda s: replace(s, target=(1.5, -0.5)), ("target", "from 0 to 1")),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_refused_before_any_data(row: int, mlp: Model) -> None:
    call, words = ROWS[row]
    with pytest.raises(InputError) as e:
        call(Setting(mlp, TARGET))
    assert all(word in str(e.value) for word in words), str(e.value)


@pytest.mark.parametrize("name", ["fedmedian", "fedtrimmed", "krum", "multikrum", "rfa"])
def test_robust_rules_refuse_running_statistics(name: str, normed: Model) -> None:
    with pytest.raises(InputError, match="GroupNorm"):
        getattr(recipes, name)(Setting(normed, TARGET))
