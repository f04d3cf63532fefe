"""Local training and loss terms against closed forms and PyTorch's own optimiser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.client.decorrelation import Decorrelation
from fedshift.client.distilling import NotTrueDistillation, VacantDistillation
from fedshift.client.local import GradFn, Gradient, Local, Trained, gradient_of, plan_all
from fedshift.client.objectives import (
    Contrastive,
    CrossEntropy,
    Proximal,
    Term,
    View,
    batch_mean,
)
from fedshift.client.oracles import Clip, Sam
from fedshift.client.prototypes import ToPrototypes
from fedshift.client.schedules import Cosine
from fedshift.client.shares import CountAdjusted, CountMargins, LogitSuppression
from fedshift.data import Batch, Plan, client_data, take
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.models.dense import Mlp
from fedshift.outputs import check_classes
from fedshift.tree import add, sq_norm, sub
from support.federations import CLASSES, FEATURES, make_clients


class Quadratic(Term):
    """(1/2) theta' A theta - b' theta, whatever the batch."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __call__(self, view: View) -> Tensor:
        p = view.params["weight"].flatten()
        return p @ self.a @ p / 2 - self.b @ p


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.01)])
def test_local_sgd_is_torch_sgd(mlp: Model, momentum: float, decay: float) -> None:
    client = make_clients()[1]
    local = Local(lr=0.05, epochs=3, batch=8, momentum=momentum, decay=decay)
    plan = plan_all({"train0": local}, client, 1, 0, 1)["train0"]
    params, _ = mlp.init()
    got = local(mlp, CrossEntropy(), params, {}, {}, client, plan)

    net = Mlp((FEATURES,), (10,), CLASSES)
    net.load_state_dict(params)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
    losses = []
    for s in range(plan.steps):
        batch = take(client, plan, s)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch.x)["logits"], batch.y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, v in net.state_dict().items():
        assert float((got.params[name] - v).abs().max()) < 2e-6
    assert float(got.loss) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(("decay", "epochs"), [(0.0, 10), (0.02, 3)])
def test_local_adam_is_torch_adam(mlp: Model, decay: float, epochs: int) -> None:
    client = make_clients()[3]
    params, _ = mlp.init()

    def ours(**changed: float) -> dict[str, Tensor]:
        local = replace(adam, **changed)
        plan = plan_all({"train0": local}, client, 1, 0, 3)["train0"]
        return local(mlp, CrossEntropy(), params, {}, {}, client, plan).params

    adam = Local(lr=0.003, epochs=epochs, batch=8, decay=decay, optimizer="adam")
    net = Mlp((FEATURES,), (10,), CLASSES)
    net.load_state_dict(params)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003, weight_decay=decay)
    plan = plan_all({"train0": adam}, client, 1, 0, 3)["train0"]
    for s in range(plan.steps):
        batch = take(client, plan, s)
        optimizer.zero_grad()
        F.cross_entropy(net(batch.x)["logits"], batch.y).backward()
        optimizer.step()

    def difference(values: dict[str, Tensor]) -> float:
        return max(float((values[k] - v).abs().max()) for k, v in net.state_dict().items())

    # Without decay the operations are torch's own, in its order.
    assert difference(ours()) <= (1e-6 if decay else 0.0)
    assert difference(ours(decay=decay + 0.01)) > 1e-4
    assert difference(ours(lr=0.0031)) > 1e-4


def test_adams_first_step_is_the_sign_of_the_gradient(mlp: Model) -> None:
    """lr g / (|g| + eps): both corrections divide out; moments start anew in every phase."""
    client, watch = make_clients()[0], Recorder()
    local = Local(lr=0.01, steps=1, batch=9, optimizer="adam")
    params = {k: v.double() for k, v in mlp.init()[0].items()}
    data = client._replace(x=client.x.double(), w=client.w.double())
    for start in (params, {k: v + 0.1 for k, v in params.items()}):
        plan = plan_all({"t": local}, data, 1, 0, 0)["t"]
        end = local(mlp, CrossEntropy(), start, {}, {}, data, plan, watch).params
        grad = watch.seen[-1][1]
        for name in start:
            step = 0.01 * grad[name] / (grad[name].abs() + 1e-8)
            assert float((start[name] - end[name] - step).abs().max()) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_padding_steps_change_nothing(mlp: Model, optimizer: Any) -> None:
    """Steps and rows of weight 0 between those that count: moments and their count stay."""
    client, (params, buffers) = make_clients()[2], mlp.init()
    momentum = 0.9 if optimizer == "sgd" else 0.0
    local = Local(lr=0.02, epochs=2, batch=8, momentum=momentum, optimizer=optimizer)
    plan = plan_all({"t": local}, client, 1, 0, 2)["t"]
    gaps = torch.tensor([0, 4, 1, 4, 4, 2, 3])  # 4 is a step of padding

    def padded(rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.zeros_like(rows[:1])])[gaps]

    def trained(used: Plan) -> Trained:
        return local(mlp, CrossEntropy(), params, buffers, {}, client, used)

    loose = plan._replace(rows=padded(plan.rows), weight=padded(plan.weight), sizes=None)
    same = plan._replace(rows=plan.rows[[0, 1, 2, 3]], weight=plan.weight[[0, 1, 2, 3]])
    order = plan._replace(rows=plan.rows[gaps[gaps < 4]], weight=plan.weight[gaps[gaps < 4]])
    result, wanted = trained(loose), trained(order._replace(sizes=None))
    for name in params:
        assert torch.equal(result.params[name], wanted.params[name])
    for name in buffers:
        assert torch.equal(result.buffers[name], wanted.buffers[name])
    assert float(result.loss) == pytest.approx(float(wanted.loss), rel=1e-6)
    assert all(torch.equal(trained(same).params[k], wanted.params[k]) for k in params)
    # One more step that counts moves the result, padding or not.
    more = loose._replace(weight=torch.ones_like(loose.weight))
    assert any(not torch.equal(trained(more).params[k], wanted.params[k]) for k in params)


