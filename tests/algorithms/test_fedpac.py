"""FedPAC: class means, heads that live on the server, and when it is FedRep."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.fedpac import FedPac
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, Proximal, View
from fedshift.client.prototypes import ToPrototypes, class_moments, head_shape, statistics
from fedshift.client.sharing import Share
from fedshift.data import ClientData
from fedshift.engine.run import Federation, run
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.server.heads import head_weights
from fedshift.tree import Params, Parts
from support.by_hand import final, max_difference
from support.comparing import same, whole
from support.federations import (
    CLASSES,
    FEATURES,
    TARGET,
    double,
    make_clients,
    make_federation,
    one_job,
)


def test_statistics_are_a_variance_and_a_mean() -> None:
    """With h = e_y x f: H = E h, V = (E ||h||^2 - ||E h||^2) / n, over the client's examples."""
    model = build(lambda: nn.Linear(FEATURES, CLASSES), seed=0)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = model.net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"features": x, "logits": self.head(x)}

    data = make_clients()[3]
    data = data._replace(x=data.x.double(), w=data.w.double())
    plan = Local(epochs=1, batch=7).plan(len(data.y), 1, torch.Generator().manual_seed(0))
    net = Model(Whole())
    shape = head_shape(net, ("head.",))
    assert shape == (CLASSES, FEATURES)
    params = {k: v.double() for k, v in net.init()[0].items()}
    moments = class_moments(net, params, {}, data, plan, shape)
    h = F.one_hot(data.y, CLASSES).double()[:, :, None] * data.x[:, None, :]
    variance, means = statistics(moments)
    assert float((means - h.mean(0)).abs().max()) < 1e-14
    expected = ((h * h).sum((1, 2)).mean() - h.mean(0).square().sum()) / len(data.y)
    assert float((variance - expected).abs()) < 1e-14
    assert float((variance - expected * len(data.y)).abs()) > 0.1
    empty = plan._replace(weight=torch.zeros_like(plan.weight), sizes=None)
    none = class_moments(net, params, {}, data, empty, shape)
    assert not any(float(v.abs().max()) for v in (*none, *statistics(none)))


def alternating(setting: Setting, fit: Local) -> FedAvg:
    """FedRep: heads first, kept at the clients."""
    phases = replace(fit, only=("head.",)), replace(setting.local, frozen=("head.",))
    return FedAvg(setting.model, local=phases, share=Share(("head.",)))


def heads_of(states: Any, server: Parts) -> tuple[dict[int, Params], dict[int, Params]]:
    """Every client's head, from FedRep's client states and from FedPAC's server."""
    heads = {i: s.get("private", {}) for i, s in states.items()}
    server_heads = {i: {k: v[i] for k, v in server.get("heads", {}).items()} for i in states}
    return heads, server_heads


@pytest.mark.slow
def test_without_pull_and_mixing_it_is_fedrep(setting: Setting, federated: Any) -> None:
    """Bit for bit, heads as well, also in sampled cohorts; with either it is not."""
    federation, fit = federated(), replace(setting.local, lr=0.05, epochs=1)
    host = final(alternating(setting, fit), federation, 3, cohort=4)
    bare = FedPac(setting.model, lam=0.0, collaborate=False, fit=fit, local=setting.local)
    ours = final(bare, federation, 3, cohort=4)
    assert max_difference(ours.server["params"], host.server["params"]) == 0
    heads, _ = heads_of(host.states, host.server)
    _, server_heads = heads_of(ours.states, ours.server)
    assert all(max_difference(heads[i], server_heads[i]) == 0 for i in heads)
    for other in (replace(bare, lam=1.0), replace(bare, collaborate=True)):
        assert same(bare, other, federation, 3) > 1e-3
    named = recipes.fedpac(setting, lam=0.0, collaborate=False, head_lr=0.05)
    assert named == alternating(setting, fit)


