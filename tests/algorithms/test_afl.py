"""AFL: laws of lambda, its projection, and its minimax point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.afl import Afl, mean_risk, project_simplex
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy, Proximal, Term, View, batch_mean
from fedshift.data import Examples, client_data
from fedshift.engine.run import Federation, run, start
from fedshift.evaluation.scores import score
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.tree import Parts
from support.by_hand import final, max_difference
from support.comparing import by_bisection, same
from support.extras import afl
from support.federations import CLASSES, double, make_clients, make_federation, one_job

# --- laws -------------------------------------------------------------------------------------


def mixture(algorithm: FedAvg, server: Parts) -> Tensor:
    (extra,) = algorithm.extras
    assert isinstance(extra, Afl)
    return extra.mixture(server)


def reported(algorithm: FedAvg, server: Parts, losses: list[float], ids: list[int]) -> Tensor:
    """lambda after a round in which the clients `ids` report these losses without training."""
    still = {k: torch.zeros(len(ids), *v.shape) for k, v in server["params"].items()}
    updates = {
        "cohort": {"id": torch.tensor(ids), "weight": algorithm.weigh(server, torch.tensor(ids))},
        "delta": still,
        "buffers": {},
        "counters": {},
        "risk": {"loss": torch.tensor(losses, dtype=torch.float64)},
    }
    return mixture(algorithm, server | algorithm.server_update(server, updates, 0))


def test_lambda_is_the_projected_step(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.afl(setting, gamma=0.2), federated()
    server = start(algorithm, federation).server
    losses = [0.3, 2.0, 1.1, 0.7, 4.0, 0.2]
    sizes = federation.table["n"] / federation.table["n"].sum()
    expected = by_bisection(sizes + 0.2 * torch.tensor(losses, dtype=torch.float64))
    assert torch.equal(mixture(algorithm, server), sizes)
    assert float((reported(algorithm, server, losses, list(range(6))) - expected).abs().max()) < (
        1e-12
    )


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 4, 5], [1, 3, 4]])
def test_equal_losses_leave_lambda(setting: Setting, federated: Any, ids: list[int]) -> None:
    algorithm, federation = recipes.afl(setting, gamma=0.5), federated()
    server = start(algorithm, federation).server
    before = mixture(algorithm, server)
    after = reported(algorithm, server, [1.7] * len(ids), ids)
    assert float((after - before).abs().max()) < 1e-15
    unequal = reported(algorithm, server, [1.7] * (len(ids) - 1) + [1.8], ids)
    assert float((unequal - before).abs().max()) > 1e-2


# --- the loss that is reported -------------------------------------------------------------------


def test_risk_is_the_mean_loss_in_evaluation_mode(normed: Model) -> None:
    federation = make_federation(normed)
    data = federation.clients[3]
    params, buffers = federation.params, federation.buffers
    expected = score(normed, params, buffers, Examples(data.x, data.y), CLASSES).loss
    plan = plan_all({"risk": Local(epochs=1, batch=7)}, data, 1, 0, 3)["risk"]
    risk = mean_risk(normed, CrossEntropy(), params, buffers, {}, data, plan)
    assert float(risk) == pytest.approx(expected, rel=1e-6)
    assert not risk.requires_grad
    padded = plan._replace(
        rows=torch.cat([plan.rows, torch.zeros(2, 7).long()]),
        weight=torch.cat([plan.weight, torch.zeros(2, 7)]),
        sizes=None,
    )
    again = mean_risk(normed, CrossEntropy(), params, buffers, {}, data, padded)
    assert float(again) == pytest.approx(expected, rel=1e-6)
    trained, _ = normed.train(params, buffers, data.x)
    by_batch = torch.nn.functional.cross_entropy(trained["logits"], data.y)
    assert abs(float(by_batch) - expected) > 1e-3  # the control: batch statistics are another loss


def test_risk_is_of_the_model_received(setting: Setting, federated: Any) -> None:
    """The risk is that of the data: a proximal term of the objective is not part of it."""
    federation = federated()
    job = one_job(recipes.afl(setting), federation)
    longer = replace(recipes.afl(setting), local=Local(lr=0.3, epochs=5, batch=8))
    proximal = replace(recipes.afl(setting), objective=CrossEntropy() + Proximal(1.0))
    one = recipes.afl(setting).client_update(*job[1:5])[0]["risk"]["loss"]
    assert torch.equal(longer.client_update(*job[1:5])[0]["risk"]["loss"], one)
    assert torch.equal(proximal.client_update(*job[1:5])[0]["risk"]["loss"], one)
    moved = job.message | {"params": {k: v + 0.1 for k, v in job.message["params"].items()}}
    other = recipes.afl(setting).client_update(moved, *job[2:5])[0]["risk"]["loss"]
    assert abs(float(other - one)) > 1e-4


# --- clients of weight zero ----------------------------------------------------------------------


def without(server: Parts, client: int) -> Parts:
    """The server's state with lambda_client = 0."""
    mass = server["mixture"]["mass"].clone()
    mass[client] = 0.0
    return server | {"mixture": {"mass": mass}}


