"""FedDRM: the objective, what travels, and the statistics that it rests on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.local import Gradient, gradient_of
from fedshift.client.objectives import CrossEntropy, View
from fedshift.client.origin import ClientEntropy
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.router.route import Router
from fedshift.router.score import ClientHead, posterior, scores
from fedshift.tree import Params, split
from support.by_hand import final, max_difference
from support.comparing import whole
from support.federations import SIZES, double, make_clients, make_federation, one_job
from support.routing import (
    routed_federation,
    routed_model,
    routed_setting,
)

N = len(SIZES)


@pytest.fixture
def model() -> Model:
    return routed_model()


def view_of(
    model: Model, data: ClientData, present: list[int], params: Params | None = None
) -> View:
    """All of a client's data as one batch, in a round with the clients `present`."""
    start = model.init()[0] if params is None else params
    batch, mask = whole(data), torch.zeros(N, dtype=torch.bool)
    mask[present] = True
    context = {"client": {"id": data.id}, "cohort": {"present": mask}}
    return View(model, start, model(start, {}, batch.x), batch, context)


def trained_parts(params: Params) -> tuple[Params, Params]:
    return split(params, ("router.",))


# ------------------------------------------------------------------------------- the two extremes


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [0.0, 5e-2])
def test_lam_1_is_fedper_off_the_router(model: Model, decay: float) -> None:
    """Also FedPer of the network that has no router; the router itself only decays."""
    setting = routed_setting(model, decay=decay)
    plain = replace(setting, model=routed_model(None))
    one = final(recipes.feddrm(setting, lam=1.0), routed_federation(model), cohort=4)
    two = final(recipes.fedper(plain), routed_federation(plain.model), cohort=4)
    router, path = trained_parts(one.server["params"])
    assert path.keys() == two.server["params"].keys()
    assert max_difference(path, two.server["params"]) == 0
    for i in one.states:
        assert max_difference(one.states[i]["private"], two.states[i]["private"]) == 0
    start = trained_parts(model.init()[0])[0]
    moved = max_difference(router, start)
    assert moved > 1e-3 if decay else moved == 0
    mixed = final(recipes.feddrm(setting, lam=0.8), routed_federation(model), cohort=4)
    assert max_difference(trained_parts(mixed.server["params"])[1], path) > 1e-3


@pytest.mark.parametrize("decay", [0.0, 5e-2])
def test_lam_0_leaves_the_class_heads(model: Model, decay: float) -> None:
    setting = routed_setting(model, decay=decay)
    played = final(recipes.feddrm(setting, lam=0.0), routed_federation(model), 1)
    start = split(model.init()[0], ("head.",))[0]
    for i, n in enumerate(SIZES):
        steps = 2 * math.ceil(n / 8)
        decayed = {k: v * (1 - 0.1 * decay) ** steps for k, v in start.items()}
        assert max_difference(played.states[i]["private"], decayed) < (1e-6 if decay else 1e-30)
    other = final(recipes.feddrm(setting, lam=0.1), routed_federation(model), 1)
    assert max_difference(other.states[0]["private"], start) > 1e-3


# ---------------------------------------------------------------------------------- the objective


def test_the_loss_is_the_weighted_sum_of_two_entropies(model: Model, setting: Setting) -> None:
    data = make_clients()[2]
    term = recipes.feddrm(replace(setting, model=model), lam=0.7).objective
    view = view_of(model, data, list(range(N)))
    z, c = view.out["logits"].double(), view.out["client_logits"].double()
    rows = torch.arange(len(data.y))
    classes = (z.logsumexp(1) - z[rows, data.y]).mean()
    origins = (c.logsumexp(1) - c[:, 2]).mean()
    assert float(term(view) - (0.7 * classes + 0.3 * origins)) == pytest.approx(0, abs=1e-6)
    assert abs(float(classes - origins)) > 1e-2  # else lam would not matter


def test_equal_logits_cost_the_log_of_the_cohorts_size(model: Model) -> None:
    params, _ = model.init()
    blank = {
        k: torch.zeros_like(v) if k.startswith("router.head") else v for k, v in params.items()
    }
    data = make_clients()[3]
    for present in ([0, 1, 2, 3, 4, 5], [1, 3], [3]):
        value = float(ClientEntropy()(view_of(model, data, present, blank)))
        assert value == pytest.approx(math.log(len(present)), abs=1e-6)