def test_prox_reaches_its_fixed_point() -> None:
    """argmin (1/2) t'At - b't + (mu/2)||t - t0||^2 = (A + mu I)^{-1}(b + mu t0)."""
    a = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    b, start, mu = torch.tensor([1.0, -1.0]).double(), torch.tensor([[3.0, -2.0]]).double(), 0.7
    model = Model(nn.Linear(2, 1, bias=False))
    data = client_data(torch.zeros(4, 2).double(), torch.zeros(4).long(), 0)
    local = Local(lr=0.3, steps=300, batch=4)
    plan = plan_all({"train0": local}, data, 1, 0, 0)["train0"]
    anchor = {"weight": start}
    objective = Quadratic(a, b) + Proximal(mu)
    end = local(model, objective, anchor, {}, {"anchor": anchor}, data, plan).params["weight"]
    exact = torch.linalg.solve(a + mu * torch.eye(2).double(), b + mu * start.flatten())
    assert float((end.flatten() - exact).abs().max()) < 1e-12
    free = local(model, Quadratic(a, b), anchor, {}, {"anchor": anchor}, data, plan).params[
        "weight"
    ]
    assert float((free.flatten() - exact).abs().max()) > 1e-2


class Recorder:
    """An oracle that changes nothing and records each point and gradient."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def __call__(self, gradient: GradFn) -> GradFn:
        def watched(params: dict[str, Tensor]) -> Gradient:
            result = gradient(params)
            self.seen.append((params, result.grad))
            return result

        return watched


def test_prox_holds_clients_near(mlp: Model) -> None:
    """||theta - theta_t|| <= max ||grad CE|| / mu along the whole path, for lr <= 1/mu."""
    mu, client, watch = 5.0, make_clients()[3], Recorder()
    params = {k: v.double() for k, v in mlp.init()[0].items()}
    data = client._replace(x=client.x.double(), w=client.w.double())
    local = Local(lr=0.15, epochs=20, batch=8)
    plan = plan_all({"t": local}, data, 1, 0, 3)["t"]
    local(mlp, CrossEntropy() + Proximal(mu), params, {}, {"anchor": params}, data, plan, watch)
    away = [sub(p, params) for p, _ in watch.seen]
    plain = [add(g, d, -mu) for (_, g), d in zip(watch.seen, away, strict=True)]
    bound = max(float(sq_norm(g)) ** 0.5 for g in plain) / mu
    assert max(float(sq_norm(d)) ** 0.5 for d in away) <= bound
    free = local(mlp, CrossEntropy(), params, {}, {}, data, plan).params
    assert float(sq_norm(sub(free, params))) ** 0.5 > bound  # without the pull it is passed


def test_terms_agree_with_finite_differences(mlp: Model) -> None:
    client = make_clients()[2]
    batch = Batch(
        client.x.double(), client.y, torch.rand(16).double(), torch.arange(16), torch.tensor(16.0)
    )
    params = {k: v.double() for k, v in mlp.init()[0].items()}
    anchor = {k: v + 0.1 for k, v in params.items()}
    objective = CrossEntropy() + 0.5 * Proximal(2.0)

    def loss(p: dict[str, Tensor]) -> float:
        view = View(mlp, p, mlp(p, {}, batch.x), batch, {"anchor": anchor})
        return float(objective(view))

    result = gradient_of(mlp, objective, {}, {}, batch, {"anchor": anchor})(params)
    assert float(result.loss) == pytest.approx(loss(params))
    for name, at in (("head.weight", (2, 3)), ("body.1.bias", (4,)), ("body.1.weight", (0, 7))):
        step = torch.zeros_like(params[name])
        step[at] = 1e-6
        slope = (
            loss(params | {name: params[name] + step}) - loss(params | {name: params[name] - step})
        ) / 2e-6
        assert float(result.grad[name][at]) == pytest.approx(slope, abs=1e-7)


def test_importance_divides_by_rows_and_not_by_weights() -> None:
    batch = Batch(torch.zeros(4, 1), torch.zeros(4).long(), torch.tensor([0.5, 0.5, 2.0, 0.0]),
                  torch.arange(4), torch.tensor(4.0))  # fmt: skip
    values = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert float(batch_mean(values, batch)) == pytest.approx((0.5 + 1.0 + 6.0) / 4)


def test_only_named_parameters_move(mlp: Model) -> None:
    client, (params, _) = make_clients()[0], mlp.init()
    local = Local(only=("head.",))
    plan = plan_all({"t": local}, client, 1, 0, 0)["t"]
    end = local(mlp, CrossEntropy(), params, {}, {}, client, plan).params
    moved = {k for k in params if not torch.equal(end[k], params[k])}
    assert moved == {"head.weight", "head.bias"}


def test_frozen_parameters_stay(mlp: Model) -> None:
    """With decay and momentum too; frozen wins over only."""
    client, (params, _) = make_clients()[0], mlp.init()
    local = Local(frozen=("head.",), momentum=0.9, decay=0.1, epochs=2)
    plan = plan_all({"t": local}, client, 1, 0, 0)["t"]
    end = local(mlp, CrossEntropy(), params, {}, {}, client, plan).params
    moved = {k for k in params if not torch.equal(end[k], params[k])}
    assert moved == {"body.1.weight", "body.1.bias"}
    both = replace(local, only=("body.", "head."))
    assert set(both.parts(mlp, params)[0]) == moved
    with pytest.raises(InputError, match=r"only=\('head.',\) and frozen=\('head.',\) leave no"):
        replace(local, only=("head.",))(mlp, CrossEntropy(), params, {}, {}, client, plan)


def test_a_schedule_sets_the_rate_by_round(mlp: Model) -> None:
    local = Local(lr=lambda t: 1.0 / t)
    client = make_clients()[0]
    rates = [float(plan_all({"t": local}, client, t, 0, 0)["t"].lr) for t in (1, 2, 4)]
    assert rates == [1.0, 0.5, 0.25]


def test_a_client_without_examples_changes_nothing(mlp: Model) -> None:
    empty = client_data(torch.zeros(0, FEATURES), torch.zeros(0).long(), 0)
    params, _ = mlp.init()
    plan = plan_all({"t": Local()}, empty, 1, 0, 0)["t"]
    end = Local()(mlp, CrossEntropy(), params, {}, {}, empty, plan)
    assert all(torch.equal(end.params[k], params[k]) for k in params)
    assert float(end.loss) == 0.0


def test_a_model_that_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(InputError, match=r"logits \(2, 3\) for 2 inputs; the task has 5 classes"):
        check_classes(Model(nn.Linear(4, 3)), x, 5)

    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"out": x}

    with pytest.raises(InputError, match=r"returns \['out'\]; it must return"):
        check_classes(Model(Odd(4, 3)), x, 3)


@pytest.mark.parametrize(
    ("make", "at_fault"),
    [
        (lambda v: Proximal(v), "Proximal mu"),
        (lambda v: Contrastive(v), "Contrastive mu"),
        (lambda v: Contrastive(1.0, v), "Contrastive tau"),
        (lambda v: Decorrelation(v), "Decorrelation beta"),
        (lambda v: NotTrueDistillation(v), "NotTrueDistillation beta"),
        (lambda v: NotTrueDistillation(1.0, v), "NotTrueDistillation tau"),
        (lambda v: VacantDistillation(3, v), "VacantDistillation strength"),
        (lambda v: CountAdjusted(3, v), "CountAdjusted least"),
        (lambda v: CountMargins(3, v), "CountMargins tau"),
        (lambda v: LogitSuppression(3, v), "LogitSuppression strength"),
        (lambda v: ToPrototypes(v), "ToPrototypes lam"),
        (lambda v: Sam(v), "Sam rho"),
        (lambda v: Clip(v), "Clip norm"),
        (lambda v: Cosine(v, 3), "Cosine lr"),
    ],
)
def test_numbers_of_terms_and_oracles_are_positive(make: Any, at_fault: str) -> None:
    make(1.0)
    for v in (0.0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(InputError, match=f"{at_fault} must be a (positive )?number"):
            make(v)
