"""Private and public label sets: laws, what travels, and what must not move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.labelsets import LabelSets, Mode
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.client.slots import local_labels
from fedshift.data import ClientData, client_data, register
from fedshift.engine.backends import Job
from fedshift.engine.run import Federation, first_state, start
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from fedshift.server.optimizers import Sgd
from fedshift.server.rows import holder_shares, row_sum, slot_table
from fedshift.tree import Parts, flatten, size_in_bytes, weighted_sum
from support.by_hand import final, max_difference
from support.comparing import same
from support.federations import (
    CLASSES,
    FEATURES,
    SIZES,
    TARGET,
    double,
    make_clients,
    make_federation,
)

HEAD = ("head.weight", "head.bias")
MODES: tuple[Mode, ...] = ("private", "holders", "public")
RESTLESS = Local(lr=0.1, epochs=2, batch=8, momentum=0.9, decay=0.1)


def full_clients(sizes: tuple[int, ...] = SIZES) -> tuple[ClientData, ...]:
    """The usual clients' inputs, with all labels on each of them."""
    return tuple(
        client_data(c.x, torch.arange(len(c.y)) % CLASSES, i)
        for i, c in enumerate(make_clients(sizes=sizes))
    )


def job(algorithm: Algorithm, federation: Federation, client: int, t: int = 1) -> Job:
    """The job of a client in the first round, with all clients."""
    server = start(algorithm, federation).server
    everyone = torch.arange(len(federation.clients))
    cohort = {"cohort": {"id": everyone, "weight": algorithm.weigh(server, everyone)}}
    data = federation.clients[client]
    plans = plan_all(algorithm.phases(), data, t, federation.seeds.batch, client)
    state = first_state(algorithm, federation, client)
    return Job(client, algorithm.broadcast(server | cohort, client), state, data, plans)


def sent(algorithm: Algorithm, federation: Federation, client: int) -> Parts:
    return algorithm.client_update(*job(algorithm, federation, client)[1:5])[0]


def labels_of(algorithm: Algorithm, federation: Federation, client: int) -> Tensor:
    """The label in each slot of a client's messages, -1 in empty ones."""
    return start(algorithm, federation).server["sets"]["slot"][client]


PAIRS: dict[str, tuple[Any, Any]] = {
    "fedavg": (recipes.labelset_fedavg, recipes.fedavg),
    "fedprox": (recipes.labelset_fedprox, recipes.fedprox),
    "scaffold": (recipes.labelset_scaffold, recipes.scaffold),
    "ditto": (recipes.labelset_ditto, recipes.ditto),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("sets", "plain"), PAIRS.values(), ids=PAIRS)
def test_full_sets_are_the_inner_method_bit_for_bit(sets: Any, plain: Any, mlp: Model) -> None:
    """All that the server holds and the clients keep; other sets of labels are another method."""
    local = Local(lr=0.1, epochs=2, batch=8, decay=0.01)
    setting = Setting(mlp, TARGET, local, server=Sgd(0.9, 0.5))
    full, others = make_federation(mlp, full_clients()), make_federation(mlp)
    want, other = (final(plain(setting), f, 2, cohort=4) for f in (full, others))
    for mode in MODES:
        got = final(sets(setting, mode=mode), full, 2, cohort=4)
        assert torch.equal(got.server["absent"]["rounds"], torch.zeros(CLASSES).long())
        for part in want.server.keys() - {"table"}:
            assert all(torch.equal(v, got.server[part][k]) for k, v in want.server[part].items())
        for i, state in want.states.items():
            assert all(torch.equal(v, flatten(got.states[i])[k]) for k, v in flatten(state).items())
        partial = final(sets(setting, mode=mode), others, 2, cohort=4).server["params"]
        assert (max_difference(partial, other.server["params"]) == 0) == (mode == "public")


def test_option_one_reduces_too(mlp: Model) -> None:
    setting = Setting(mlp, TARGET, RESTLESS)
    federation = make_federation(mlp, full_clients())
    private = recipes.labelset_scaffold(setting, option="I")
    assert same(private, recipes.scaffold(setting, option="I"), federation) == 0
    assert same(private, recipes.fedavg(setting), federation) > 1e-4


def test_prox_without_pull_is_fedavg(setting: Setting, federated: Any) -> None:
    one, two, three = (recipes.labelset_fedprox(setting, mu=mu) for mu in (0.0, 0.5, 1.0))
    assert same(one, recipes.labelset_fedavg(setting), federated()) == 0
    assert same(two, three, federated()) > 1e-4


