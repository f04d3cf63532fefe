"""CCVR: the last round moves the head alone, to the fit of the clients' pooled statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.ccvr import Ccvr
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import plan_all
from fedshift.client.sharing import Share
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import key
from fedshift.server.combine import Mean
from fedshift.server.virtual import drawn, gaussians, refitted
from fedshift.server.weights import Uniform
from support.by_hand import final
from support.every_method import of_fixed_head
from support.federations import CLASSES, FEATURES, TARGET, make_clients, make_federation

ROUNDS = 3


@pytest.fixture
def known_end(setting: Setting) -> Setting:
    return replace(setting, rounds=ROUNDS)


def test_all_but_the_head_is_fedavg_of_one_round_less(known_end: Setting, federated: Any) -> None:
    federation = federated()
    done = final(recipes.ccvr(known_end, virtual=30), federation, ROUNDS).server
    before = final(recipes.fedavg(known_end), federation, ROUNDS - 1).server
    changed = {k for k, v in done["params"].items() if not torch.equal(v, before["params"][k])}
    assert changed == {"head.weight", "head.bias"}
    assert all(torch.equal(v, before["buffers"][k]) for k, v in done["buffers"].items())


@pytest.mark.parametrize("name", ["ccvr", "ccvr_target"])
def test_the_head_is_the_fit_to_all_examples(known_end: Setting, name: str) -> None:
    """As in one place: features of all examples, their Gaussians, and one fit."""
    federation = make_federation(known_end.model)
    algorithm = getattr(recipes, name)(known_end, virtual=30, ridge=1e-2)
    before = final(recipes.fedavg(known_end), federation, ROUNDS - 1).server
    x, y = (torch.cat([getattr(c, k) for c in federation.clients]) for k in ("x", "y"))
    with torch.no_grad():
        f = known_end.model(before["params"], before["buffers"], x)["features"].double()
    of = F.one_hot(y, CLASSES).double()
    moments = of.mean(0), of.T @ f / len(y), torch.einsum("bk,bi,bj->kij", of, f, f) / len(y)
    shares = torch.tensor(TARGET if name == "ccvr_target" else (1 / CLASSES,) * CLASSES)
    virtual = drawn(*gaussians(*moments), 30, key(federation.seeds.batch, "server", ROUNDS))
    weight, bias = refitted(virtual, shares.double(), 1e-2)
    done = final(algorithm, federation, ROUNDS).server["params"]
    assert torch.allclose(done["head.weight"].double(), weight, atol=1e-3)
    assert torch.allclose(done["head.bias"].double(), bias, atol=1e-3)
    even = getattr(recipes, "ccvr" if name == "ccvr_target" else "ccvr_target")
    other = final(even(known_end, virtual=30, ridge=1e-2), federation, ROUNDS).server["params"]
    assert not torch.allclose(other["head.bias"].double(), bias, atol=1e-2)


def test_another_seed_draws_other_features(known_end: Setting, federated: Any) -> None:
    federation, algorithm = federated(), recipes.ccvr(known_end, virtual=30)
    one, again = (final(algorithm, federation, ROUNDS).server["params"] for _ in range(2))
    assert torch.equal(one["head.weight"], again["head.weight"])
    # From the same last model, so that the draws alone differ.
    *_, last = run(recipes.fedavg(known_end), federation, ROUNDS - 1)
    stage, weights = algorithm.at(ROUNDS), torch.ones(1).double()
    data = federation.clients[0]
    pair = {"params": last.server["params"], "buffers": last.server["buffers"]}
    reply, _ = stage.client_update(pair, {}, data, plan_all(stage.phases(), data, ROUNDS, 0, 0))
    updates = {k: {n: v[None] for n, v in part.items()} for k, part in reply.items()}
    updates["cohort"] = {"id": torch.tensor([0]), "weight": weights}
    heads = [stage.server_update(last.server, updates, s)["params"]["head.weight"] for s in (0, 1)]
    assert not torch.equal(*heads)


def test_what_leaves_a_client(known_end: Setting, federated: Any) -> None:
    stage = recipes.ccvr(known_end).at(ROUNDS)
    assert {"moments", "report", "delta"} <= stage.reveals().keys()
    assert stage.needs_classes()
    inner = recipes.ccvr(known_end).at(ROUNDS - 1)
    assert isinstance(inner, FedAvg)


def test_labels_that_no_client_has_are_left_out(known_end: Setting) -> None:
    """Clients 0 and 1 have labels 0 to 3; a target of the fifth alone leaves the head as it is."""
    few = make_federation(known_end.model, make_clients()[:2])
    done = final(recipes.ccvr(known_end, virtual=30), few, ROUNDS).server["params"]
    assert done["head.bias"].isfinite().all()
    assert done["head.bias"][4] < done["head.bias"][:4].min()
    unmet = replace(known_end, target=(0.0, 0.0, 0.0, 0.0, 1.0))
    after = final(recipes.ccvr_target(unmet), few, ROUNDS).server["params"]
    before = final(recipes.fedavg(known_end), few, ROUNDS - 1).server["params"]
    assert all(torch.equal(v, before[k]) for k, v in after.items())


def test_around_another_method(known_end: Setting, federated: Any) -> None:
    """The weights of `inner` are those of the statistics."""
    plain = FedAvg(known_end.model, local=known_end.local, combine=Mean(Uniform()))
    one, two = (
        Ccvr(inner, ROUNDS - 1, (1 / CLASSES,) * CLASSES, 30)
        for inner in (plain, recipes.fedavg(known_end))
    )
    heads = [final(a, federated(), ROUNDS).server["params"]["head.weight"] for a in (one, two)]
    assert not torch.allclose(*heads)


def test_settings_that_cannot_be(known_end: Setting, federated: Any) -> None:
    for rounds in (None, 1):
        with pytest.raises(InputError, match="which needs 2 rounds or more"):
            recipes.ccvr(replace(known_end, rounds=rounds))
    with pytest.raises(InputError, match="0 virtual features of a label"):
        recipes.ccvr(known_end, virtual=0)
    with pytest.raises(InputError, match="ridge must be a positive number"):
        recipes.ccvr(known_end, ridge=0.0)
    private = Ccvr(FedAvg(known_end.model, share=Share(("head.",))), 2, TARGET)
    with pytest.raises(InputError, match="clients keep parameters of their FedAvg"):
        final(private, federated(), ROUNDS)
    fixed = Ccvr(recipes.fedavg(of_fixed_head(known_end)), 2, TARGET)
    with pytest.raises(InputError, match="whose matrix is trained"):
        final(fixed, federated(), ROUNDS)
    whole = Ccvr(recipes.fedavg(known_end), 2, TARGET, head=("body.", "head."))
    with pytest.raises(InputError, match="fits one linear layer of 5 outputs anew"):
        final(whole, federated(), ROUNDS)


def test_a_head_without_bias() -> None:
    net = Mlp((FEATURES,), (6,), CLASSES)
    net.head = torch.nn.Linear(6, CLASSES, bias=False)
    model = build(lambda: net, seed=0)
    federation = make_federation(model)
    algorithm = recipes.ccvr(Setting(model, TARGET, rounds=2), virtual=20)
    done = final(algorithm, federation, 2).server["params"]
    assert not torch.equal(done["head.weight"], federation.params["head.weight"])
