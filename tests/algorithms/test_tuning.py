"""Central tuning: one step by hand, what stays, and how it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.local import Local
from fedshift.data import Examples, client_data
from fedshift.engine.backends import loop
from fedshift.engine.run import Federation, Round, play_round, run, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.seeds import key
from fedshift.server.agreement import farthest
from fedshift.tree import Params, Parts
from support.by_hand import apart, final
from support.comparing import same
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation
from support.normals import drawn

HEAD = ("head.weight", "head.bias")


def tuned(inner: Any, **options: Any) -> CentralTuning:
    given = {"steps": 3, "batch": 16, "lr": 0.01} | options
    return CentralTuning(inner, drawn(40, FEATURES, seed=5), **given)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["private", "public"])
def test_no_steps_are_no_tuning(mode: Any, setting: Setting, federated: Any) -> None:
    plain = recipes.labelset_fedavg(setting, mode=mode)
    for loss in ("mse", "pairwise", "kl"):
        assert same(tuned(plain, loss=loss, steps=0), plain, federated()) == 0
        assert same(tuned(plain, loss=loss, steps=1), plain, federated()) > 1e-4


def uneven(model: Model) -> Federation:
    """Clients of 12, 20 and 28 examples with labels 1-2, 1-3 and 2-3; 0 and 4 are nobody's."""
    sets = ([1, 2], [1, 2, 3], [2, 3])
    clients = tuple(
        client_data(c.x, torch.tensor(held)[torch.arange(len(c.y)) % len(held)], i)
        for i, (c, held) in enumerate(zip(make_clients(sizes=(12, 20, 28)), sets, strict=True))
    )
    return make_federation(model, clients)


def first_round(plain: Algorithm, federation: Federation) -> tuple[Round, list[Parts]]:
    """The round without tuning, and what the clients sent in it."""
    replies: list[Parts] = []

    def listening(update: Any, jobs: Any) -> Any:
        for reply in loop(update, jobs):
            replies.append(reply.update)
            yield reply

    server, everyone = start(plain, federation).server, torch.arange(len(federation.clients))
    return play_round(plain, federation, server, {}, everyone, 1, listening), replies


def clients_models(federation: Federation, played: Round, updates: list[Parts]) -> list[Params]:
    """Each client's model after training, with the head's rows by label, zero where unknown."""
    found = []
    for i, update in enumerate(updates):
        labels = played.server["sets"]["slot"][i]
        whole = dict(federation.params)
        for k, v in update["delta"].items():
            if k in HEAD:
                rows = torch.zeros_like(federation.params[k])
                rows[labels[labels >= 0]] = v[labels >= 0]
                v = rows
            whole[k] = whole[k] + v
        found.append(whole)
    return found


def risk(kind: str, federation: Federation, weights: Tensor, z: list[Tensor], q: Tensor) -> Tensor:
    """The definition, with pairs written out: z [n, K] the clients' logits, q [n, K] the model."""
    total = torch.zeros((), dtype=torch.float64)
    for i, logits in enumerate(z):
        held = federation.table["labels"][i] > 0
        a, b = logits[:, held].softmax(1), q[:, held]
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
    told = got.server["tuning"]
    assert abs(float(told["loss"][0]) - float(loss.detach())) < 1e-14
    assert float(told["loss"][1]) < float(loss.detach())
    outside = q[:, [0, 4]].sum(1).mean().detach()
    assert abs(float(told["outside"][0]) - float(outside)) < 1e-14


def test_models_are_asked_with_their_own_statistics(normed: Model) -> None:
    """h_k with client k's running statistics, h with the server's new ones."""
    federation = uneven(normed)
    plain = recipes.labelset_fedavg(Setting(normed, TARGET, Local(lr=0.3, batch=7)))
    one_step = tuned(plain, steps=1, batch=40, lr=0.7, optimizer="sgd")
    got = final(one_step, federation, 1).server
    told = got["tuning"]["loss"][0]
    before, replies = first_round(plain, federation)
    models, x = clients_models(federation, before, replies), drawn(40, FEATURES, seed=5).float()
    own = [update["buffers"] | update["counters"] for update in replies]
    new, old = before.server["buffers"], federation.buffers
    leaves = {k: v.clone().requires_grad_() for k, v in before.server["params"].items()}

    def loss(theirs: list[Params], ours: Params) -> Tensor:
        z = [normed(p, b, x)["logits"] for p, b in zip(models, theirs, strict=True)]
        q = normed(leaves, ours, x)["logits"].softmax(1)
        return risk("mse", federation, before.weights, [v.detach() for v in z], q)

    assert float(told) == pytest.approx(loss(own, new).item(), abs=1e-6)
    for theirs, ours in (([new] * 3, new), ([old] * 3, new), (own, old)):
        assert abs(float(told) - loss(theirs, ours).item()) > 1e-4
    for buffers, equal in ((new, True), (old, False)):
        (grad,) = torch.autograd.grad(loss(own, buffers), leaves["head.weight"])
        gap = got["params"]["head.weight"] - (leaves["head.weight"] - 0.7 * grad).detach()
        assert (float(gap.abs().max()) < 1e-6) == equal