def test_everybody_present_is_the_plain_softmax(model: Model) -> None:
    """Bit for bit, gradients included; and it is not with one client absent."""
    data, (params, _) = make_clients()[4], model.init()

    def plain(view: View) -> Tensor:
        client = torch.full((len(view.batch.y),), 4)
        loss = F.cross_entropy(view.out["client_logits"], client, reduction="none")
        return (loss * view.batch.w).sum() / view.batch.size

    def gradient(term: Any, present: list[int]) -> Gradient:
        context = view_of(model, data, present).context
        return gradient_of(model, term, {}, {}, whole(data), context)(params)

    one, two = gradient(ClientEntropy(), list(range(N))), gradient(plain, [])
    assert torch.equal(one.loss, two.loss)
    assert max_difference(one.grad, two.grad) == 0
    assert max_difference(one.grad, gradient(ClientEntropy(), [0, 2, 3, 4, 5]).grad) > 1e-3


def test_absent_rows_stay(model: Model) -> None:
    """Over a cohort of three, the other three rows of (gamma, xi) do not move; present ones do."""
    played = final(recipes.feddrm(routed_setting(model)), routed_federation(model), 1, cohort=3)
    out = [i for i in range(N) if i not in played.cohort.tolist()]
    start = model.init()[0]
    for name in ("router.head.weight", "router.head.bias"):
        moved = (played.server["params"][name] - start[name]).abs().reshape(N, -1).amax(1)
        assert float(moved[out].max()) == 0
        assert float(moved[played.cohort].min()) > 1e-4


def test_the_softmax_over_those_present_is_the_conditional_likelihood(model: Model) -> None:
    """P(i | x, origin in S) = P(i | x) / sum_{l in S} P(l | x)."""
    data = make_clients()[1]
    view = view_of(model, data, [1, 4, 5])
    p = view.out["client_logits"].double().softmax(1)
    conditional = -(p[:, 1] / p[:, [1, 4, 5]].sum(1)).log().mean()
    assert float(ClientEntropy()(view)) == pytest.approx(float(conditional), abs=1e-6)


def test_one_client_is_local_training_at_lam_times_the_rate() -> None:
    """m = 1: the client entropy and its gradient are 0."""
    model = routed_model(1)
    federation = double(make_federation(model, make_clients(sizes=(30,))))
    one = final(recipes.feddrm(routed_setting(model), lam=0.8), federation)
    two = final(recipes.fedper(routed_setting(model, lr=0.08)), federation)
    assert max_difference(one.server["params"], two.server["params"]) < 1e-14
    assert max_difference(one.states[0]["private"], two.states[0]["private"]) < 1e-14
    three = final(recipes.fedper(routed_setting(model, lr=0.1)), federation)
    assert max_difference(one.server["params"], three.server["params"]) > 1e-3
    view = View(model, *[federation.params] * 2, whole(federation.clients[0]), {})
    out = model(federation.params, {}, view.batch.x)
    context = {"client": {"id": torch.tensor(0)}, "cohort": {"present": torch.ones(1).bool()}}
    assert float(ClientEntropy()(view._replace(out=out, context=context))) == 0


# ------------------------------------------------------------------------------------ what travels


def test_no_class_head_is_sent(model: Model) -> None:
    """Up and down: body, and router of 10*6 + 6 + 2*6 + 7N numbers, N = 6."""
    algorithm = recipes.feddrm(routed_setting(model))
    job = one_job(algorithm, routed_federation(model))
    update, _ = algorithm.client_update(*job[1:5])
    body = (8 * 10 + 10) + (10 * 6 + 6 + 2 * 6)
    router = (10 * 6 + 6 + 2 * 6) + 7 * N
    for sent in (update["delta"], job.message["params"]):
        assert not [k for k in sent if k.startswith("head.")]
        assert sum(4 * v.numel() for v in sent.values()) == 4 * (body + router)
    assert update.keys() == {"delta", "buffers", "counters", "report"}
    shared = recipes.feddrm_shared_head(routed_setting(model))
    update, _ = shared.client_update(*one_job(shared, routed_federation(model))[1:5])
    assert [k for k in update["delta"] if k.startswith("head.")]