def test_the_pull_begins_in_the_second_round(setting: Setting, federated: Any) -> None:
    plain = FedPac(setting.model, lam=0.0, local=setting.local)
    pulled = replace(plain, lam=5.0)
    assert same(plain, pulled, federated(), 1) == 0
    assert same(plain, pulled, federated(), 2) > 1e-3


def trained_clients(
    algorithm: FedPac, federation: Federation
) -> list[tuple[Params, Parts, ClientData]]:
    """(model after round 1, update, data) of every client."""
    clients = []
    for i in range(len(federation.clients)):
        job = one_job(algorithm, federation, i)
        update, _ = algorithm.client_update(*job[1:5])
        body = {k: v + update["delta"][k] for k, v in job.message["params"].items()}
        clients.append((body | update["head"], update, job.data))
    return clients


def test_prototypes_are_pooled_class_means(setting: Setting, federated: Any) -> None:
    """c_k is the mean of all features of class k; PFLlib's unweighted mean is another."""
    algorithm, federation = FedPac(setting.model, local=setting.local), double(federated())
    server = final(algorithm, federation, 1).server
    features, labels = [], []
    each = trained_clients(algorithm, federation)
    for params, _, data in each:
        features.append(setting.model(params, {}, data.x)["features"])
        labels.append(data.y)
    f, y = torch.cat(features), torch.cat(labels)
    for k in range(CLASSES):
        got = server["prototypes"]["mean"][k]
        assert float((got - f[y == k].mean(0)).abs().max()) < 1e-13
        assert int(server["prototypes"]["count"][k]) == int((y == k).sum())
    means = torch.stack([update["prototypes"]["mean"] for _, update, _ in each])
    had = torch.stack([update["prototypes"]["count"] > 0 for _, update, _ in each])
    unweighted = means.sum(0) / had.sum(0)[:, None]
    assert float((unweighted - server["prototypes"]["mean"]).abs().max()) > 1e-3


def pull(model: Model, lam: float, goal: Tensor, present: Tensor, data: ClientData) -> Tensor:
    params, _ = model.init()
    out = model(params, {}, data.x)
    context = {"prototypes": {"mean": goal, "held": present}}
    return ToPrototypes(lam)(View(model, params, out, whole(data), context))


def test_the_pull_is_a_mean_over_batch_and_dimensions(mlp: Model) -> None:
    data, all_held = make_clients()[1], torch.ones(CLASSES)
    goal = torch.randn(CLASSES, 10, generator=generator(0, "goal"))
    features = mlp(*mlp.init(), data.x)["features"]
    expected = 0.7 * F.mse_loss(features, goal[data.y])
    assert float(pull(mlp, 0.7, goal, all_held, data) - expected) == pytest.approx(0, abs=1e-6)
    assert float(pull(mlp, 0.7, goal, 0 * all_held, data)) == 0
    padded = data._replace(w=torch.where(torch.arange(len(data.y)) < 5, data.w, 0.0))
    some = 0.7 * F.mse_loss(features[:5], goal[data.y[:5]]) * 5 / len(data.y)
    assert float(pull(mlp, 0.7, goal, all_held, padded) - some) == pytest.approx(0, abs=1e-6)
    assert abs(float(pull(mlp, 1.4, goal, all_held, data) - expected)) > 0.1


def test_a_missing_prototype_is_replaced_by_the_clients_own(
    setting: Setting, federated: Any
) -> None:
    """As if the server had sent the client's own mean for that class, taken before training."""
    algorithm, federation = FedPac(setting.model, local=setting.local), federated()
    job = one_job(algorithm, federation, 2)
    body = setting.model(federation.params, {}, job.data.x)["features"]
    sent = {"mean": torch.randn(CLASSES, 10, generator=generator(1)), "count": torch.ones(CLASSES)}
    gone, replaced = int(job.data.y[0]), {k: v.clone() for k, v in sent.items()}
    replaced["mean"][gone] = body[job.data.y == gone].mean(0)
    without = {**sent, "count": sent["count"].clone()}
    without["count"][gone] = 0

    def body_after(prototypes: Params) -> Params:
        message = job.message | {"prototypes": prototypes}
        return algorithm.client_update(message, *job[2:5])[0]["delta"]

    assert max_difference(body_after(without), body_after(replaced)) < 1e-6
    assert max_difference(body_after(without), body_after(sent)) > 1e-3