def test_one_private_client_disagrees_with_nobody(mlp: Model) -> None:
    """At the loss's zero its identity rounds to either side; a loss that is told is never below."""
    for i in range(6):
        federation = make_federation(mlp, (make_clients()[i]._replace(id=torch.tensor(0)),))
        plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(batch=8)))
        loss = final(tuned(plain, loss="pairwise"), federation, 1).server["tuning"]["loss"]
        assert 0.0 <= float(loss.min()) <= float(loss.max()) < 1e-4


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
        return apart(before["params"], after["params"])

    assert moved(data.x) == 0
    assert moved(data.x, data.x, data.x) == 0
    assert moved(data.x, data.x + 0.3) > 1e-4  # the control: models that are apart


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_how_far_a_model_is_from_zero_loss(kind: Any) -> None:
    """Label by label; clients of weight 0 have no say."""
    p, q = drawn(3, 4, 5, seed=1).double().softmax(2), drawn(3, 4, 5, seed=2).double().softmax(2)
    w, most = torch.tensor([0.5, 0.0, 0.5]).double(), 0.0
    for k in (0, 2):
        for a, b in zip(p[k], q[k], strict=True):
            near = (a @ b) / (a @ a) * a if kind == "pairwise" else a
            most = max(most, *(abs(float(u) - float(v)) for u, v in zip(near, b, strict=True)))
    given = q.log() if kind == "kl" else q
    assert abs(float(farthest(kind, p, given, w)) - most) < 1e-15
    other = farthest(kind, p, given, torch.tensor([0.0, 1.0, 0.0]).double())
    assert abs(float(other) - most) > 1e-3
    near = {"mse": p, "pairwise": 0.5 * p, "kl": p.log()}[kind]
    assert float(farthest(kind, p, near, w)) < 1e-15


def test_clients_without_examples_say_nothing(setting: Setting, federated: Any) -> None:
    """A client that holds no label has weight 0 and an answer that is no number elsewhere."""
    empty = client_data(torch.zeros(0, FEATURES), torch.zeros(0).long(), 6)
    with_empty, without = federated((*make_clients(), empty)), federated()
    algorithm = tuned(recipes.labelset_ditto(setting))  # which trains whatever the weight
    one, two = (final(algorithm, f, 1).server for f in (with_empty, without))
    assert apart(one["params"], two["params"]) == 0
    assert torch.equal(one["tuning"]["loss"], two["tuning"]["loss"])


class Idle(nn.Module):
    """A network with a part that its logits do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.router = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x).relu()
        return {"logits": self.head(z), "client_logits": self.router(z)}


def test_what_the_logits_do_not_depend_on_stays() -> None:
    model = build(Idle, seed=1)
    plain = recipes.labelset_fedavg(Setting(model, TARGET, Local(batch=8)))
    first, done = (
        final(a, make_federation(model), 1).server["params"]
        for a in (plain, tuned(plain, part="all"))
    )
    moved = {k for k, v in done.items() if not torch.equal(v, first[k])}
    assert moved == {"body.weight", "body.bias", "head.weight", "head.bias"}


def test_statistics_and_clients_do_not_notice(normed: Model) -> None:
    """Running statistics stay; what clients send and keep in round 1 is the inner method's."""
    federation = make_federation(normed)
    plain = recipes.labelset_scaffold(Setting(normed, TARGET, Local(batch=7)))
    one, two = (final(a, federation, 1) for a in (plain, tuned(plain, part="all")))
    assert apart(one.server["buffers"] | {}, two.server["buffers"]) == 0
    assert apart(one.server["control"], two.server["control"]) == 0
    assert apart(one.states[2]["control"], two.states[2]["control"]) == 0
    assert apart(one.server["params"], two.server["params"]) > 1e-4
    assert tuned(plain).reveals() == plain.reveals()