def test_permuting_clients_permutes_their_rows(model: Model) -> None:
    """Full batches, so that the order of a client's batches plays no part."""
    order = [3, 0, 5, 1, 4, 2]  # the new client j is the old client order[j]
    clients = make_clients()
    moved = tuple(clients[o]._replace(id=torch.tensor(j)) for j, o in enumerate(order))
    algorithm = recipes.feddrm(routed_setting(model, batch=64))
    federation = double(make_federation(model, clients))
    rows = ("router.head.weight", "router.head.bias")
    params = {k: v[order] if k in rows else v for k, v in federation.params.items()}
    other = replace(double(make_federation(model, moved)), params=params)
    one = final(algorithm, federation, 3).server["params"]
    two = final(algorithm, other, 3).server["params"]
    there = {k: v[order] if k in rows else v for k, v in one.items()}
    assert max_difference(there, two) < 1e-13
    assert max_difference(one, two) > 1e-3  # without the permutation they differ
    wrong = final(algorithm, replace(other, params=federation.params), 3).server["params"]
    assert max_difference(there, wrong) > 1e-3  # rows that did not move along


def test_one_full_step_is_a_pooled_step(model: Model) -> None:
    """FedSGD: one full-batch step each, weighed by n_i/N, is one step on the pooled loss."""
    setting = routed_setting(model, epochs=1, batch=64)
    federation = double(routed_federation(model))
    algorithm = recipes.feddrm_shared_head(setting, lam=0.6)
    got = final(algorithm, federation, 1).server["params"]
    x = torch.cat([c.x for c in federation.clients])
    y = torch.cat([c.y for c in federation.clients])
    who = torch.repeat_interleave(torch.arange(N), torch.tensor(SIZES))
    leaves = {k: v.clone().requires_grad_() for k, v in federation.params.items()}
    out = model(leaves, {}, x)
    loss = 0.6 * F.cross_entropy(out["logits"], y) + 0.4 * F.cross_entropy(
        out["client_logits"], who
    )
    grads = torch.autograd.grad(loss, list(leaves.values()))
    step = {k: v.detach() - 0.1 * g for (k, v), g in zip(leaves.items(), grads, strict=True)}
    assert max_difference(got, step) < 1e-14
    many = recipes.feddrm_shared_head(routed_setting(model, epochs=1), lam=0.6)
    assert (
        max_difference(final(many, federation, 1).server["params"], step) > 1e-3
    )  # batches of 8 drift


# ------------------------------------------------------------------------------------------ routing


def test_equal_sizes_make_both_rules_one() -> None:
    z = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    equal = torch.full((5,), 70.0)
    assert torch.equal(scores(z, equal, "posterior"), scores(z, equal, "density"))
    unequal = torch.tensor([70.0, 60, 80, 70, 70])
    assert not torch.equal(scores(z, unequal).argmax(1), scores(z, unequal, "density").argmax(1))


def test_a_router_that_knows_nothing(model: Model) -> None:
    """z = 0: by posterior the first client (ties), by density the smallest."""
    federation = routed_federation(model)
    played = final(recipes.feddrm(routed_setting(model)), federation, 1)
    server = played.server | {
        "params": {
            k: torch.zeros_like(v) if k.startswith("router.head") else v
            for k, v in played.server["params"].items()
        }
    }
    router = Router.of(recipes.feddrm(routed_setting(model)), server, played.states)
    x = federation.clients[0].x
    assert set(router.route(x).clients.flatten().tolist()) == {0}
    smallest = SIZES.index(min(SIZES))
    assert set(router.route(x, prior="density").clients.flatten().tolist()) == {smallest}


