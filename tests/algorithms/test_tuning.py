"""Central tuning: one step by hand, what does not change, absent labels, and whether it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.local import Local
from fedshift.data import Examples, client_data
from fedshift.engine.backends import loop
from fedshift.engine.run import Federation, Round, play_round, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import key
from fedshift.tree import Params, Parts
from support.by_hand import final, max_difference
from support.comparing import same
from support.federations import (
    CLASSES,
    FEATURES,
    TARGET,
    double,
    make_clients,
    make_federation,
)
from support.normals import drawn
from support.tuned import first_round, tuned, uneven

HEAD = ("head.weight", "head.bias")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["private", "public"])
def test_no_steps_are_no_tuning(mode: Any, setting: Setting, federated: Any) -> None:
    plain = recipes.labelset_fedavg(setting, mode=mode)
    for loss in ("mse", "pairwise", "kl"):
        assert same(tuned(plain, loss=loss, steps=0), plain, federated()) == 0
        assert same(tuned(plain, loss=loss, steps=1), plain, federated()) > 1e-4


def clients_models(federation: Federation, played: Round, updates: list[Parts]) -> list[Params]:
    """Each client's model after training, with the head's rows by label, zero where unknown."""
    models = []
    for i, update in enumerate(updates):
        labels = played.server["sets"]["slot"][i]
        whole = dict(federation.params)
        for k, v in update["delta"].items():
            if k in HEAD:
                rows = torch.zeros_like(federation.params[k])
                rows[labels[labels >= 0]] = v[labels >= 0]
                v = rows
            whole[k] = whole[k] + v
        models.append(whole)
    return models


def risk(kind: str, federation: Federation, weights: Tensor, z: list[Tensor], q: Tensor) -> Tensor:
    """The definition, with pairs written out: z [n, K] the clients' logits, q [n, K] the model."""
    total = torch.zeros((), dtype=torch.float64)
    for i, logits in enumerate(z):
        holds = federation.table["labels"][i] > 0
        a, b = logits[:, holds].softmax(1), q[:, holds]
        pairs = a[:, :, None] * b[:, None] - a[:, None] * b[:, :, None]
        terms = (a - b).square().sum(1) if kind == "mse" else pairs.square().sum((1, 2))
        if kind == "kl":
            terms = (a * (a / (b / b.sum(1, keepdim=True))).log()).sum(1)
        total = total + weights[i] * terms.mean()
    return total


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
@pytest.mark.parametrize("part", ["head", "all"])
def test_one_step_is_a_step_on_the_loss(kind: Any, part: Any, mlp: Model) -> None:
    """theta - lr grad of the definition, from the aggregate, on the inputs drawn as one batch."""
    federation = double(uneven(mlp))
    plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(lr=0.3, batch=8)))
    algorithm = tuned(plain, loss=kind, steps=1, batch=16, lr=0.7, optimizer="sgd", part=part)
    got, (before, replies) = final(algorithm, federation, 1), first_round(plain, federation)
    (rows,) = algorithm._batches(key(federation.seeds.batch, "server", 1))
    assert len(rows) == 16
    x = algorithm.inputs[rows]
    z = [mlp(p, {}, x)["logits"] for p in clients_models(federation, before, replies)]
    leaves = {k: v.clone().requires_grad_() for k, v in before.server["params"].items()}
    q = mlp(leaves, {}, x)["logits"].softmax(1)
    loss = risk(kind, federation, before.weights, z, q)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for k, v in before.server["params"].items():
        moves = part == "all" or k in HEAD
        want = v - 0.7 * grads[k] if moves else v
        assert float((got.server["params"][k] - want).abs().max()) < (1e-14 if moves else 1e-300)
    assert float(grads["body.1.weight"].abs().max()) > 1e-5
    tuning = got.server["tuning"]
    assert abs(float(tuning["loss"][0]) - float(loss.detach())) < 1e-14
    assert float(tuning["loss"][1]) < float(loss.detach())
    outside = q[:, [0, 4]].sum(1).mean().detach()
    assert abs(float(tuning["outside"][0]) - float(outside)) < 1e-14


