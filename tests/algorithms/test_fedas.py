"""FedAS: the trace that weighs clients, and the alignment of bodies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.gradients import gradient_trace
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy, View
from fedshift.client.prototypes import ToClassMeans, ToPrevious
from fedshift.client.sharing import Share
from fedshift.data import ClientData, client_data
from fedshift.engine.run import run
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.server.combine import Mean
from fedshift.server.confree import ConFree
from fedshift.server.weights import BySize, Uniform
from fedshift.tree import Params, Parts, weighted_sum
from support.by_hand import final, max_difference, softmax_federation, softmax_regression
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


def test_more_examples_are_a_larger_trace() -> None:
    """The same examples twice: twice the batches, twice the trace. n_i acts through it."""
    model, federation = softmax_regression(), softmax_federation((12, 20, 9))
    one = federation.clients[0]
    twice = client_data(torch.cat([one.x, one.x]), torch.cat([one.y, one.y]), 0)
    twice = twice._replace(w=twice.w.double())
    small, large = (trace_of(model, federation.params, c, 1) for c in (one, twice))
    assert large == pytest.approx(2 * small, rel=1e-12)
    assert trace_of(model, federation.params, one, 4) != pytest.approx(small, rel=0.1)


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


def fold(algorithm: FedAs, traces: list[float], setting: Setting) -> tuple[Params, Parts, Params]:
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


def moved(algorithm: FedAs, traces: list[float], weights: list[float], setting: Setting) -> float:
    """How far the fold is from sum_i w_i delta_i."""
    new, delta, old = fold(algorithm, traces, setting)
    mean = weighted_sum(torch.tensor(weights, dtype=torch.float64), delta)
    return max_difference(new, {k: old[k] + mean[k] for k in old})


def test_clients_count_by_their_trace(setting: Setting) -> None:
    algorithm = FedAs(setting.model, local=setting.local)
    assert moved(algorithm, [5.0] * 3, [1 / 3] * 3, setting) < 1e-15
    assert moved(algorithm, [1.0, 3.0, 4.0], [1 / 8, 3 / 8, 4 / 8], setting) < 1e-15
    assert moved(algorithm, [1e-9, 3e-9, 4e-9], [1 / 8, 3 / 8, 4 / 8], setting) < 1e-15
    assert moved(algorithm, [1.0, 3.0, 4.0], [1 / 3] * 3, setting) > 0.1


def test_without_any_trace_sizes_count(setting: Setting) -> None:
    algorithm = FedAs(setting.model, local=setting.local)
    by_size = BySize()({"n": torch.tensor([9.0, 23.0, 16.0]).double()}).tolist()
    assert moved(algorithm, [0.0] * 3, by_size, setting) < 1e-15
    assert moved(algorithm, [0.0, 0.0, 1e-30], by_size, setting) > 0.1
    unweighted = replace(algorithm, fisher=False)
    assert moved(unweighted, [1.0, 3.0, 4.0], by_size, setting) < 1e-15


def test_buffers_take_the_same_weights(normed: Model) -> None:
    federation = make_federation(normed, make_clients(sizes=(16, 32, 8)))
    algorithm = FedAs(normed, local=Local(epochs=1, batch=8))
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


def test_without_alignment_and_traces_it_is_fedper(setting: Setting, federated: Any) -> None:
    """With uniform weights: the uniform mean. Bit for bit, heads as well."""
    bare = FedAs(
        setting.model, align=None, fisher=False, local=setting.local, combine=Mean(Uniform())
    )
    host = FedAvg(
        setting.model, local=setting.local, share=Share(("head.",)), combine=Mean(Uniform())
    )
    one, two = final(bare, federated(), 3, cohort=4), final(host, federated(), 3, cohort=4)
    assert max_difference(one.server["params"], two.server["params"]) == 0
    assert all(
        max_difference(one.states[i]["private"], two.states[i]["private"]) == 0 for i in one.states
    )
    for other in (replace(bare, fisher=True), replace(bare, align=Local(lr=0.1, batch=16))):
        assert same(bare, other, federated(), 3) > 1e-3


def test_alignment_begins_at_the_second_participation(setting: Setting, federated: Any) -> None:
    aligned = FedAs(setting.model, align=Local(lr=0.1, batch=16), local=setting.local)
    plain = replace(aligned, align=None)
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
    later = FedAs(
        setting.model, align=Local(lr=0.1, batch=16), match=match, fisher=False, local=setting.local
    )
    at_once = replace(later, first=True)
    assert (same(at_once, later, federated(), 1) < 1e-6) == (match == "examples")
    heavy = replace(at_once, align=Local(lr=0.1, batch=16, decay=0.1))
    assert same(heavy, later, federated(), 1) > 1e-4
    rounds = list(run(at_once, federated(), 2, cohort=3))
    assert set(rounds[1].trained) - set(rounds[0].trained)  # clients that come for the first time
    other = list(run(later, federated(), 2, cohort=3))
    assert max_difference(rounds[1].server["params"], other[1].server["params"]) > 1e-4


def distance(algorithm: FedAs, body: Params, state: Parts, data: ClientData) -> float:
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
    algorithm = FedAs(setting.model, align=Local(lr=0.1, epochs=5, batch=16), local=still)
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


def test_each_class_of_a_batch_counts_once(mlp: Model) -> None:
    data = make_clients()[3]
    goal = torch.randn(CLASSES, 10, generator=generator(0, "goal"))
    context = {"prototypes": {"mean": goal, "held": torch.ones(CLASSES)}}
    features = mlp(*mlp.init(), data.x)["features"]
    labels = data.y.unique()
    parts = [F.mse_loss(features[data.y == k], goal[k].expand(int((data.y == k).sum()), 10))
             for k in labels]  # fmt: skip
    got = value(ToClassMeans(), mlp, data, context)
    assert float(got - sum(parts)) == pytest.approx(0, abs=1e-5)
    assert abs(float(got) - len(labels) * float(F.mse_loss(features, goal[data.y]))) > 1e-2
    some = {"prototypes": {"mean": goal, "held": torch.zeros(CLASSES)}}
    some["prototypes"]["held"][labels[0]] = 1
    left = value(ToClassMeans(), mlp, data, some)
    assert float(left - parts[0]) == pytest.approx(0, abs=1e-5)
    padded = ClientData(
        torch.cat([data.x, data.x[:4] + 9]), torch.cat([data.y, data.y[:4]]),
        torch.cat([data.w, torch.zeros(4)]), data.id,
    )  # fmt: skip
    assert float(value(ToClassMeans(), mlp, padded, context) - got) == pytest.approx(0, abs=1e-5)


def test_examples_are_matched_to_the_last_model(mlp: Model) -> None:
    data = make_clients()[3]
    params, _ = mlp.init()
    last = {k: v + 0.2 for k, v in params.items()}
    context = {"previous": last, "previous_buffers": {}}
    new, old = (mlp(p, {}, data.x)["features"] for p in (params, last))
    got = value(ToPrevious(), mlp, data, context)
    assert float(got - F.mse_loss(new, old)) == pytest.approx(0, abs=1e-6)
    assert float(got) > 1e-3
    assert float(value(ToPrevious(), mlp, data, context | {"previous": params})) == 0


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


def test_traces_take_the_place_of_a_means_weights_only(setting: Setting) -> None:
    with pytest.raises(InputError, match=r"combine=ConFree\(.* is no Mean; give fisher=False"):
        FedAs(setting.model, combine=ConFree())
    assert FedAs(setting.model, fisher=False, combine=ConFree()).combine == ConFree()


def test_the_repo_recipe(setting: Setting, federated: Any) -> None:
    """2 + 8 of 10 steps, by size, no trace; without decay round 1 is FedPer with 8 steps."""
    ten = replace(setting, local=Local(lr=0.1, steps=10, batch=8))
    algorithm = recipes.fedas_drm_repo(ten)
    phases = algorithm.phases()
    assert phases["align"].steps == 2
    assert phases["train0"].steps == 8
    assert "fisher" not in algorithm.reveals()
    eight = replace(ten, local=replace(ten.local, steps=8))
    assert same(algorithm, recipes.fedper(eight), federated(), 1) == 0
    assert same(algorithm, recipes.fedper(eight), federated(), 2) > 1e-5
    heavy = recipes.fedas_drm_repo(replace(ten, local=replace(ten.local, decay=0.1)))
    per = recipes.fedper(replace(eight, local=replace(eight.local, decay=0.1)))
    assert same(heavy, per, federated(), 1) > 1e-4  # the decay of two more steps
    assert same(replace(heavy, first=False), per, federated(), 1) == 0
    with pytest.raises(InputError, match="fedas_drm_repo gives 1 in 5 of the steps.*4 is too few"):
        recipes.fedas_drm_repo(replace(ten, local=replace(ten.local, steps=4)))
    with pytest.raises(InputError, match="fedas_drm_repo counts steps"):
        recipes.fedas_drm_repo(setting)


def test_what_leaves_is_fedpers_and_one_number(setting: Setting, federated: Any) -> None:
    algorithm = recipes.fedas(setting)
    update, _ = algorithm.client_update(*one_job(algorithm, federated())[1:5])
    assert set(update) == {"delta", "buffers", "counters", "report", "fisher"}
    assert [v.numel() for v in update["fisher"].values()] == [1]
    assert not any(name.startswith("head.") for name in update["delta"])
    assert "fisher" in algorithm.reveals()


def test_the_trace_is_of_the_model_after_training(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.fedas(setting), double(federated())
    job = one_job(algorithm, federation, 3)
    update, new_state = algorithm.client_update(*job[1:5])
    plan = plan_all(algorithm.phases(), job.data, 1, 0, 3)["pass"]
    model, before = setting.model, job.message["params"] | job.state["private"]
    after = new_state["body"] | new_state["private"]
    traces = [
        float(gradient_trace(model, CrossEntropy(), p, {}, {}, job.data, plan))
        for p in (after, before)
    ]
    assert float(update["fisher"]["trace"]) == pytest.approx(traces[0], rel=1e-12)
    assert traces[0] != pytest.approx(traces[1], rel=0.1)


class Bare(nn.Module):
    """A network that returns logits only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_wrong_models_and_settings_are_refused(setting: Setting) -> None:
    bare = build(Bare, seed=0)
    with pytest.raises(InputError, match=r'looks at "features", and the model returns'):
        final(recipes.fedas(Setting(bare, TARGET)), make_federation(bare))
    without = recipes.fedas(Setting(bare, TARGET), align_epochs=0)
    assert final(without, make_federation(bare), 1).loss > 0
    wrong: Any = "class"
    with pytest.raises(InputError, match=r'match of FedAS "class".*Did you mean "classes"'):
        FedAs(setting.model, match=wrong)
    with pytest.raises(InputError, match="FedAS aligns the body alone"):
        FedAs(setting.model, align=Local(only=("head.",)))
    with pytest.raises(InputError, match="align_epochs must be 0 or more, got -1"):
        recipes.fedas(setting, align_epochs=-1)