def test_a_shared_head_makes_routing_a_no_op(model: Model) -> None:
    """Routed = mixture = global answers, for the trained router and for a random one."""
    federation = routed_federation(model)
    setting = routed_setting(model)
    played = final(recipes.feddrm_shared_head(setting), federation)
    router = Router.of(recipes.feddrm_shared_head(setting), played.server, played.states)
    x = torch.cat([c.x for c in federation.clients])
    answer = model(played.server["params"], {}, x)["logits"].double().softmax(1)
    source = torch.Generator().manual_seed(0)
    weights = torch.randn(N, 6, dtype=torch.float64, generator=source)
    noise = ClientHead(torch.zeros(N).double(), weights * 5)
    for other in (router, replace(router, head=noise)):
        assert len(other.route(x).clients.unique()) > 1
        for mode in ("hard", 3, "mixture"):
            assert float((other.predict(x, mode) - answer).abs().max()) < 1e-6
    separate = final(recipes.feddrm(setting), federation)
    routed = Router.of(recipes.feddrm(setting), separate.server, separate.states)
    differ = routed.predict(x, "hard") - replace(routed, head=noise).predict(x, "hard")
    assert float(differ.abs().max()) > 1e-2


def test_routed_by_the_truth_is_average_accuracy(model: Model) -> None:
    """System accuracy with the true origin = sum_i |T_i| acc_i / |T|."""
    federation = routed_federation(model)
    algorithm = recipes.feddrm(routed_setting(model))
    played = final(algorithm, federation, 3)
    router = Router.of(algorithm, played.server, played.states)
    tests = make_clients(seed=4)
    right = [
        int((model(*router.served[i], t.x)["logits"].argmax(1) == t.y).sum())
        for i, t in enumerate(tests)
    ]
    # A prior that is sure of the client routes by the truth, whatever the logits are.
    sure = torch.eye(N).double()
    predicted = [router.predict(t.x, prior=sure[i]).argmax(1) for i, t in enumerate(tests)]
    assert [int((a == t.y).sum()) for a, t in zip(predicted, tests, strict=True)] == right
    wrong = [router.predict(t.x, prior=sure[i - 1]).argmax(1) for i, t in enumerate(tests)]
    assert sum(int((a == t.y).sum()) for a, t in zip(wrong, tests, strict=True)) < sum(right)


def test_without_a_client_the_odds_stay() -> None:
    z = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([30.0, 10, 40, 20])
    full, less = posterior(z, sizes), posterior(z, torch.tensor([30.0, 0, 40, 20]))
    assert bool((less[:, 1] == 0).all())
    odds, left = full[:, [0, 2, 3]] / full[:, [0]], less[:, [0, 2, 3]] / less[:, [0]]
    assert torch.allclose(odds, left, rtol=1e-12, atol=0)
    assert not torch.allclose(full[:, [0, 2, 3]], less[:, [0, 2, 3]], rtol=1e-3, atol=0)


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("lam", [-0.1, 1.5, float("nan")])
def test_a_lam_outside_the_unit_interval_is_refused(setting: Setting, lam: float) -> None:
    for make in (recipes.feddrm, recipes.feddrm_shared_head):
        with pytest.raises(InputError, match=rf"lam must be in \[0, 1\], got {lam}"):
            make(setting, lam=lam)


def test_a_model_without_a_router_is_refused(setting: Setting, federated: Any) -> None:
    with pytest.raises(InputError, match='routing needs "client_logits", and this model'):
        final(recipes.feddrm(setting), federated(), 1)


def test_a_router_for_another_number_of_clients_is_refused(setting: Setting) -> None:
    model = routed_model(5)
    with pytest.raises(InputError, match=r"\(2, 5\) and there are 6 clients; build the network"):
        final(recipes.feddrm(replace(setting, model=model)), routed_federation(model), 1)


def test_the_recipe_is_the_expression_it_says(setting: Setting) -> None:
    algorithm = recipes.feddrm(setting)
    assert algorithm.objective == 0.8 * CrossEntropy() + (1 - 0.8) * ClientEntropy()
    assert algorithm.share.private == setting.head
    assert recipes.feddrm(setting, lam=1) == recipes.fedper(setting)
    assert recipes.feddrm_shared_head(setting, lam=1) == recipes.fedavg(setting)
    assert not recipes.feddrm_shared_head(setting).share.private