def test_models_are_asked_with_their_own_statistics(normed: Model) -> None:
    """h_k with client k's running statistics, h with the server's new ones."""
    federation = uneven(normed)
    plain = recipes.labelset_fedavg(Setting(normed, TARGET, Local(lr=0.3, batch=7)))
    one_step = tuned(plain, steps=1, batch=40, lr=0.7, optimizer="sgd")
    got = final(one_step, federation, 1).server
    measured = got["tuning"]["loss"][0]
    before, replies = first_round(plain, federation)
    models, x = clients_models(federation, before, replies), drawn(40, FEATURES, seed=5).float()
    statistics = [update["buffers"] | update["counters"] for update in replies]
    new, old = before.server["buffers"], federation.buffers
    leaves = {k: v.clone().requires_grad_() for k, v in before.server["params"].items()}

    def loss(theirs: list[Params], ours: Params) -> Tensor:
        z = [normed(p, b, x)["logits"] for p, b in zip(models, theirs, strict=True)]
        q = normed(leaves, ours, x)["logits"].softmax(1)
        return risk("mse", federation, before.weights, [v.detach() for v in z], q)

    assert float(measured) == pytest.approx(loss(statistics, new).item(), abs=1e-6)
    for theirs, ours in (([new] * 3, new), ([old] * 3, new), (statistics, old)):
        assert abs(float(measured) - loss(theirs, ours).item()) > 1e-4
    for buffers, equal in ((new, True), (old, False)):
        (grad,) = torch.autograd.grad(loss(statistics, buffers), leaves["head.weight"])
        gap = got["params"]["head.weight"] - (leaves["head.weight"] - 0.7 * grad).detach()
        assert (float(gap.abs().max()) < 1e-6) == equal


@pytest.mark.few(2)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_rounding_moves_nothing(kind: Any, exact: bool, mlp: Model) -> None:
    """Adam makes full steps of a gradient that is rounding: 0.018 in a round, with "pairwise"."""
    data = make_clients()[3]
    mode: Any = "public" if kind == "mse" else "private"
    plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(batch=64)), mode=mode)

    def moved(*inputs: Tensor) -> float:
        clients = (data._replace(x=x, id=torch.tensor(i)) for i, x in enumerate(inputs))
        federation = make_federation(mlp, tuple(clients))
        federation = double(federation) if exact else federation
        many: dict[str, Any] = {"loss": kind, "steps": 50, "lr": 1e-3}
        before, after = (final(a, federation, 1).server for a in (plain, tuned(plain, **many)))
        return max_difference(before["params"], after["params"])

    assert moved(data.x) == 0
    assert moved(data.x, data.x, data.x) == 0
    assert moved(data.x, data.x + 0.3) > 1e-4  # the control: models that are apart


def test_clients_without_examples_say_nothing(setting: Setting, federated: Any) -> None:
    """A client without labels has weight 0, and its answer may be NaN."""
    empty = client_data(torch.zeros(0, FEATURES), torch.zeros(0).long(), 6)
    with_empty, without = federated((*make_clients(), empty)), federated()
    algorithm = tuned(recipes.labelset_ditto(setting))  # which trains whatever the weight
    one, two = (final(algorithm, f, 1).server for f in (with_empty, without))
    assert max_difference(one["params"], two["params"]) == 0
    assert torch.equal(one["tuning"]["loss"], two["tuning"]["loss"])


def lacking(mlp: Model) -> Federation:
    """Three clients without label 4, in float64."""
    clients = tuple(
        client_data(c.x, c.y.clamp(max=3), i)
        for i, c in enumerate(make_clients(sizes=(30, 40, 20)))
    )
    return double(make_federation(mlp, clients))


def test_mass_can_flee_to_absent_labels(mlp: Model) -> None:
    """The pairwise loss's trivial minimum in private mode, seen in server["tuning"].

    h(Y_k|x) = 0 has loss 0 for all clients, and one row can reach it. MSE pulls the other way.
    """
    setting = Setting(mlp, TARGET, Local(lr=0.3, epochs=4, batch=8))
    plain, outside = recipes.labelset_fedavg(setting), {}
    for loss in ("mse", "pairwise"):
        algorithm = tuned(plain, loss=loss, steps=60, lr=0.05)
        server = final(algorithm, lacking(mlp), 1).server
        assert server["absent"]["now"].tolist() == [False] * 4 + [True]
        outside[loss] = server["tuning"]["outside"].tolist()
        assert server["tuning"]["loss"][1] < server["tuning"]["loss"][0]
        x = algorithm.inputs
        q = mlp(server["params"], {}, x)["logits"].softmax(1)
        assert abs(outside[loss][1] - float(q[:, 4].mean())) < 1e-14
    assert outside["mse"][0] == outside["pairwise"][0]
    assert outside["mse"][1] < 0.05 < outside["mse"][0] < 0.5 < 0.9 < outside["pairwise"][1]


