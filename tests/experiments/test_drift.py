"""The drift of clients' gradients, against gradients taken one by one."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.experiments.measures.distances import gradient_drift
from fedshift.tree import Params
from support.federations import make_clients, make_federation
from support.routing import routed_model


def by_hand(which: str, shift: float) -> float:
    model, clients = routed_model(), make_clients()
    params, buffers = model.init()
    gradients: list[torch.Tensor] = []
    for i, client in enumerate(clients):
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        out = model(leaves, buffers, client.x + shift * i)
        logits = out["logits"] if which == "class" else out["client_logits"]
        label = client.y if which == "class" else torch.full_like(client.y, i)
        loss = torch.nn.functional.cross_entropy(logits, label)
        # The client loss does not reach the class branch's own layers.
        reached = torch.autograd.grad(
            out["client_logits"].sum(), list(leaves.values()), retain_graph=True, allow_unused=True
        )
        body = [
            v for (k, v), g in zip(leaves.items(), reached, strict=True)
            if k.startswith("body.") and g is not None
        ]  # fmt: skip
        assert 0 < len(body) < sum(k.startswith("body.") for k in leaves)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, body)]))
    n = torch.tensor([float(len(c.y)) for c in clients])
    w, g = n / n.sum(), torch.stack(gradients)
    return float((w * (g - (w[:, None] * g).sum(0)).square().sum(1)).sum())


@pytest.mark.few(2)
@pytest.mark.parametrize("which", ["class", "client"])
@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_drift_is_the_spread_of_whole_gradients(which: str, shift: float) -> None:
    model = routed_model()
    clients = tuple(c._replace(x=c.x + shift * i) for i, c in enumerate(make_clients()))
    federation = make_federation(model, clients)
    pair: tuple[Params, Params] = model.init()
    drift = gradient_drift(model, (pair,) * len(clients), federation)
    assert drift[f"drift_{which}"] == pytest.approx(by_hand(which, shift), rel=1e-4)
    other = {"class": "client", "client": "class"}[which]
    assert drift[f"drift_{other}"] != pytest.approx(by_hand(which, shift), rel=1e-2)


def test_equal_clients_do_not_drift_in_the_class_loss() -> None:
    model = routed_model()
    first = make_clients()[3]
    twins = tuple(first._replace(id=torch.tensor(i)) for i in range(6))
    federation = make_federation(model, twins)
    drift = gradient_drift(model, (model.init(),) * 6, federation)
    assert drift["drift_class"] < 1e-10
    assert drift["drift_client"] > 1e-4


def test_two_networks_in_one_have_no_drift_to_compare() -> None:
    """The client loss reaches no parameter named "body.": NaN, not 0."""
    model = routed_model()
    federation = make_federation(model)
    params, buffers = model.init()
    drift = gradient_drift(model, ((params, buffers),) * 6, federation, shared=("head.",))
    assert all(math.isnan(v) for v in drift.values())