def test_batches_are_of_the_round_and_the_seed(setting: Setting, federated: Any) -> None:
    algorithm = tuned(recipes.labelset_fedavg(setting))
    server = start(algorithm, federated()).server
    played = final(algorithm, federated(), 1)
    assert same(algorithm, algorithm, federated()) == 0
    assert server["tuning"]["loss"].tolist() == [0, 0]
    assert played.server["tuning"]["loss"].shape == (2,)
    one, two = (torch.cat(algorithm._batches(seed)) for seed in (0, 1))
    assert one.sort().values.tolist() == two.sort().values.tolist() == list(range(40))
    assert not torch.equal(one, two)


def lacking(mlp: Model) -> Federation:
    """Three clients without label 4, in float64."""
    clients = tuple(
        client_data(c.x, c.y.clamp(max=3), i)
        for i, c in enumerate(make_clients(sizes=(30, 40, 20)))
    )
    return double(make_federation(mlp, clients))


def test_mass_can_flee_to_absent_labels(mlp: Model) -> None:
    """The pairwise loss's trivial minimum in private mode, seen in server["tuning"].

    All clients are satisfied by h(Y_k|x) = 0, and one row can do that. MSE pulls the other way.
    """
    setting = Setting(mlp, TARGET, Local(lr=0.3, epochs=4, batch=8))
    plain, found = recipes.labelset_fedavg(setting), {}
    for loss in ("mse", "pairwise"):
        algorithm = tuned(plain, loss=loss, steps=60, lr=0.05)
        server = final(algorithm, lacking(mlp), 1).server
        assert server["absent"]["now"].tolist() == [False] * 4 + [True]
        found[loss] = server["tuning"]["outside"].tolist()
        assert server["tuning"]["loss"][1] < server["tuning"]["loss"][0]
        x = algorithm.inputs
        q = mlp(server["params"], {}, x)["logits"].softmax(1)
        assert abs(found[loss][1] - float(q[:, 4].mean())) < 1e-14
    assert found["mse"][0] == found["pairwise"][0]
    assert found["mse"][1] < 0.05 < found["mse"][0] < 0.5 < 0.9 < found["pairwise"][1]


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


def test_public_clients_speak_of_absent_labels(mlp: Model) -> None:
    """In public mode every client has learned that label 4 is never right: no mass flees to it."""
    setting = Setting(mlp, TARGET, Local(lr=0.3, epochs=4, batch=8))
    for mode, flees in (("public", False), ("private", True)):
        plain = recipes.labelset_fedavg(setting, mode=mode)
        algorithm = tuned(plain, loss="pairwise", steps=60, lr=0.05)
        outside = final(algorithm, lacking(mlp), 1).server["tuning"]["outside"]
        assert (float(outside[1]) > 0.9) == flees
        assert (float(outside[1]) < 0.2) != flees


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
                max(apart({k: played.server["params"][k][y]}, {k: server["params"][k][y]})
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
        apart({"": server["params"]["head.bias"][4]}, {"": federation.params["head.bias"][4]}) > 0
    )


def test_later_rounds_are_the_inner_methods(setting: Setting, federated: Any) -> None:
    """rounds = 2: two rounds as without a limit; the third trains on, and tunes no more."""
    plain, federation = recipes.labelset_scaffold(setting), federated()
    limited, always = (tuned(plain, loss="kl", rounds=r) for r in (2, 0))
    for t in (1, 2):
        assert same(limited, always, federation, t) == 0
    assert same(limited, always, federation, 3) > 1e-4
    second, third = (final(limited, federation, t).server for t in (2, 3))
    assert apart(second["tuning"], third["tuning"]) == 0
    assert limited.at(2) == limited
    assert limited.at(3) == replace(limited, steps=0, rounds=0)
    everyone = torch.arange(len(federation.clients))
    after = final(limited, federation, 2)
    by_hand = play_round(plain, federation, after.server, after.states, everyone, 3)
    assert apart(by_hand.server["params"], third["params"]) == 0


