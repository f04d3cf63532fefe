"""FedPAC: class means, heads that live on the server, and when it is FedRep."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.client.prototypes import class_moments, head_shape, statistics
from fedshift.data import ClientData
from fedshift.engine.run import Federation, run
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Params, Parts
from support.by_hand import final, max_difference
from support.extras import fedpac
from support.federations import (
    CLASSES,
    FEATURES,
    double,
    make_clients,
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


def trained_clients(
    algorithm: FedAvg, federation: Federation
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
    algorithm, federation = fedpac(setting.model, local=setting.local), double(federated())
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


def test_a_missing_prototype_is_replaced_by_the_clients_own(
    setting: Setting, federated: Any
) -> None:
    """As if the server had sent the client's own mean for that class, taken before training."""
    algorithm, federation = fedpac(setting.model, local=setting.local), federated()
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
