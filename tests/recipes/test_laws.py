"""Laws that tie methods to one another and to theory. Each is one line of mathematics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.local import Local
from fedshift.client.sharing import Share
from fedshift.data import ClientData, client_data
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.optimizers import Sgd
from fedshift.server.weights import BySize, Pals, Uniform
from support.by_hand import final, max_difference
from support.federations import CLASSES, TARGET, double, make_clients, make_federation, one_job


def pooled(clients: tuple[ClientData, ...]) -> ClientData:
    return client_data(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]), 0)


def test_prox_does_not_move_the_first_step(mlp: Model, federated: Any) -> None:
    """At theta = theta_t the proximal gradient is 0."""
    local = Setting(mlp, TARGET, Local(lr=0.1, steps=1, batch=8))
    one = final(recipes.fedavg(local), federated(), 1)
    two = final(recipes.fedprox(local, mu=7.0), federated(), 1)
    assert max_difference(one.server["params"], two.server["params"]) == 0


def test_pals_at_infinity_is_fedavg(setting: Setting, federated: Any) -> None:
    one = final(recipes.fedavg(setting), federated(), cohort=4)
    two = final(recipes.fedpals(setting, lam=float("inf")), federated(), cohort=4)
    assert max_difference(one.server["params"], two.server["params"]) == 0


def test_pals_for_the_aggregate_is_fedavg(mlp: Model, federated: Any) -> None:
    federation = federated()
    aggregate = federation.table["labels"].sum(0) / federation.table["n"].sum()
    weights = Pals(tuple(aggregate.tolist()), lam=3.0)(federation.table)
    assert float((weights - BySize()(federation.table)).abs().max()) < 1e-12


def test_untrained_zero_weights_change_no_bit(setting: Setting, federated: Any) -> None:
    """Clients of weight exactly 0 are skipped; training them gives the same bytes."""

    class Everyone(FedAvg):
        def trains(self, weights: Tensor) -> Tensor:
            return torch.ones_like(weights, dtype=torch.bool)

    sparse = recipes.fedpals(setting, lam=0.0)
    fields = {k: getattr(sparse, k) for k in ("model", "objective", "local", "combine", "server")}
    skipped = final(sparse, federated())
    trained = final(Everyone(**fields), federated())
    assert len(skipped.trained) < len(trained.trained) == 6
    assert max_difference(skipped.server["params"], trained.server["params"]) == 0


def test_zero_weights_do_not_touch_batchnorm(normed: Model) -> None:
    class Everyone(FedAvg):
        def trains(self, weights: Tensor) -> Tensor:
            return torch.ones_like(weights, dtype=torch.bool)

    federation = make_federation(normed)
    combine = Mean(Pals(TARGET, lam=0.0))
    local = Local(epochs=1, batch=7)
    skipped = final(FedAvg(normed, local=local, combine=combine), federation)
    trained = final(Everyone(normed, local=local, combine=combine), federation)
    assert max_difference(skipped.server["buffers"], trained.server["buffers"]) == 0


def test_identical_clients_are_one_client(setting: Setting, mlp: Model) -> None:
    """Full batches, so that the order of examples cannot matter."""
    one = make_clients(sizes=(24,))[0]
    copies = tuple(one._replace(id=torch.tensor(i)) for i in range(4))
    whole = Setting(mlp, TARGET, Local(lr=0.1, epochs=3, batch=24))
    single = final(recipes.fedavg(whole), double(make_federation(mlp, (one,))))
    many = final(recipes.fedavg(whole), double(make_federation(mlp, copies)))
    assert max_difference(single.server["params"], many.server["params"]) < 1e-13


def test_one_full_step_is_a_pooled_step(mlp: Model) -> None:
    """FedSGD: sum_i (n_i/n) theta_i after one full-batch step = one step on the pooled data."""
    clients = make_clients()
    local = Setting(mlp, TARGET, Local(lr=0.3, epochs=1, batch=200))
    apart_ = final(recipes.fedavg(local), double(make_federation(mlp, clients)), 1)
    together = final(recipes.fedavg(local), double(make_federation(mlp, (pooled(clients),))), 1)
    assert max_difference(apart_.server["params"], together.server["params"]) < 1e-13
    uniform = FedAvg(mlp, local=local.local, combine=Mean(Uniform()))
    other = final(uniform, double(make_federation(mlp, clients)), 1)
    assert max_difference(other.server["params"], together.server["params"]) > 1e-4


def blocks() -> tuple[tuple[ClientData, ...], list[Tensor]]:
    """Clients made of whole copies of the same block of examples per class.

    Their per-class empirical conditionals are identical: pure label shift, exactly.
    """
    one = make_clients(seed=3, sizes=(400,))[0]
    block = [one.x[one.y == y][:6] for y in range(CLASSES) if int((one.y == y).sum()) >= 6]
    copies = ((3, 0, 1), (0, 2, 2), (1, 1, 0), (0, 0, 4))
    clients = []
    for i, row in enumerate(copies):
        x = torch.cat([block[y] for y, c in enumerate(row) for _ in range(c)])
        y = torch.cat([torch.full((6 * c,), y) for y, c in enumerate(row)])
        clients.append(client_data(x, y, i))
    return tuple(clients), block


def test_proposition_1(mlp: Model) -> None:
    """For T in Conv(S), sum_i a_i theta_i is a step on the target's risk (FedPALS, Prop. 1).

    Exact for one full-batch step when p(x | y) is the same everywhere; n_i/n is not.
    """
    clients, block = blocks()
    federation = double(make_federation(mlp, clients))
    rows = federation.table["labels"] / federation.table["n"][:, None]
    mixed = torch.tensor([0.2, 0.5, 0.3, 0.0], dtype=torch.float64) @ rows
    local = Local(lr=0.5, epochs=1, batch=1000)
    pals = FedAvg(mlp, local=local, combine=Mean(Pals(tuple(mixed.tolist()), lam=0.0)))
    got = final(pals, federation, 1).server["params"]

    leaves = {k: v.clone().requires_grad_() for k, v in federation.params.items()}
    risk = torch.stack(
        [
            mixed[y] * F.cross_entropy(mlp(leaves, {}, x.double())["logits"], torch.full((6,), y))
            for y, x in enumerate(block)
        ]
    ).sum()
    grads = torch.autograd.grad(risk, list(leaves.values()))
    step = {k: v.detach() - 0.5 * g for (k, v), g in zip(leaves.items(), grads, strict=True)}
    assert max_difference(got, step) < 1e-12
    by_size = final(FedAvg(mlp, local=local), federation, 1).server["params"]
    assert max_difference(by_size, step) > 1e-3


def test_splitting_a_client_keeps_its_weight() -> None:
    table = {
        "n": torch.tensor([40.0, 30.0, 20.0]).double(),
        "labels": torch.tensor([[20.0, 20, 0], [0, 15, 15], [20, 0, 0]]).double(),
    }
    halves = {
        "n": torch.tensor([20.0, 20.0, 30.0, 20.0]).double(),
        "labels": torch.tensor([[10.0, 10, 0], [10, 10, 0], [0, 15, 15], [20, 0, 0]]).double(),
    }
    rule = Pals((0.5, 0.3, 0.2), lam=2.0)
    whole, split = rule(table), rule(halves)
    assert float((whole[0] - split[:2].sum()).abs()) < 1e-12
    assert float((whole[1:] - split[2:]).abs().max()) < 1e-12


def test_server_step_scales_the_change(setting: Setting, federated: Any) -> None:
    """theta + lr * delta, and momentum m <- b m + delta, over one and two rounds."""
    federation = federated()
    base = FedAvg(setting.model, local=setting.local)
    full = final(base, federation, 1).server["params"]
    half = final(FedAvg(setting.model, local=setting.local, server=Sgd(0.5)), federation, 1)
    middle = {k: (federation.params[k] + full[k]) / 2 for k in full}
    assert max_difference(half.server["params"], middle) < 1e-6
    heavy = FedAvg(setting.model, local=setting.local, server=Sgd(1.0, momentum=0.9))
    assert max_difference(final(heavy, federation, 1).server["params"], full) == 0
    two = final(heavy, federation, 2).server
    again = final(base, federation, 2).server["params"]
    expected = {k: again[k] + 0.9 * (full[k] - federation.params[k]) for k in full}
    assert max_difference(two["params"], expected) < 1e-6


def test_batchnorm_statistics_are_averaged_and_counters_are_not(normed: Model) -> None:
    federation = make_federation(normed, make_clients(sizes=(16, 32, 8)))
    algorithm = FedAvg(normed, local=Local(epochs=1, batch=8))
    after = final(algorithm, federation, 1).server["buffers"]
    assert int(after["body.1.num_batches_tracked"]) == 4  # the largest client's 32/8, not a mean
    assert after["body.1.num_batches_tracked"].dtype == torch.int64
    assert (after["body.1.running_var"] > 0).all()
    # Expected from the clients' own statistics, taken before they are combined.
    jobs = [one_job(algorithm, federation, i) for i in range(3)]
    buffers = [algorithm.client_update(*job[1:5])[0]["buffers"] for job in jobs]
    for name in ("body.1.running_mean", "body.1.running_var"):
        mean = sum(n / 56 * b[name].double() for n, b in zip((16, 32, 8), buffers, strict=True))
        assert float((after[name].double() - mean).abs().max()) < 1e-7
        assert float((after[name] - buffers[0][name]).abs().max()) > 1e-3


def test_private_parts_never_leave(normed: Model) -> None:
    federation = make_federation(normed)
    algorithm = FedAvg(normed, local=Local(batch=7), share=Share(("head.", "body.1.")))
    done = final(algorithm, federation, 2)
    assert not any(k.startswith(("head.", "body.1.")) for k in done.server["params"])
    assert not done.server["buffers"]
    heads = [done.states[i]["private"]["head.bias"] for i in range(6)]
    assert float((heads[0] - heads[1]).abs().max()) > 1e-3
    params, buffers = algorithm.model_for(done.server, done.states[0])
    assert params.keys() == federation.params.keys()
    assert buffers.keys() == federation.buffers.keys()


def test_a_client_that_cannot_train_is_named(normed: Model) -> None:
    """BatchNorm refuses a batch of one; the message says which client had it."""
    federation = make_federation(normed, make_clients(sizes=(16, 9)))
    with pytest.raises(InputError, match="client 1 has n = 9 examples"):
        final(FedAvg(normed, local=Local(batch=8)), federation, 1)