def test_labels_within_the_union_cannot_lose_it(mlp: Model) -> None:
    """over = "union": rows of absent labels stay bit for bit, and mass has nowhere to flee."""
    setting = Setting(mlp, TARGET, Local(lr=0.3, epochs=4, batch=8))
    plain, federation = recipes.labelset_fedavg(setting), lacking(mlp)
    for over, stays in (("all", False), ("union", True)):
        algorithm = tuned(plain, loss="pairwise", steps=60, lr=0.05, over=over)
        server = final(algorithm, federation, 1).server
        rows = (server["params"][k][4] - federation.params[k][4] for k in HEAD)
        assert (max(float(v.abs().max()) for v in rows) == 0) == stays
        assert (float(server["tuning"]["outside"][1]) < 0.5) == stays
        assert server["tuning"]["loss"][1] < server["tuning"]["loss"][0]


def test_inputs_too_large_for_the_parameters_are_refused(mlp: Model) -> None:
    """Infinite after the cast alone, they made of the clients' answers NaN, and blamed their lr."""
    plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(lr=0.1, steps=2)))
    fine = drawn(3, FEATURES, seed=5).double()
    large = fine.clone()
    large[2] = 1e300
    federation = make_federation(mlp, make_clients())
    words = "of the server is too large for torch.float32, the type of the parameters"
    with pytest.raises(InputError, match=f"central tuning: input 2 {words}"):
        final(CentralTuning(plain, large), federation, 1)
    labelled = Examples(large, torch.arange(3))
    with pytest.raises(InputError, match=f"central tuning: labelled example 2 {words}"):
        final(CentralTuning(plain, fine, labelled=labelled), federation, 1)
    fits = CentralTuning(plain, large / 1e270, labelled=Examples(large / 1e270, torch.arange(3)))
    assert final(fits, federation, 1).t == 1


def test_a_diverged_client_is_named_and_not_the_tuning(setting: Setting, federated: Any) -> None:
    """Finite weights with outputs that overflow pass the gate; the error must not blame tuning."""
    algorithm, federation = tuned(recipes.labelset_fedavg(setting)), federated()
    server = start(algorithm, federation).server

    def spoilt(update: Any, jobs: Any) -> Any:
        for reply in loop(update, jobs):
            if reply.client == 2:
                delta = {k: torch.full_like(v, 1e30) for k, v in reply.update["delta"].items()}
                reply = reply._replace(update=reply.update | {"delta": delta})
            yield reply

    ids = torch.arange(len(federation.clients))
    with pytest.raises(TrainingError, match=r"client 2: its model's outputs.*before any tuning"):
        play_round(algorithm, federation, server, {}, ids, 1, spoilt)
    assert play_round(algorithm, federation, server, {}, ids, 1, loop).t == 1


HEAD = ("head.weight", "head.bias")


def test_absent_labels_stay_under_restricted_kl(mlp: Model) -> None:
    """Rows of labels that no client of the cohort holds: bit for bit, whatever Adam remembers."""
    setting = Setting(mlp, TARGET, Local(lr=0.3, batch=8))
    plain, federation = recipes.labelset_fedavg(setting), uneven(mlp)
    for options in ({}, {"moments": "kept"}):
        algorithm = tuned(plain, loss="kl", part="all", **options)
        assert algorithm.label_rules() == {"mode": "private", "tune": "kl", "tune_over": None}
        server, states = start(algorithm, federation).server, {}
        for t, ids in enumerate(([0, 1, 2], [0]), start=1):  # label 3 is absent from the second
            played = play_round(algorithm, federation, server, states, torch.tensor(ids), t)
            moved = [
                max(max_difference({k: played.server["params"][k][y]}, {k: server["params"][k][y]})
                    for k in HEAD) > 0
                for y in range(CLASSES)
            ]  # fmt: skip
            assert moved == [False, True, True, t == 1, False]
            server, states = played.server, played.states
    everyone = recipes.labelset_fedavg(setting, mode="holders")
    rules = tuned(everyone, loss="kl").label_rules()
    assert rules == {"mode": "holders", "tune": "kl", "tune_over": "all"}
    server = final(tuned(everyone, loss="kl"), federation, 1).server  # softmax over all labels
    assert (
        max_difference(
            {"": server["params"]["head.bias"][4]}, {"": federation.params["head.bias"][4]}
        )
        > 0
    )


