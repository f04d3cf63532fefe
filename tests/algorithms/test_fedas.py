"""FedAS: the trace that weighs clients, and the alignment of bodies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.gradients import gradient_trace
from fedshift.client.local import Local
from fedshift.client.objectives import CrossEntropy, View
from fedshift.client.prototypes import ToClassMeans, ToPrevious
from fedshift.data import ClientData
from fedshift.engine.run import run
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.server.weights import BySize
from fedshift.tree import Params, Parts, weighted_sum
from support.by_hand import final, max_difference, softmax_federation, softmax_regression
from support.comparing import same, whole
from support.extras import fedas
from support.federations import (
    CLASSES,
    double,
    make_clients,
    make_federation,
    one_job,
)
from support.routing import routed_model


def trace_of(model: Model, params: Params, data: ClientData, batch: int) -> float:
    plan = Local(epochs=1, batch=batch).plan(len(data.y), 1, torch.Generator().manual_seed(0))
    return float(gradient_trace(model, CrossEntropy(), params, {}, {}, data, plan))


def test_the_trace_of_softmax_regression() -> None:
    """sum_s ||mean_b (p_b - e_{y_b}) (x_b, 1)'||^2; one by one, sum ||p - e_y||^2 (||x||^2 + 1)."""
    model, federation = softmax_regression(), softmax_federation((12, 20, 9))
    params, data = federation.params, federation.clients[1]
    p = (data.x @ params["weight"].T + params["bias"]).softmax(1)
    error = p - F.one_hot(data.y, CLASSES)
    inputs = torch.cat([data.x, torch.ones(20, 1)], dim=1)
    single = float((error.square().sum(1) * inputs.square().sum(1)).sum())
    assert trace_of(model, params, data, 1) == pytest.approx(single, rel=1e-12)
    at_once = float((error.T @ inputs / 20).square().sum())
    assert trace_of(model, params, data, 20) == pytest.approx(at_once, rel=1e-12)
    assert at_once < single / 20  # gradients cancel within a batch
    plan = Local(epochs=1, batch=8).plan(20, 1, torch.Generator().manual_seed(0))
    steps = [plan.rows[s][:n] for s, n in enumerate(plan.sizes or ())]
    each = [float((error[r].T @ inputs[r] / len(r)).square().sum()) for r in steps]
    assert trace_of(model, params, data, 8) == pytest.approx(sum(each), rel=1e-12)


def test_padding_has_no_trace_and_evaluation_mode_is_used(normed: Model) -> None:
    federation = make_federation(normed)
    data, params, buffers = federation.clients[3], federation.params, federation.buffers
    plan = Local(epochs=1, batch=8).plan(40, 1, torch.Generator().manual_seed(0))
    frame = (normed, CrossEntropy(), params, buffers, {}, data)
    trace = float(gradient_trace(*frame, plan))
    rows = torch.cat([plan.rows, torch.zeros(2, 8).long()])
    weight = torch.cat([plan.weight, torch.zeros(2, 8)])
    padded = plan._replace(rows=rows, weight=weight, sizes=None)
    assert float(gradient_trace(*frame, padded)) == trace
    counted = padded._replace(weight=torch.ones_like(weight))
    assert float(gradient_trace(*frame, counted)) > trace
    shifted = {k: v + 1 if v.is_floating_point() else v for k, v in buffers.items()}
    frame = (normed, CrossEntropy(), params, shifted, {}, data)
    assert float(gradient_trace(*frame, plan)) != pytest.approx(trace, rel=1e-3)


def fold(algorithm: FedAvg, traces: list[float], setting: Setting) -> tuple[Params, Parts, Params]:
    """(new body, stacked changes, old body) for made-up changes with these traces."""
    federation = double(make_federation(setting.model))
    server = algorithm.init(federation.params, {}, federation.table)
    ids = torch.arange(len(traces))
    source = generator(0, "changes")
    delta = {
        k: torch.randn(len(traces), *v.shape, generator=source, dtype=torch.float64)
        for k, v in server["params"].items()
    }
    updates = {
        "delta": delta, "buffers": {}, "counters": {},
        "fisher": {"trace": torch.tensor(traces, dtype=torch.float64)},
        "cohort": {"id": ids, "weight": algorithm.weigh(server, ids)},
    }  # fmt: skip
    return algorithm.server_update(server, updates, 0)["params"], delta, server["params"]