def test_an_absent_client_keeps_its_head_and_gets_the_body(
    setting: Setting, federated: Any
) -> None:
    algorithm, unmoved = recipes.fedpac(setting), 0
    rounds = list(run(algorithm, federated(), 4, cohort=3))
    for before, after in pairwise(rounds):
        for i in range(6):
            now = {k: v[i] for k, v in after.server["heads"].items()}
            same_head = (
                max_difference(now, {k: v[i] for k, v in before.server["heads"].items()}) == 0
            )
            assert same_head == (i not in after.trained)
            unmoved += same_head
            sent = algorithm.broadcast(after.server, i)
            assert max_difference(sent["head"], now) == 0
            assert sent["params"] is after.server["params"]
    assert unmoved == 9
    state = rounds[-1].states[max(rounds[-1].states)]
    params, _ = algorithm.model_for(rounds[-1].server, state)
    head = {k: v[max(rounds[-1].states)] for k, v in rounds[-1].server["heads"].items()}
    assert max_difference({k: params[k] for k in head}, head) == 0


def test_heads_are_the_mixtures_of_what_was_sent(setting: Setting, federated: Any) -> None:
    algorithm = FedPac(setting.model, lam=0.0, local=setting.local)
    federation = double(federated())
    each = trained_clients(algorithm, federation)
    from_clients = [update["statistics"] for _, update, _ in each]
    variance, means = (torch.stack([t[k] for t in from_clients]) for k in ("variance", "means"))
    mix = head_weights(variance, means, torch.ones(6, dtype=torch.bool))
    assert float((mix - torch.eye(6)).abs().max()) > 0.1
    heads = final(algorithm, federation, 1).server["heads"]
    for name, rows in heads.items():
        sent = torch.stack([update["head"][name] for _, update, _ in each])
        assert float((rows - torch.tensordot(mix, sent, 1)).abs().max()) < 1e-12
        assert float((rows - sent).abs().max()) > 1e-3


def test_statistics_are_those_of_the_model_received(setting: Setting, federated: Any) -> None:
    algorithm, federation = FedPac(setting.model, local=setting.local), double(federated())
    params, update, data = trained_clients(algorithm, federation)[3]
    means = []
    for body in (federation.params, params):
        f = setting.model(body, {}, data.x)["features"]
        h = F.one_hot(data.y, CLASSES).to(f.dtype)[:, :, None] * f[:, None, :]
        means.append(h.mean(0))
    got = update["statistics"]["means"]
    assert float((got - means[0]).abs().max()) < 1e-14
    assert float((got - means[1]).abs().max()) > 1e-3


def test_what_is_sent_is_counted(setting: Setting, federated: Any) -> None:
    """Beyond FedRep's body: a head, K d + K numbers of prototypes, K d + 1 of statistics."""
    algorithm = FedPac(setting.model, local=setting.local)
    update, _ = algorithm.client_update(*one_job(algorithm, federated())[1:5])
    numbers = {part: sum(v.numel() for v in tree.values()) for part, tree in update.items()}
    assert numbers["head"] == 11 * CLASSES
    assert numbers["prototypes"] == 10 * CLASSES + CLASSES
    assert numbers["statistics"] == 10 * CLASSES + 1
    assert not any(name.startswith("head.") for name in update["delta"])
    assert {"head", "prototypes", "statistics"} <= set(algorithm.reveals())