def test_idle_clients_report_and_do_not_train(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.afl(setting), federated()
    first = start(algorithm, federation)
    first = first._replace(server=without(first.server, 3))
    message = algorithm.broadcast(first.server, 3)
    assert "idle" in message
    assert "idle" not in algorithm.broadcast(first.server, 2)
    job = one_job(algorithm, federation, 3)
    update, changed = algorithm.client_update(message, *job[2:5])
    active, _ = algorithm.client_update(job.message, *job[2:5])
    assert all(not v.any() for v in update["delta"].values())
    assert torch.equal(update["risk"]["loss"], active["risk"]["loss"])
    assert max_difference(active["delta"], update["delta"]) > 1e-3
    assert not changed

    class Everyone(Afl):
        def send(self, host: FedAvg, server: Parts, client: int) -> Parts:
            return {}

    everyone = replace(algorithm, extras=(Everyone(),))
    one = list(run(algorithm, federation, 1, after=first))[-1]
    two = list(run(everyone, federation, 1, after=first))[-1]
    assert one.trained == two.trained == (0, 1, 2, 3, 4, 5)
    assert max_difference(one.server["params"], two.server["params"]) == 0
    assert torch.equal(one.server["mixture"]["mass"], two.server["mixture"]["mass"])


def test_a_client_comes_back_from_zero(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.afl(setting, gamma=0.1), federated()
    server = without(start(algorithm, federation).server, 4)
    ids = list(range(6))
    assert reported(algorithm, server, [0.1, 0.1, 0.1, 0.1, 5.0, 0.1], ids)[4] > 0.3
    assert reported(algorithm, server, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1], ids)[4] == 0


def test_a_cohort_without_weight_changes_nothing_but_is_no_error(
    setting: Setting, federated: Any
) -> None:
    algorithm, federation = recipes.afl(setting), federated()
    first = start(algorithm, federation)
    server = without(without(first.server, 1), 4)
    weights = algorithm.weigh(server, torch.tensor([1, 4]))
    assert weights.tolist() == pytest.approx([23 / 30, 7 / 30])
    assert all("idle" in algorithm.broadcast(server, i) for i in (1, 4))
    assert torch.equal(reported(algorithm, server, [1.0, 2.0], [1, 4]), mixture(algorithm, server))


# --- domains ----------------------------------------------------------------------------------


def test_domains_share_by_size(setting: Setting, federated: Any) -> None:
    """Loss of a domain = mean over its examples; its weight goes to its clients by n_i / n_d."""
    domains = (0, 1, 1, 0, 2, 1)
    algorithm, federation = recipes.afl(setting, gamma=0.2, domains=domains), federated()
    server = start(algorithm, federation).server
    n = federation.table["n"]
    losses = torch.tensor([0.3, 2.0, 1.1, 0.7, 4.0, 0.2], dtype=torch.float64)
    groups = [[0, 3], [1, 2, 5], [4]]
    mean = torch.stack([(n[g] * losses[g]).sum() / n[g].sum() for g in groups])
    first = torch.stack([n[g].sum() for g in groups]) / n.sum()
    assert float((mixture(algorithm, server) - first).abs().max()) < 1e-15
    after = reported(algorithm, server, losses.tolist(), list(range(6)))
    assert float((after - by_bisection(first + 0.2 * mean)).abs().max()) < 1e-12
    weights = algorithm.weigh(server | {"mixture": {"mass": after * n.sum()}}, torch.arange(6))
    for d, group in enumerate(groups):
        assert float((weights[group] - after[d] * n[group] / n[group].sum()).abs().max()) < 1e-12
    apart_ = recipes.afl(setting, gamma=0.2)
    alone = reported(apart_, start(apart_, federation).server, losses.tolist(), list(range(6)))
    assert float((alone - weights).abs().max()) > 1e-2


def test_what_becomes_of_a_domain_with_absent_clients(setting: Setting, federated: Any) -> None:
    """Absent clients take their shares along, or those present carry the whole domain."""
    domains, ids = (0, 1, 1, 0, 2, 1), torch.tensor([0, 2, 4, 5])
    server = start(recipes.afl(setting, domains=domains), federated()).server
    n, shares = federated().table["n"], [0.5, 0.2, 0.3]
    sizes = [n[[0, 3]].sum(), n[[1, 2, 5]].sum(), n[[4]].sum()]
    server = server | {"mixture": {"mass": torch.tensor(shares, dtype=torch.float64) * n.sum()}}
    for whole, present in ((False, sizes), (True, [n[0], n[[2, 5]].sum(), n[4]])):
        algorithm = recipes.afl(setting, domains=domains, whole=whole)
        raw = [shares[domains[i]] * float(n[i] / present[domains[i]]) for i in ids]
        want = torch.tensor(raw, dtype=torch.float64) / sum(raw)
        weights = algorithm.weigh(server, ids)
        assert float((weights - want).abs().max()) < 1e-14
        by_domain = [float(weights[[k for k, i in enumerate(ids) if domains[i] == d]].sum())
                     for d in range(3)]  # fmt: skip
        assert (by_domain == pytest.approx(shares, abs=1e-14)) == whole
        everyone = algorithm.weigh(server, torch.arange(6))
        alone = [shares[domains[i]] * float(n[i] / sizes[domains[i]]) for i in range(6)]
        assert everyone.tolist() == pytest.approx(alone, abs=1e-14)
    algorithms = [recipes.afl(setting, domains=domains, whole=w) for w in (False, True)]
    assert same(*algorithms, federated(), 2) < 1e-6
    one, two = (final(a, federated(), 2, cohort=4).server["params"] for a in algorithms)
    assert max_difference(one, two) > 1e-4


# --- the minimax point ------------------------------------------------------------------------


class Point(nn.Module):
    """One parameter, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.expand(len(x), 1)


class Parabola(Term):
    """(a/2) (theta - c)^2 with a, c in the two columns of x."""

    def __call__(self, view: View) -> Tensor:
        a, c = view.batch.x.unbind(1)
        return batch_mean(a / 2 * (view.out["logits"][:, 0] - c) ** 2, view.batch)


@pytest.mark.slow
def test_two_parabolas_end_at_equal_losses() -> None:
    """F_1 = theta^2/2 and F_2 = 2 (theta - 3)^2: min max is at theta = 2, lambda = (2/3, 1/3).

    There F_1 = F_2 = 2 and lambda_1 F_1' + lambda_2 F_2' = 2 lambda_1 - 4 lambda_2 = 0.
    """
    model = Model(Point())
    rows = ((1.0, 0.0), (4.0, 3.0))
    clients = tuple(
        client_data(torch.tensor([row] * 5), torch.zeros(5).long(), i) for i, row in enumerate(rows)
    )
    federation = double(
        Federation(
            clients, *model.init(), {"n": torch.tensor([5.0, 5.0]).double()},
            make_federation(model, make_clients()).seeds,
        )
    )  # fmt: skip
    local = Local(lr=0.1, epochs=1, batch=5)
    algorithm = afl(model, 0.04, objective=Parabola(), risk=Parabola(), local=local)
    done = final(algorithm, federation, 300)
    assert float(done.server["params"]["theta"]) == pytest.approx(2.0, abs=1e-6)
    assert mixture(algorithm, done.server).tolist() == pytest.approx([2 / 3, 1 / 3], abs=1e-6)
    average = final(FedAvg(model, objective=Parabola(), local=local), federation, 100)
    assert float(average.server["params"]["theta"]) == pytest.approx(2.4, abs=1e-6)


vectors = st.lists(st.floats(-50, 50), min_size=1, max_size=12)


@pytest.mark.slow
@given(vectors, st.floats(0.1, 1000.0))
def test_projection_agrees_with_bisection(values: list[float], total: float) -> None:
    v = torch.tensor(values, dtype=torch.float64)
    u = project_simplex(v, total)
    assert float((u - by_bisection(v, total)).abs().max()) < 1e-12 * (total + 50)
    assert float(u.min()) >= 0
    assert float(u.sum()) == pytest.approx(total, abs=1e-12 * total)


@given(vectors)
def test_projection_satisfies_the_conditions_of_a_minimiser(values: list[float]) -> None:
    """(v - u) . (s - u) <= 0 for every s of the simplex: it is enough to look at its corners."""
    v = torch.tensor(values, dtype=torch.float64)
    u = project_simplex(v)
    slopes = (v - u).max() - (v - u) @ u
    assert float(slopes) < 1e-11
    worse = torch.roll(u, 1)
    assert float((worse - v).norm()) >= float((u - v).norm()) - 1e-12