def moved(algorithm: FedAvg, traces: list[float], weights: list[float], setting: Setting) -> float:
    """How far the fold is from sum_i w_i delta_i."""
    new, delta, old = fold(algorithm, traces, setting)
    mean = weighted_sum(torch.tensor(weights, dtype=torch.float64), delta)
    return max_difference(new, {k: old[k] + mean[k] for k in old})


def test_clients_count_by_their_trace(setting: Setting) -> None:
    algorithm = fedas(setting.model, local=setting.local)
    assert moved(algorithm, [5.0] * 3, [1 / 3] * 3, setting) < 1e-15
    assert moved(algorithm, [1.0, 3.0, 4.0], [1 / 8, 3 / 8, 4 / 8], setting) < 1e-15
    assert moved(algorithm, [1e-9, 3e-9, 4e-9], [1 / 8, 3 / 8, 4 / 8], setting) < 1e-15
    assert moved(algorithm, [1.0, 3.0, 4.0], [1 / 3] * 3, setting) > 0.1


def test_without_any_trace_sizes_count(setting: Setting) -> None:
    algorithm = fedas(setting.model, local=setting.local)
    by_size = BySize()({"n": torch.tensor([9.0, 23.0, 16.0]).double()}).tolist()
    assert moved(algorithm, [0.0] * 3, by_size, setting) < 1e-15
    assert moved(algorithm, [0.0, 0.0, 1e-30], by_size, setting) > 0.1
    unweighted = fedas(setting.model, fisher=False, local=setting.local)
    assert moved(unweighted, [1.0, 3.0, 4.0], by_size, setting) < 1e-15


def test_buffers_take_the_same_weights(normed: Model) -> None:
    federation = make_federation(normed, make_clients(sizes=(16, 32, 8)))
    algorithm = fedas(normed, local=Local(epochs=1, batch=8))
    jobs = [one_job(algorithm, federation, i) for i in range(3)]
    updates = [algorithm.client_update(*job[1:5])[0] for job in jobs]
    traces = torch.stack([update["fisher"]["trace"] for update in updates])
    name = "body.1.running_mean"
    expected = sum(
        t * u["buffers"][name].double() for t, u in zip(traces / traces.sum(), updates, strict=True)
    )
    got = final(algorithm, federation, 1).server["buffers"][name]
    assert float((got.double() - expected).abs().max()) < 1e-7
    by_size = sum(
        n / 56 * u["buffers"][name].double() for n, u in zip((16, 32, 8), updates, strict=True)
    )
    assert float((got.double() - by_size).abs().max()) > 1e-4


def test_alignment_begins_at_the_second_participation(setting: Setting, federated: Any) -> None:
    aligned = fedas(setting.model, align=Local(lr=0.1, batch=16), local=setting.local)
    plain = fedas(setting.model, align=None, local=setting.local)
    assert same(aligned, plain, federated(), 1) == 0
    assert same(aligned, plain, federated(), 2) > 1e-3
    rounds = list(run(aligned, federated(), 3, cohort=3))
    late = set(rounds[2].trained) - set(rounds[0].trained) - set(rounds[1].trained)
    seen = {i for r in rounds for i in r.trained}
    assert all(bool(rounds[-1].states[i]["history"]["trained"]) for i in seen)
    fresh = aligned.init_client(federated().params, {}, federated().clients[0])
    assert not bool(fresh["history"]["trained"])
    assert late or seen != set(range(6))  # some clients came later than others, or never


