"""FedDRM: the objective, what travels, and the statistics that it rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedshift import recipes
from fedshift.client.objectives import View
from fedshift.client.origin import ClientEntropy
from fedshift.data import ClientData
from fedshift.model import Model
from fedshift.router.route import Router
from fedshift.router.score import ClientHead
from fedshift.tree import Params, split
from support.by_hand import final, max_difference
from support.comparing import whole
from support.federations import SIZES, double, make_clients, make_federation
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


# ---------------------------------------------------------------------------------- the objective


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


# ------------------------------------------------------------------------------------------ routing


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


# ----------------------------------------------------------------------------------------- refusals
