"""SAM and clipping: their equations, and when they are FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import GradFn, Gradient, Local, gradient_of, plan_all
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.client.oracles import Clip, Sam
from fedshift.data import client_data
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.tree import Params
from support.by_hand import max_difference
from support.comparing import same, whole
from support.federations import make_clients, make_federation, one_job


def test_rho_zero_is_fedavg(setting: Setting, federated: Any) -> None:
    plain = recipes.fedavg(setting)
    assert recipes.fedsam(setting, rho=0.0) == plain
    assert same(recipes.fedsam(setting, rho=0.0), plain, federated()) == 0
    assert same(recipes.fedsam(setting, rho=0.05), plain, federated()) > 1e-5


class Linear(Term):
    """g . theta, whatever the batch."""

    def __call__(self, view: View) -> Tensor:
        return sum((v * torch.arange(1.0, v.numel() + 1).reshape(v.shape)).sum()
                   for v in view.params.values())  # fmt: skip


def test_a_linear_loss_has_no_neighbours(mlp: Model, federated: Any) -> None:
    local = Local(lr=0.01, batch=8)
    sharp = replace(local, oracles=(Sam(0.7),))
    one = FedAvg(mlp, objective=Linear(), local=local)
    assert same(one, replace(one, local=sharp), federated()) == 0
    curved = FedAvg(mlp, local=local)
    assert same(curved, replace(curved, local=sharp), federated()) > 1e-3


def quadratic(a: Tensor, b: Tensor) -> GradFn:
    """g(theta) = A theta - b; the buffer records where it was taken."""

    def gradient(params: Params) -> Gradient:
        theta = params["theta"]
        return Gradient({"theta": a @ theta - b}, {"at": theta}, theta @ a @ theta / 2 - b @ theta)

    return gradient


A = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
B = torch.tensor([1.0, -1.0], dtype=torch.float64)


def test_sam_on_a_quadratic() -> None:
    """A (theta + rho g / ||g||) - b, with the loss and the buffers of theta."""
    theta, rho = torch.tensor([3.0, -2.0], dtype=torch.float64), 0.4
    result = Sam(rho)(quadratic(A, B))({"theta": theta})
    g = A @ theta - B
    expected = A @ (theta + rho * g / g.norm()) - B
    assert float((result.grad["theta"] - expected).abs().max()) < 1e-11  # 1e-12 beside ||g||
    assert float((result.grad["theta"] - g).abs().max()) > 0.1
    assert torch.equal(result.buffers["at"], theta)
    assert torch.equal(result.loss, quadratic(A, B)({"theta": theta}).loss)


def test_a_zero_gradient_leaves_theta() -> None:
    solution = {"theta": torch.linalg.solve(A, B)}
    exact = quadratic(torch.eye(2, dtype=torch.float64), solution["theta"])
    assert not Sam(0.4)(exact)(solution).grad["theta"].any()
    assert Sam(0.4)(exact)({"theta": solution["theta"] + 1}).grad["theta"].any()


def test_sam_is_not_scaled_by_the_rate_and_leaves_decay_out() -> None:
    """theta <- theta - lr (g(theta + rho g/||g||) + decay theta), g without the decay."""

    class Quadratic(Term):
        def __call__(self, view: View) -> Tensor:
            p = view.params["weight"].flatten()
            return p @ A @ p / 2 - B @ p

    model = Model(nn.Linear(2, 1, bias=False))
    data = client_data(torch.zeros(4, 2).double(), torch.zeros(4).long(), 0)
    theta, rho, decay = torch.tensor([3.0, -2.0], dtype=torch.float64), 0.4, 0.3
    g = A @ theta - B
    for lr in (0.1, 0.01):
        local = Local(lr=lr, epochs=1, batch=4, decay=decay, oracles=(Sam(rho),))
        plan = plan_all({"train0": local}, data, 1, 0, 0)["train0"]
        done = local(model, Quadratic(), {"weight": theta[None]}, {}, {}, data, plan)
        sharp = A @ (theta + rho * g / g.norm()) - B
        expected = theta - lr * (sharp + decay * theta)
        assert float((done.params["weight"].flatten() - expected).abs().max()) < 1e-12
        inside = g + decay * theta
        wrong = A @ (theta + rho * inside / inside.norm()) - B + decay * theta
        assert float((wrong - (sharp + decay * theta)).abs().max()) > 1e-3


def test_running_statistics_move_once_per_step(normed: Model) -> None:
    """As without SAM after one step from the same start; counters count steps, not passes."""
    federation = make_federation(normed)
    local = Local(lr=0.1, steps=1, batch=16)
    plain = FedAvg(normed, local=local)
    sharp = replace(plain, local=replace(local, oracles=(Sam(0.5),)))
    one, two = (a.client_update(*one_job(a, federation, 3)[1:5])[0] for a in (plain, sharp))
    assert max_difference(one["buffers"], two["buffers"]) == 0
    assert int(two["counters"]["body.1.num_batches_tracked"]) == 1
    assert max_difference(one["delta"], two["delta"]) > 1e-4
    assert torch.equal(one["report"]["loss"], two["report"]["loss"])


def test_the_norm_is_over_all_parameters(mlp: Model) -> None:
    """And does not depend on the order of their names."""
    params, _ = mlp.init()
    context = {"anchor": params}
    gradient = gradient_of(mlp, CrossEntropy(), {}, {}, whole(make_clients()[1]), context)
    g = gradient(params).grad
    norm = torch.cat([v.flatten() for v in g.values()]).norm()
    moved = {k: v + 0.5 * g[k] / norm for k, v in params.items()}
    grads = Sam(0.5)(gradient)(params).grad
    assert max_difference(grads, gradient(moved).grad) < 1e-6
    per_tensor = {k: v + 0.5 * g[k] / g[k].norm() for k, v in params.items()}
    assert max_difference(grads, gradient(per_tensor).grad) > 1e-3
    backwards = Sam(0.5)(gradient)(dict(reversed(params.items()))).grad
    assert max_difference(grads, backwards) == 0


def test_clipping_by_hand() -> None:
    theta = torch.tensor([3.0, -2.0], dtype=torch.float64)
    g = A @ theta - B
    clipped = Clip(0.5)(quadratic(A, B))({"theta": theta})
    assert float((clipped.grad["theta"] - 0.5 * g / g.norm()).abs().max()) < 1e-15
    free = Clip(100.0)(quadratic(A, B))({"theta": theta})
    assert torch.equal(free.grad["theta"], g)
    flat = quadratic(torch.eye(2, dtype=torch.float64), theta)
    assert not Clip(0.5)(flat)({"theta": theta}).grad["theta"].any()


def test_clipping_out_of_reach_is_fedavg(setting: Setting, federated: Any) -> None:
    plain = recipes.fedavg(setting)

    def clipped(norm: float) -> FedAvg:
        return replace(plain, local=replace(setting.local, oracles=(Clip(norm),)))

    assert same(plain, clipped(1e6), federated()) == 0
    assert same(plain, clipped(0.1), federated()) > 1e-3


def test_sam_and_clipping_commute(setting: Setting) -> None:
    """SAM uses its first gradient's direction only: the one applied is clipped either way."""
    bounded = replace(setting, local=replace(setting.local, oracles=(Clip(1.0),)))
    local = recipes.fedsam(bounded, rho=0.3).local
    assert isinstance(local, Local)
    assert local.oracles == (Sam(0.3), Clip(1.0))
    theta = {"theta": torch.tensor([3.0, -2.0], dtype=torch.float64)}
    outer = Clip(1.0)(Sam(5.0)(quadratic(A, B)))(theta).grad["theta"]
    inner = Sam(5.0)(Clip(1.0)(quadratic(A, B)))(theta).grad["theta"]
    assert float(outer.norm()) == pytest.approx(1.0)
    assert float((outer - inner).abs().max()) < 1e-12
    free = Sam(5.0)(quadratic(A, B))(theta).grad["theta"]
    assert float((outer - free).abs().max()) > 1e-2
