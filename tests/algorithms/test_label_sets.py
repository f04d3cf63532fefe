"""Label sets: laws, what travels, what must not move, and SCAFFOLD and Ditto among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.labelsets import LabelSets, Mode
from fedshift.algorithms.method import Method
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import CrossEntropy, Proximal, Term
from fedshift.data import ClientData, client_data, register
from fedshift.engine.run import Federation, Round, first_state, run, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.seeds import Seeds
from fedshift.server.optimizers import Sgd
from fedshift.server.rows import slot_table
from fedshift.tree import Parts, flatten, size_in_bytes
from support.by_hand import final, max_difference
from support.federations import (
    CLASSES,
    FEATURES,
    SIZES,
    TARGET,
    Given,
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


def job(algorithm: Method, federation: Federation, client: int, t: int = 1) -> Given:
    """The job of a client in the first round, with all clients."""
    server = start(algorithm, federation).server
    everyone = torch.arange(len(federation.clients))
    cohort = {"cohort": {"id": everyone, "weight": algorithm.weigh(server, everyone)}}
    data = federation.clients[client]
    plans = plan_all(algorithm.phases(), data, t, federation.seeds.batch, client)
    state = first_state(algorithm, federation, client)
    return Given(client, algorithm.broadcast(server | cohort, client), state, data, plans)


def sent(algorithm: Method, federation: Federation, client: int) -> Parts:
    return algorithm.client_update(*job(algorithm, federation, client)[1:5])[0]


def labels_of(algorithm: Method, federation: Federation, client: int) -> Tensor:
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


HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("option", ["I", "II"])
def test_rows_of_the_control_are_means_over_holders(option: Any, setting: Setting) -> None:
    """c(y) = sum_{i: y in Y_i} c_i(y) / #holders of y in the population, in sampled cohorts too."""
    federation = double(make_federation(setting.model))
    holds = federation.table["labels"] > 0
    algorithm = recipes.labelset_scaffold(setting, option=option, slots=4)
    for played in run(algorithm, federation, 3, cohort=3):
        for k, c in played.server["control"].items():
            total = torch.zeros_like(c)
            for i, state in played.states.items():
                control = state["control"][k]
                assert len(control) == (int(holds[i].sum()) if k in HEAD else len(c))
                at = holds[i] if k in HEAD else torch.ones(len(c)).bool()
                total[at] += control
            holders = holds.sum(0).double() if k in HEAD else torch.full((len(c),), 6.0).double()
            wide = holders.reshape(-1, *[1] * (c.ndim - 1))
            assert float((c - total / wide).abs().max()) < 1e-14
    assert float((c - total / 6).abs().max()) > 1e-3  # the head's bias: not the population's mean


def personal(played: Round, client: int) -> dict[str, torch.Tensor]:
    return played.states[client]["personal"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["labelset_fedavg", "labelset_ditto"])
def test_clients_serve_their_own_labels(name: str, setting: Setting, federated: Any) -> None:
    """Other labels have probability 0, also in a model of K outputs; the rest is as trained."""
    federation, algorithm = federated(), getattr(recipes, name)(setting)
    done = final(algorithm, federation, 2)
    x = federation.clients[1].x
    holds = federation.table["labels"][1] > 0
    model = setting.model(*algorithm.model_for(done.server, done.states[1]), x)["logits"]
    probabilities = model.softmax(1)
    assert probabilities.shape[1] == CLASSES
    assert float(probabilities[:, ~holds].max()) == 0
    shared = setting.model(done.server["params"], {}, x)["logits"]
    assert torch.equal(model[:, holds], shared[:, holds]) == (name == "labelset_fedavg")
    mine = {k: v[holds] if k in HEAD else v for k, v in done.server["params"].items()}
    served_params = mine if name == "labelset_fedavg" else personal(done, 1)
    want = setting.model(served_params, {}, x)["logits"].softmax(1)
    assert float((probabilities[:, holds] - want).abs().max()) < 1e-6
    public = getattr(recipes, name)(setting, mode="public")
    done = final(public, federation, 1)
    served = setting.model(*public.model_for(done.server, done.states[1]), x)["logits"].softmax(1)
    assert float(served[:, ~holds].min()) > 0


MAKERS: dict[str, Any] = {
    "fedprox": lambda s, slots: recipes.labelset_fedprox(s, mu=0.5, slots=slots),
    "scaffold": lambda s, slots: recipes.labelset_scaffold(s, slots=slots),
    "ditto": lambda s, slots: recipes.labelset_ditto(s, slots=slots),
    "moon": lambda s, slots: LabelSets(recipes.moon(s), slots=slots),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MAKERS)
def test_empty_slots_change_nothing(name: str, setting: Setting, federated: Any) -> None:
    """What the server has and clients keep, in two rounds of cohorts."""
    federation = double(federated())
    one, two = (final(MAKERS[name](setting, k), federation, 2, cohort=4) for k in (3, 5))
    other = final(recipes.labelset_fedavg(setting), federation, 2, cohort=4)
    assert max_difference(one.server["params"], two.server["params"]) < 1e-14
    for i, state in one.states.items():
        again = flatten(two.states[i])
        assert all(float((v - again[k]).abs().max()) < 1e-13 for k, v in flatten(state).items())
    if name != "ditto":
        assert max_difference(one.server["params"], other.server["params"]) > 1e-4


def test_a_client_registered_with_other_labels_is_named(setting: Setting, federated: Any) -> None:
    federation = federated()
    labels = federation.table["labels"].clone()
    labels[1, 0] = 5
    wrong = replace(federation, table=federation.table | {"labels": labels})
    with pytest.raises(TrainingError, match="client 1 has examples of 3 labels and is regis.* 4;"):
        final(recipes.labelset_fedavg(setting), wrong, 1)


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


def test_what_is_revealed_is_described(setting: Setting) -> None:
    revealed = recipes.labelset_scaffold(setting).reveals()
    assert "which labels it holds, once, to the server alone" in revealed["register"]
    assert "own labels" in revealed["delta"]
    # From the sums alone numbers of holders, and not which clients these are.
    assert "how many clients hold each label (among ten an AUC of 0.71" in revealed["delta"]
    assert "cannot tell which of them (0.50), unless it knows who takes part" in revealed["delta"]
    assert "guess" not in revealed["delta"]
    modes: tuple[Mode, ...] = ("public", "holders")
    for mode in modes:
        whole = recipes.labelset_scaffold(setting, mode=mode).reveals()
        assert whole["delta"] == recipes.scaffold(setting).reveals()["delta"]