LABELLED = Examples(drawn(30, FEATURES, seed=6), torch.arange(30) % 3 + 1)


@pytest.mark.parametrize("mode", ["private", "public"])
def test_variants_are_variants(mode: Any, setting: Setting, federated: Any) -> None:
    """Each moves the model elsewhere, and the same way twice."""
    plain = recipes.labelset_fedavg(setting, mode=mode)
    usual = tuned(plain, loss="kl", labelled=LABELLED)
    variants: tuple[dict[str, Any], ...] = (
        {"weights": "confidence"}, {"temperature": "fitted"}, {"moments": "kept"},
    )  # fmt: skip
    for options in variants:
        variant = replace(usual, **options)
        assert same(variant, variant, federated()) == 0
        assert same(variant, usual, federated()) > 1e-6, options
    assert same(usual, replace(usual, labelled=None), federated()) == 0


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
    told = final(only, federation, 1).server["tuning"]["accuracy"]
    assert float(told[0]) == float((z.argmax(1) == LABELLED.y).double().mean())
    assert (float(told[1]) == float(told[3])) == (mode == "public")  # there a weighted mean both
    steps = final(tuned(plain, loss="kl", labelled=LABELLED), federation, 1).server["tuning"]
    assert torch.equal(steps["accuracy"], told)  # before tuning
    first = tuned(plain, loss="kl", labelled=LABELLED, rounds=1)
    one, two = (final(first, federation, t).server["tuning"]["accuracy"] for t in (1, 2))
    assert torch.equal(one, told)
    assert not torch.equal(two, told)
    assert only.label_rules() == plain.label_rules()


def test_what_is_kept_of_a_run_that_uses_no_new_option(setting: Setting, federated: Any) -> None:
    """Checkpoints of earlier versions have these parts, and no run asks for more."""
    plain = recipes.labelset_fedavg(setting)
    parts = start(plain, federated()).server.keys()
    server = start(tuned(plain), federated()).server
    assert server.keys() == parts | {"tuning"}
    assert server["tuning"].keys() == {"loss", "outside"}
    federation, labelled = federated(), tuned(plain, labelled=LABELLED)
    after = final(tuned(plain), federation, 1)  # of a version that measured nothing
    *_, went_on = run(labelled, federation, 2, after=after)
    assert apart(went_on.server["params"], final(labelled, federation, 2).server["params"]) == 0
    assert float(went_on.server["tuning"]["accuracy"][0]) > 0
    kept = start(tuned(plain, moments="kept"), federated()).server
    assert {k for k in kept if k.startswith("tuning_")} == {
        "tuning_first", "tuning_second", "tuning_count",
    }  # fmt: skip


def test_recipes_build_it(setting: Setting, federated: Any) -> None:
    inputs = drawn(40, FEATURES, seed=5)
    with_inputs = replace(setting, server_inputs=inputs)
    made = recipes.labelset_fedprox(with_inputs, tune="pairwise", tune_steps=2, tune_part="all")
    assert isinstance(made, CentralTuning)
    assert (made.loss, made.steps, made.lr, made.part) == ("pairwise", 2, 1e-3, "all")
    assert made.inputs is inputs
    assert isinstance(recipes.labelset_fedprox(with_inputs), LabelSets)
    for name in ("fedavg", "fedprox", "scaffold", "ditto"):
        default = getattr(recipes, f"labelset_{name}")(with_inputs, tune="mse")
        assert (default.loss, default.steps, default.batch, default.lr) == ("mse", 50, 128, 1e-3)
        assert (default.optimizer, default.part, default.over) == ("adam", "head", "all")
        assert (default.rounds, default.moments) == (0, "new")
    kept = recipes.labelset_ditto(with_inputs, tune="kl", tune_rounds=3, tune_moments="kept")
    assert isinstance(kept, CentralTuning)
    assert (kept.loss, kept.rounds, kept.moments) == ("kl", 3, "kept")
    other = replace(with_inputs, head=("body.",))
    inner = recipes.labelset_fedavg(other, tune="mse", tune_over="union", slots=3)
    assert isinstance(inner, CentralTuning)
    assert (inner.head, inner.over, inner.inner.head) == (("body.",), "union", ("body.",))  # type: ignore[attr-defined]
    assert inner.inner.slots == 3  # type: ignore[attr-defined]
    assert with_inputs == setting
    assert "inputs" not in repr(made)
    with pytest.raises(InputError, match=r'tune = "mse" needs unlabeled .* server_inputs=x\)'):
        recipes.labelset_fedavg(setting, tune="mse")
    with pytest.raises(
        InputError, match=r'tune_over = "union" has no place in it; leave tune_over'
    ):
        recipes.labelset_fedavg(with_inputs, tune="kl", tune_over="union")
    with pytest.raises(InputError, match='"held-out" holds out each of 5 inputs, and there are 4'):
        CentralTuning(LabelSets(recipes.fedavg(setting)), inputs[:4], stop="held-out")
    with pytest.raises(InputError, match=r"needs labelled .* server_examples=fedshift.data.Examp"):
        recipes.labelset_fedavg(with_inputs, tune="kl", tune_temperature="fitted")
    given = replace(with_inputs, server_examples=LABELLED)
    fitted = recipes.labelset_fedavg(
        given, tune="kl", tune_temperature="fitted", tune_weights="confidence", tune_stop="held-out"
    )
    assert isinstance(fitted, CentralTuning)
    assert (fitted.temperature, fitted.weights, fitted.stop) == ("fitted", "confidence", "held-out")
    assert fitted.labelled is LABELLED
    with pytest.raises(InputError, match='unknown tune "pair"; allowed: kl, mse, none, pairwise'):
        recipes.labelset_fedavg(setting, tune="pair")  # type: ignore[arg-type]