@pytest.mark.parametrize("match", ["classes", "examples"])
def test_it_may_begin_at_the_first(match: Any, setting: Setting, federated: Any) -> None:
    """A client is led back to the first model, which in round 1 its examples already match."""
    later = fedas(
        setting.model, align=Local(lr=0.1, batch=16), match=match, fisher=False, local=setting.local
    )
    given = {"match": match, "fisher": False, "first": True, "local": setting.local}
    at_once = fedas(setting.model, align=Local(lr=0.1, batch=16), **given)
    assert (same(at_once, later, federated(), 1) < 1e-6) == (match == "examples")
    heavy = fedas(setting.model, align=Local(lr=0.1, batch=16, decay=0.1), **given)
    assert same(heavy, later, federated(), 1) > 1e-4
    rounds = list(run(at_once, federated(), 2, cohort=3))
    assert set(rounds[1].trained) - set(rounds[0].trained)  # clients that come for the first time
    other = list(run(later, federated(), 2, cohort=3))
    assert max_difference(rounds[1].server["params"], other[1].server["params"]) > 1e-4


def distance(algorithm: FedAvg, body: Params, state: Parts, data: ClientData) -> float:
    """ToClassMeans between a body's features and the class means of the client's last body."""
    old = algorithm.model(state["body"] | state["private"], {}, data.x)["features"]
    new = algorithm.model(body | state["private"], {}, data.x)["features"]
    means = [old[data.y == k].mean(0) for k in data.y.unique()]
    return float(
        sum(F.mse_loss(new[data.y == k], m.expand_as(new[data.y == k]))
            for k, m in zip(data.y.unique(), means, strict=True))
    )  # fmt: skip


def test_alignment_leads_the_body_towards_the_old_features(
    setting: Setting, federated: Any
) -> None:
    """With a learning rate of 0 for training, the alignment alone is seen."""
    federation = double(federated())
    still = Local(lr=1e-300, epochs=1, batch=8)
    algorithm = fedas(setting.model, align=Local(lr=0.1, epochs=5, batch=16), local=still)
    job = one_job(algorithm, federation, 3)
    body = {k: v + 0.3 for k, v in job.message["params"].items()}
    state = job.state | {"history": {"trained": torch.tensor(True)}}
    message = job.message | {"params": body}
    before = {k: v.clone() for k, v in body.items()}
    update, new_state = algorithm.client_update(message, state, job.data, job.plans)
    aligned = {k: v + update["delta"][k] for k, v in body.items()}
    there, here = (distance(algorithm, b, state, job.data) for b in (body, aligned))
    assert here < 0.5 * there
    assert max_difference(new_state["private"], state["private"]) == 0
    assert max_difference(body, before) == 0  # the server's own model is not aligned along with it
    first = job.state | {"history": {"trained": torch.tensor(False)}}
    unmoved, _ = algorithm.client_update(message, first, job.data, job.plans)
    assert max(float(v.abs().max()) for v in unmoved["delta"].values()) == 0


def value(
    term: ToClassMeans | ToPrevious, model: Model, data: ClientData, context: Parts
) -> Tensor:
    params, buffers = model.init()
    out = model(params, buffers, data.x)
    return term(View(model, params, out, whole(data), context))


def test_a_projected_network_is_matched_before_its_projection() -> None:
    """The backbone's features, as in the authors' code, not those that the head gets."""
    model, data = routed_model(None), make_clients()[3]
    params, _ = model.init()
    last = {k: v + 0.2 for k, v in params.items()}
    new, old = (model(p, {}, data.x) for p in (params, last))
    got = value(ToPrevious(), model, data, {"previous": last, "previous_buffers": {}})
    assert new["trunk"].shape == (40, 10)
    assert torch.equal(model.net.body[1](new["trunk"]), new["features"])  # type: ignore[index,operator,union-attr]
    assert float(got - F.mse_loss(new["trunk"], old["trunk"])) == pytest.approx(0, abs=1e-6)
    assert abs(float(got - F.mse_loss(new["features"], old["features"]))) > 1e-3
    goal = {"mean": torch.zeros(CLASSES, 6), "held": torch.ones(CLASSES)}
    assert float(value(ToClassMeans(), model, data, {"prototypes": goal})) > 0  # 6 numbers, not 10