def whole_rows(delta: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """A private client's change with the head's rows by label, zero where it has none."""
    rows = {k: torch.zeros(CLASSES, *delta[k].shape[1:]) for k in HEAD}
    for k in HEAD:
        for slot, y in enumerate(labels.tolist()):
            if y >= 0:
                rows[k][y] = delta[k][slot]
    return delta | rows


@pytest.mark.parametrize("mode", ["private", "holders"])
def test_rows_are_means_over_their_holders(mode: Mode, mlp: Model) -> None:
    """theta(y) + sum_{i: y in Y_i} n_i delta_i(y) / sum_{i: y in Y_i} n_i, written out.

    Client 2 alone has label 3, whose row is taken exactly; no client has label 4, whose row stays.
    """
    clients = tuple(
        client_data(c.x, torch.tensor(labels)[torch.arange(len(c.y)) % len(labels)], i)
        for i, (c, labels) in enumerate(
            zip(make_clients(sizes=(9, 23, 16)), ((0, 1), (0, 1, 2), (2, 3)), strict=True)
        )
    )
    setting = Setting(mlp, TARGET, RESTLESS, server=Sgd(1.0, 0.5))
    algorithm, federation = (
        recipes.labelset_fedavg(setting, mode=mode),
        make_federation(mlp, clients),
    )
    got = final(algorithm, federation, 1).server
    deltas = []
    for i in range(3):
        delta = sent(algorithm, federation, i)["delta"]
        private = mode == "private"
        deltas.append(whole_rows(delta, labels_of(algorithm, federation, i)) if private else delta)
    for k in HEAD:
        old, new = federation.params[k], got["params"][k]
        assert torch.equal(new[3], old[3] + deltas[2][k][3])
        assert torch.equal(new[4], old[4])
        for y, holders in enumerate(((0, 1), (0, 1), (1, 2))):
            n = [float(len(clients[i].y)) for i in holders]
            mean = sum(c * deltas[i][k][y].double() for c, i in zip(n, holders, strict=True))
            assert float((new[y] - old[y] - mean / sum(n)).abs().max()) < 1e-6
            assert float((new[y] - old[y] - deltas[1][k][y]).abs().max()) > 1e-4
    assert got["absent"]["now"].tolist() == [False] * 4 + [True]
    if mode == "holders":  # the same local training, so that the body is FedAvg's
        body = final(recipes.fedavg(setting), federation, 1)
        moved = {k: v for k, v in got["params"].items() if k not in HEAD}
        assert max_difference(moved, body.server["params"]) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_no_client_holds_stays(mode: Mode, mlp: Model) -> None:
    """Through local momentum and decay and the server's momentum; and it is reported."""
    setting = Setting(mlp, TARGET, RESTLESS, server=Sgd(1.0, 0.9))
    algorithm, federation = recipes.labelset_fedavg(setting, mode=mode), make_federation(mlp)
    first = final(algorithm, federation, 1)
    both = {}
    for t, seed in ((2, 0), (2, 1), (2, 2)):  # cohorts of two: some lack a label
        drawn = replace(federation, seeds=replace(federation.seeds, cohort=seed))
        both[seed] = final(algorithm, drawn, t, cohort=2, after=first)
    stayed = 0
    for after in both.values():
        present = (federation.table["labels"][after.cohort] > 0).any(0)
        assert torch.equal(after.server["absent"]["now"], ~present)
        assert torch.equal(after.server["absent"]["rounds"], (~present).long())
        for k in HEAD:
            unmoved = (after.server["params"][k] == first.server["params"][k]).reshape(CLASSES, -1)
            assert torch.equal(unmoved.all(1), ~present if mode != "public" else present & False)
        stayed += int((~present).sum())
    assert stayed > 0


@pytest.mark.parametrize("objective", [CrossEntropy(), CrossEntropy() + Proximal(0.5)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_client_trains_a_model_of_its_own_labels(
    objective: Term, optimizer: Any, mlp: Model
) -> None:
    """A network with |Y_i| outputs, trained plainly: empty slots change nothing and never move."""
    federation = double(make_federation(mlp, make_clients(sizes=(30, 30, 30))))
    local = replace(RESTLESS, momentum=0.9 if optimizer == "sgd" else 0.0, optimizer=optimizer)
    algorithm = LabelSets(FedAvg(mlp, objective, local), slots=5)
    update = sent(algorithm, federation, 1)["delta"]
    slots = labels_of(algorithm, federation, 1)
    assert all(bool((update[k][slots < 0] == 0).all()) for k in HEAD)
    mine = torch.tensor([1, 2, 3])
    data = federation.clients[1]
    small = build(lambda: Mlp((FEATURES,), (10,), 3), seed=9)
    params = {k: v[mine] if k in HEAD else v for k, v in federation.params.items()}
    alone = FedAvg(small, objective, local)
    state = alone.init_client(params, {}, data)
    plans = plan_all(alone.phases(), data, 1, 0, 1)
    message = {"params": params, "buffers": {}}
    want = alone.client_update(message, state, data._replace(y=data.y - 1), plans)[0]["delta"]
    placed = {k: torch.zeros_like(v) for k, v in want.items()} | {
        k: v for k, v in update.items() if k not in HEAD
    }
    for k in HEAD:
        for slot, y in enumerate(slots.tolist()):
            if y >= 0:
                placed[k][y - 1] = update[k][slot]
    assert max_difference(placed, want) < 1e-14
    # The control: without the mask, empty slots take part in the softmax and move.
    received, before, _, drawn = job(algorithm, federation, 1)[1:5]
    order = received["slots"]["local"]
    local_y = data._replace(y=torch.tensor([(order == y - 1).nonzero().item() for y in data.y]))
    loose = algorithm.inner.client_update(
        {k: v for k, v in received.items() if k != "slots"}, before, local_y, drawn
    )[0]["delta"]
    assert float(loose["head.bias"][slots < 0].abs().min()) > 1e-3


def test_the_softmax_leaves_the_sum_of_rows_alone(mlp: Model) -> None:
    """Its gauge: sum_{y in Y_i} delta(y) = 0. Weight decay moves it a little."""
    federation = double(make_federation(mlp))
    for decay, low, high in ((0.0, 0.0, 1e-14), (0.1, 1e-4, 1.0)):
        setting = Setting(mlp, TARGET, replace(RESTLESS, decay=decay))
        delta = sent(recipes.labelset_fedavg(setting), federation, 1)["delta"]["head.weight"]
        assert low <= float(delta.sum(0).abs().max()) <= high
        assert float(delta.abs().max()) > 1e-2


def relabelled(federation: Federation, to: Tensor) -> Federation:
    """Label y is called to[y], and its row goes along."""
    back = to.argsort()
    clients = tuple(c._replace(y=to[c.y]) for c in federation.clients)
    params = {k: v[back] if k in HEAD else v for k, v in federation.params.items()}
    return Federation(clients, params, {}, register(clients, len(to)), federation.seeds)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PAIRS)
def test_names_of_labels_do_not_matter(name: str, setting: Setting, mlp: Model) -> None:
    algorithm = PAIRS[name][0](setting)
    federation, to = double(make_federation(mlp)), torch.tensor([3, 0, 4, 1, 2])
    one = final(algorithm, federation, 2, cohort=4).server["params"]
    two = final(algorithm, relabelled(federation, to), 2, cohort=4).server["params"]
    assert max_difference({k: v[to] if k in HEAD else v for k, v in two.items()}, one) < 1e-13
    assert max_difference(two, one) > 1e-3


def worlds(mlp: Model) -> tuple[Federation, Federation, Setting]:
    """Client 1 with labels 1, 2, 3 of five; and 2, 5, 8 of nine, among others of other labels."""
    five = make_federation(mlp)
    model = build(lambda: Mlp((FEATURES,), (10,), 9), seed=3)
    to, away = torch.tensor([0, 2, 5, 8, 1]), torch.tensor([7, 1, 4, 6, 0])
    clients = tuple(c._replace(y=(to if i == 1 else away)[c.y]) for i, c in enumerate(five.clients))
    params = five.params | {k: model.init()[0][k].index_copy(0, to, five.params[k]) for k in HEAD}
    nine = Federation(clients, params, {}, register(clients, 9), Seeds.of(0))
    return five, nine, Setting(model, TARGET, Local(lr=0.1, epochs=2, batch=8))


@pytest.mark.parametrize("name", PAIRS)
def test_a_client_learns_nothing_of_the_others(name: str, mlp: Model, setting: Setting) -> None:
    """No bit of its messages, state or update depends on K or on the others' labels."""
    five, nine, other = worlds(mlp)
    make = PAIRS[name][0]
    one, two = job(make(setting), five, 1), job(make(other), nine, 1)
    for a, b in ((one.message, two.message), (one.state, two.state)):
        x, y = flatten(a), flatten(b)
        assert x.keys() == y.keys()
        assert all(torch.equal(x[k], y[k]) for k in x)
    done = zip(
        make(setting).client_update(*one[1:5]), make(other).client_update(*two[1:5]), strict=True
    )
    for a, b in done:  # what it sends, what it keeps
        assert all(torch.equal(v, flatten(b)[k]) for k, v in flatten(a).items())
    shapes = {tuple(v.shape)[:1] for v in flatten(two.message).values()}
    assert not shapes & {(9,), (5,)}
    x, y = (
        flatten(job(make(s, mode="public"), f, 1).message)
        for s, f in ((setting, five), (other, nine))
    )
    assert x["params/head.bias"].shape != y["params/head.bias"].shape


def test_what_travels(setting: Setting, federated: Any) -> None:
    """Of 10 x 5 + 5 numbers of the head, 10 L + L travel each way; L numbers more on the way down.

    Names and shapes are the same for all clients, whatever they hold.
    """
    body = 10 * FEATURES + 10
    federation = federated(
        (*make_clients()[:5], client_data(torch.zeros(7, FEATURES), torch.ones(7).long(), 5))
    )
    for slots, width in ((None, 3), (4, 4)):
        algorithm = recipes.labelset_fedavg(setting, slots=slots)
        down = [job(algorithm, federation, i).message for i in range(6)]
        up = [sent(algorithm, federation, i) for i in range(6)]
        assert {size_in_bytes(m) for m in down} == {4 * (body + 11 * width) + 8 * width}
        assert {size_in_bytes({"delta": u["delta"]}) for u in up} == {4 * (body + 11 * width)}
        assert {tuple(flatten(m)) for m in down} == {
            (*(f"params/{k}" for k in federation.params), "slots/local")
        }
        assert set(flatten(up[5])) == {
            *(f"delta/{k}" for k in federation.params), "report/id", "report/loss"
        }  # fmt: skip
        # A client is sent only the numbers of its own labels, in slots of any order.
        assert sorted(down[5]["slots"]["local"].tolist()) == [-1] * (width - 1) + [0]
    assert size_in_bytes(job(recipes.fedavg(setting), federation, 0).message) == 4 * (body + 55)


def test_slots_say_nothing_of_the_order_of_labels() -> None:
    holds = torch.zeros(400, 6).bool()
    holds[:, [1, 4]] = True
    table = slot_table(holds, 4, seed=0)
    assert all(sorted(row) == [-1, -1, 1, 4] for row in table.tolist())
    first = [row.index(1) for row in table.tolist()]
    counts = torch.bincount(torch.tensor(first), minlength=4)
    assert 60 < int(counts.min()) <= int(counts.max()) < 140
    assert not torch.equal(table, slot_table(holds, 4, seed=1))
    with pytest.raises(InputError, match="slots=1 is too few, as client 0 holds 2 labels; give at"):
        slot_table(holds, 1, seed=0)


def test_shares_and_sums_of_rows() -> None:
    weights = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64)
    assert weights.sum() != 1  # rounded: a label that all hold must not be divided by it
    holds = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    shares = holder_shares(weights, holds)
    assert torch.equal(shares[:, 0], weights)
    two = torch.tensor([7 / 8, 0, 1 / 8, 0], dtype=torch.float64)
    assert float((shares[:, 1] - two).abs().max()) < 1e-15
    assert float(shares[:, 2].abs().max()) == 0  # held by a client of weight 0 alone
    assert torch.equal(shares[:, 3], torch.tensor([0.0, 1.0, 0.0, 0.0]).double())
    rows = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0))
    rows[3] = torch.nan  # what has no share is left out, not multiplied by 0
    got = row_sum(shares, rows)
    assert torch.equal(got[0], weighted_sum(weights, {"v": rows[:, 0]})["v"])
    assert torch.equal(got[3], rows[1, 3])
    assert not got[2].any()


def test_local_labels_are_ranks() -> None:
    y = torch.tensor([7, 2, 2, 9, 0, 7])
    data = ClientData(torch.zeros(6, 1), y, torch.tensor([1, 1, 1, 1, 0, 1.0]), torch.tensor(0))
    local, labels = local_labels(data)
    assert local.tolist() == [1, 0, 0, 2, 0, 1]
    assert int(labels) == 3
    local, labels = local_labels(ClientData(torch.zeros(0, 1), y[:0], torch.zeros(0), data.id))
    assert local.shape == (0,)
    assert int(labels) == 0
