"""Central tuning: one step by hand, what does not change, and how it fails."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.local import Local
from fedshift.data import Examples, client_data
from fedshift.engine.backends import loop
from fedshift.engine.run import Federation, Round, play_round, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.seeds import key
from fedshift.server.agreement import farthest
from fedshift.tree import Params, Parts
from support.by_hand import final, max_difference
from support.comparing import same
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation
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


def test_a_single_private_client_disagrees_with_no_other(mlp: Model) -> None:
    """At zero its formula rounds to either side; the reported loss is never below 0."""
    for i in range(6):
        federation = make_federation(mlp, (make_clients()[i]._replace(id=torch.tensor(0)),))
        plain = recipes.labelset_fedavg(Setting(mlp, TARGET, Local(batch=8)))
        loss = final(tuned(plain, loss="pairwise"), federation, 1).server["tuning"]["loss"]
        assert 0.0 <= float(loss.min()) <= float(loss.max()) < 1e-4


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


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_how_far_a_model_is_from_zero_loss(kind: Any) -> None:
    """Label by label; clients of weight 0 do not count."""
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
    """A client without labels has weight 0, and its answer may be NaN."""
    empty = client_data(torch.zeros(0, FEATURES), torch.zeros(0).long(), 6)
    with_empty, without = federated((*make_clients(), empty)), federated()
    algorithm = tuned(recipes.labelset_ditto(setting))  # which trains whatever the weight
    one, two = (final(algorithm, f, 1).server for f in (with_empty, without))
    assert max_difference(one["params"], two["params"]) == 0
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
    assert max_difference(one.server["buffers"] | {}, two.server["buffers"]) == 0
    assert max_difference(one.server["control"], two.server["control"]) == 0
    assert max_difference(one.states[2]["control"], two.states[2]["control"]) == 0
    assert max_difference(one.server["params"], two.server["params"]) > 1e-4
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


def test_public_clients_speak_of_absent_labels(mlp: Model) -> None:
    """In public mode every client has learned that label 4 is never right: no mass flees to it."""
    setting = Setting(mlp, TARGET, Local(lr=0.3, epochs=4, batch=8))
    for mode, flees in (("public", False), ("private", True)):
        plain = recipes.labelset_fedavg(setting, mode=mode)
        algorithm = tuned(plain, loss="pairwise", steps=60, lr=0.05)
        outside = final(algorithm, lacking(mlp), 1).server["tuning"]["outside"]
        assert (float(outside[1]) > 0.9) == flees
        assert (float(outside[1]) < 0.2) != flees


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
        (
            CentralTuning(plain, torch.zeros(3, FEATURES + 1)),
            rf"the server's inputs \[3, {FEATURES + 1}\] do not fit; .*: the model fails on inputs",
        ),
        (CentralTuning(recipes.fedavg(setting), torch.zeros(3, FEATURES)), "give a LabelSets, not"),
        (tuned(plain, head=("haed.",)), r"\['haed\.'\] matches no parameter"),
    ):
        with pytest.raises(InputError, match=message):
            final(wrong, federated(), 1)
    with pytest.raises(TrainingError, match="central tuning diverged at lr = 1e"):
        final(tuned(plain, optimizer="sgd", lr=1e38, part="all"), federated(), 1)


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


@pytest.mark.parametrize("kept", [True, False])
def test_networks_whose_answers_depend_on_the_batch_are_refused(kept: bool) -> None:
    """They failed in the middle of a run, where the last block had one input."""
    norm = partial(nn.BatchNorm1d, 6, track_running_stats=kept)
    layers = {"body": nn.Linear(FEATURES, 6), "norm": norm(), "head": nn.Linear(6, CLASSES)}
    model = build(lambda: nn.Sequential(OrderedDict(layers)), seed=0)
    plain = recipes.labelset_fedavg(Setting(model, TARGET, Local(lr=0.1, steps=2)))
    method = CentralTuning(plain, drawn(17, FEATURES, seed=5), "kl", batch=16, steps=4)
    federation = make_federation(model, make_clients())
    if kept:
        assert final(method, federation, 1).t == 1
        return
    with pytest.raises(InputError, match="cannot answer for one alone, as BatchNorm with track_"):
        final(method, federation, 1)


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