def test_impossible_settings_are_refused(setting: Setting, federated: Any) -> None:
    plain = recipes.labelset_fedavg(setting)
    for options, message in (
        ({"loss": "pair"}, 'unknown loss of central tuning "pair".* Did you mean "pairwise"'),
        ({"part": "body"}, 'unknown part to tune "body"; allowed: all, head'),
        ({"optimizer": "lion"}, 'unknown optimizer of central tuning "lion"'),
        ({"steps": -1}, "-1 tuning steps of 16 inputs; give 0 or more of 1 or more"),
        ({"moments": "old"}, 'unknown moments of central tuning "old"; allowed: kept, new'),
        ({"weights": "size"}, 'unknown weights of central tuning "size"'),
        ({"temperature": "fitted"}, r'temperature="fitted" needs labelled=Examples\(x, y\)'),
        ({"stop": "late"}, 'unknown stop of central tuning "late"; allowed: held-out, steps'),
        ({"rounds": -1}, "tuning rounds must be 0 or more, got -1"),
        ({"loss": "kl", "over": "union"}, 'labels alone, and over="union" has no place in it'),
        ({"moments": "kept", "optimizer": "sgd"}, 'moments="kept" is Adam\'s, and "sgd" has none'),
        ({"lr": 0.0}, "tuning lr must be a positive number, got 0.0"),
    ):
        with pytest.raises(InputError, match=message):
            tuned(plain, **options)
    with pytest.raises(InputError, match="central tuning has no inputs"):
        CentralTuning(plain, torch.zeros(0, FEATURES))
    with pytest.raises(InputError, match=r"inputs is a ndarray; give torch\.as_tensor"):
        CentralTuning(plain, np.zeros((3, FEATURES)))  # type: ignore[arg-type]
    for bad in (float("nan"), float("inf")):
        holed = torch.zeros(3, FEATURES)
        holed[1, 2] = bad
        with pytest.raises(InputError, match="central tuning: input 1 holds NaN or infinity"):
            CentralTuning(plain, holed)
    for wrong, message in (
        (CentralTuning(plain, torch.zeros(3, FEATURES + 1)), "the model fails on inputs"),
        (CentralTuning(recipes.fedavg(setting), torch.zeros(3, FEATURES)), "give a LabelSets, not"),
        (tuned(plain, head=("haed.",)), r"\['haed\.'\] matches no parameter"),
    ):
        with pytest.raises(InputError, match=message):
            final(wrong, federated(), 1)
    with pytest.raises(TrainingError, match="central tuning diverged at lr = 1e"):
        final(tuned(plain, optimizer="sgd", lr=1e38, part="all"), federated(), 1)


def test_a_diverged_client_is_named_and_not_the_tuning(setting: Setting, federated: Any) -> None:
    """Finite weights whose outputs overflow pass the gate; tuning must not be blamed for them."""
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