@pytest.mark.parametrize(
    ("mode", "options"),
    [("private", {"loss": "kl"}), ("private", {"loss": "mse", "over": "union"}),
     ("public", {"loss": "pairwise", "over": "union"})],
)  # fmt: skip
def test_kept_moments_do_not_move_absent_labels(mode: Any, options: Any, mlp: Model) -> None:
    """Adam remembers the rows of label 3, which none of the second round's two clients holds."""
    sets, sources = ([1, 2], [2, 4], [1, 3]), make_clients(sizes=(12, 20, 28))
    clients = tuple(
        client_data(c.x, torch.tensor(labels)[torch.arange(len(c.y)) % 2], i)
        for i, (c, labels) in enumerate(zip(sources, sets, strict=True))
    )
    federation = make_federation(mlp, clients)
    plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(lr=0.3, batch=8)), mode=mode)
    first, second = torch.arange(3), torch.tensor([0, 1])
    for moments in ("new", "kept"):
        algorithm = tuned(plain, part="all", moments=moments, **options)
        one = play_round(algorithm, federation, start(algorithm, federation).server, {}, first, 1)
        ends = [
            play_round(a, federation, one.server, one.states, second, 2).server["params"]
            for a in (plain, algorithm)
        ]
        for k in HEAD:
            moved = [
                max_difference({k: ends[0][k][y]}, {k: ends[1][k][y]}) > 0 for y in range(CLASSES)
            ]
            assert moved == [False, True, True, False, True]


LABELLED = Examples(drawn(30, FEATURES, seed=6), torch.arange(30) % 3 + 1)


def test_steps_end_where_held_out_inputs_say(setting: Setting, federated: Any) -> None:
    """A rate at which the loss only grows leaves the aggregate; one at which it falls does not."""
    plain, federation = recipes.labelset_fedavg(setting), federated()
    given: dict[str, Any] = {"loss": "kl", "stop": "held-out", "optimizer": "sgd", "steps": 30}
    far = tuned(plain, **(given | {"lr": 100.0}))
    assert same(far, plain, federation, 1) == 0
    near, without = tuned(plain, **(given | {"lr": 0.1})), replace(far, lr=0.1, stop="steps")
    assert same(near, plain, federation, 1) > 1e-4
    assert same(near, without, federation, 1) > 1e-6  # other inputs are drawn
    rows = torch.cat(near._batches(0)).unique()
    assert rows.tolist() == [i for i in range(40) if i % 5 != 4]
    assert torch.cat(without._batches(0)).unique().tolist() == list(range(40))


@pytest.mark.parametrize("mode", ["private", "public"])
def test_where_each_loss_would_lead_is_measured_beside_the_aggregate(mode: Any, mlp: Model) -> None:
    """Also without steps, and after the rounds of tuning; the run itself is the same."""
    federation = double(uneven(mlp))
    plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(lr=0.3, batch=8)), mode=mode)
    only = tuned(plain, loss="kl", steps=0, labelled=LABELLED)
    assert same(only, plain, federation, 2) < 1e-12  # public replies are kept, not summed
    before, _ = first_round(plain, federation)
    z = mlp(before.server["params"], {}, LABELLED.x.double())["logits"]
    accuracy = final(only, federation, 1).server["tuning"]["accuracy"]
    assert float(accuracy[0]) == float((z.argmax(1) == LABELLED.y).double().mean())
    assert (float(accuracy[1]) == float(accuracy[3])) == (
        mode == "public"
    )  # there a weighted mean both
    steps = final(tuned(plain, loss="kl", labelled=LABELLED), federation, 1).server["tuning"]
    assert torch.equal(steps["accuracy"], accuracy)  # before tuning
    first = tuned(plain, loss="kl", labelled=LABELLED, rounds=1)
    one, two = (final(first, federation, t).server["tuning"]["accuracy"] for t in (1, 2))
    assert torch.equal(one, accuracy)
    assert not torch.equal(two, accuracy)
    assert only.label_rules() == plain.label_rules()


def test_optima_over_the_union_are_those_of_present_labels(mlp: Model) -> None:
    """Where labels are absent pairwise flees over all of them; where none is, the same numbers."""
    setting = Setting(mlp, TARGET, Local(lr=0.3, batch=8))
    plain, few = recipes.labelset_fedavg(setting), uneven(mlp)  # labels 1 to 3 alone
    every = make_federation(mlp, make_clients(sizes=(30, 40, 20)))
    accuracy = {}
    for name, federation in (("few", few), ("every", every)):
        for over in ("all", "union"):
            algorithm = tuned(plain, steps=0, labelled=LABELLED, over=over)
            server = final(algorithm, federation, 1).server
            assert bool(server["absent"]["now"].any()) == (name == "few")
            accuracy[name, over] = server["tuning"]["accuracy"]
    assert torch.equal(accuracy["every", "union"], accuracy["every", "all"])
    assert float(accuracy["few", "all"][2]) == 0.0  # all mass on the absent labels, which none has
    assert float(accuracy["few", "union"][2]) > 0.2
    assert torch.equal(
        accuracy["few", "union"][[0, 3]], accuracy["few", "all"][[0, 3]]
    )  # KL: no union