def test_the_repo_recipe_is_fedrep_with_a_proximal_body(setting: Setting, federated: Any) -> None:
    ten = replace(setting, local=Local(lr=0.1, steps=10, batch=8))
    plain, pulled = recipes.fedrep_drm_repo(ten), recipes.fedpac_drm_repo(ten, mu=0.5)
    assert recipes.fedpac_drm_repo(ten, mu=0.0) == plain
    assert [phase.steps for phase in pulled.phases().values()] == [5, 5]
    assert same(plain, pulled, federated(), 2) > 1e-4
    # One step each: the head is not pulled at all, and the body's pull is 0 where it starts.
    two = replace(setting, local=Local(lr=0.1, steps=2, batch=8))
    host = final(recipes.fedrep_drm_repo(two), federated(), 2)
    ours = final(recipes.fedpac_drm_repo(two, mu=7.0), federated(), 2)
    assert max_difference(host.server["params"], ours.server["params"]) == 0
    assert all(
        max_difference(host.states[i]["private"], ours.states[i]["private"]) == 0 for i in range(6)
    )
    everywhere = replace(pulled, objective=CrossEntropy() + Proximal(0.5))
    repo, free, bound = (
        final(a, federated(), 1).states[0]["private"] for a in (plain, pulled, everywhere)
    )
    assert max_difference(repo, free) == 0
    assert (
        max_difference(repo, bound) > 1e-4
    )  # the control: a pull on everything holds the head back


def test_wrong_models_and_settings_are_refused(setting: Setting, federated: Any) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # type: ignore[no-any-return]

    bare = build(Bare, seed=0)
    with pytest.raises(InputError, match=r'looks at "features", and the model returns'):
        final(recipes.fedpac(Setting(bare, TARGET)), make_federation(bare))

    class Wide(Bare):
        def forward(self, x: Tensor) -> Any:
            return {"features": x, "logits": self.head(self.body(x))}

    wide = build(Wide, seed=0)
    with pytest.raises(InputError, match=r'returns 8 "features" for an input, and its head takes'):
        final(recipes.fedpac(Setting(wide, TARGET)), make_federation(wide))
    with pytest.raises(InputError, match=r"Setting\.head = \['haed\.'\].*Did you mean \"head\."):
        recipes.fedpac(replace(setting, head=("haed.",)))
    with pytest.raises(InputError, match=r"is a matrix, so the width of the features is unknown"):
        final(recipes.fedpac(replace(setting, head=("head.bias",))), federated())
    with pytest.raises(InputError, match=r"Setting\.head = .* and not all of them"):
        recipes.fedpac(replace(setting, head=("body.", "head.")))
    with pytest.raises(InputError, match=r"fedpac_drm_repo counts.*Local\(steps=10\)$"):
        recipes.fedpac_drm_repo(setting)
    with pytest.raises(InputError, match="FedPAC lam must be 0 or more, got -1"):
        recipes.fedpac(setting, lam=-1.0)
    with pytest.raises(InputError, match="decides which parameters move in its two phases"):
        recipes.fedpac(replace(setting, local=Local(only=("head.",))))
    with pytest.raises(InputError, match="ToPrototypes lam must be a positive number, got 0"):
        ToPrototypes(0.0)


def test_features_are_taken_in_evaluation_mode(normed: Model) -> None:
    """Running statistics are those after training; averaged over clients like the body."""
    federation = make_federation(normed)
    setting = Setting(normed, TARGET, Local(lr=0.1, epochs=1, batch=7))
    algorithm = recipes.fedpac(setting)
    job = one_job(algorithm, federation, 3)
    update, _ = algorithm.client_update(*job[1:5])
    body = {k: v + update["delta"][k] for k, v in job.message["params"].items()}
    params, after = body | update["head"], update["buffers"] | update["counters"]
    k = int(job.data.y[0])
    features = normed(params, after, job.data.x)["features"]
    mean = features[job.data.y == k].mean(0)
    assert float((update["prototypes"]["mean"][k] - mean).abs().max()) < 1e-5
    fresh = normed.train(params, after, job.data.x)[0]["features"][job.data.y == k].mean(0)
    assert float((fresh - mean).abs().max()) > 1e-3
    assert final(algorithm, federation, 3).loss > 0
