"""Central tuning: its losses, their zeros, one step by hand, and how it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import apart, final
from comparing import same
from conftest import FEATURES, TARGET, double, make_clients, make_federation
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.local import Local
from fedshift.data import client_data
from fedshift.engine.backends import loop
from fedshift.engine.rounds import Federation, Round, play_round, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.agreement import disagreement, mse, pairwise, seen_by
from fedshift.tree import Params, Parts

HEAD = ("head.weight", "head.bias")
LABELS = torch.tensor([[0, 3, -1], [4, 1, 2], [2, -1, -1]])
WEIGHTS = torch.tensor([0.5, 0.3, 0.2]).double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def opinions(seed: int = 1) -> Tensor:
    """Clients' probabilities [3, 7, 3] over LABELS."""
    z = drawn(3, 7, 3, seed=seed).masked_fill((LABELS < 0)[:, None], -torch.inf)
    return z.softmax(2)


def by_loops(kind: str, p: Tensor, q: Tensor) -> float:
    """The definitions, label by label and pair by pair; q [7, 5] over all labels."""
    total = 0.0
    for k, labels in enumerate(LABELS.tolist()):
        slots = [(s, y) for s, y in enumerate(labels) if y >= 0]
        for b in range(q.shape[0]):
            if kind == "mse":
                terms = [(p[k, b, s] - q[b, y]) ** 2 for s, y in slots]
            else:
                terms = [
                    (p[k, b, s] * q[b, v] - p[k, b, r] * q[b, y]) ** 2
                    for s, y in slots
                    for r, v in slots
                ]
            total += float(WEIGHTS[k]) * float(sum(terms)) / q.shape[0]
    return total


@pytest.mark.parametrize("kind", ["mse", "pairwise"])
def test_the_losses_are_their_definitions(kind: Any) -> None:
    """The pairwise one by its identity, 2 (||p||^2 ||q||^2 - (p . q)^2), against both loops."""
    p, q = opinions(), drawn(7, 5, seed=2).softmax(1)
    found = float(disagreement(kind, p, seen_by(q, LABELS), WEIGHTS))
    assert abs(found - by_loops(kind, p, q)) < 1e-15
    assert abs(found - by_loops(kind, opinions(seed=3), q)) > 1e-4
    other = "pairwise" if kind == "mse" else "mse"
    assert abs(found - by_loops(other, p, q)) > 1e-2


def restriction(q: Tensor) -> Tensor:
    """h(y|x) / h(Y_k|x): subset consistency, what clients of one true h would say."""
    seen = seen_by(q, LABELS)
    return seen / seen.sum(2, keepdim=True)


def test_where_the_losses_are_zero() -> None:
    """Pairwise: at restrictions. MSE: only at equal models. And both trivial cases of the pair."""
    q = drawn(7, 5, seed=2).softmax(1)
    seen = seen_by(q, LABELS)
    assert abs(float(pairwise(restriction(q), seen, WEIGHTS))) < 1e-15
    assert float(mse(restriction(q), seen, WEIGHTS)) > 1e-2
    everything = torch.arange(5).expand(3, -1)
    assert float(mse(q.expand(3, -1, -1), seen_by(q, everything), WEIGHTS)) == 0
    assert abs(float(pairwise(q.expand(3, -1, -1), seen_by(q, everything), WEIGHTS))) < 1e-15
    # Trivial: all mass on labels that a client does not know; a single label is a pair of none.
    assert float(pairwise(opinions(), torch.zeros(3, 7, 3).double(), WEIGHTS)) == 0
    assert float(mse(opinions(), torch.zeros(3, 7, 3).double(), WEIGHTS)) > 0.3
    alone = torch.tensor([0.0, 0.0, 1.0]).double()
    assert abs(float(pairwise(opinions(), seen, alone))) < 1e-15


def test_mse_is_biased_at_the_truth_and_pairwise_is_not() -> None:
    """At subset consistency MSE pulls h(Y_k|x) up; the pairwise loss has no gradient there."""
    z = drawn(7, 5, seed=2).requires_grad_()
    p = restriction(z.detach().softmax(1))
    for loss, low, high in ((pairwise, 0.0, 1e-15), (mse, 1e-3, 1.0)):
        (grad,) = torch.autograd.grad(loss(p, seen_by(z.softmax(1), LABELS), WEIGHTS), z)
        assert low <= float(grad.abs().max()) <= high
    only = torch.tensor([1.0, 0.0, 0.0]).double()  # client 0, of labels 0 and 3
    (grad,) = torch.autograd.grad(mse(p, seen_by(z.softmax(1), LABELS), only), z)
    assert bool((grad[:, [1, 2, 4]] > 0).all())  # a step lowers what is outside Y_k


def tuned(inner: Any, **options: Any) -> CentralTuning:
    given = {"steps": 3, "batch": 16, "lr": 0.01} | options
    return CentralTuning(inner, drawn(40, FEATURES, seed=5), **given)


@pytest.mark.parametrize("mode", ["private", "public"])
def test_no_steps_are_no_tuning(mode: Any, setting: Setting, federated: Any) -> None:
    plain = recipes.labelset_fedavg(setting, mode=mode)
    for loss in ("mse", "pairwise"):
        assert same(tuned(plain, loss=loss, steps=0), plain, federated()) == 0
        assert same(tuned(plain, loss=loss, steps=1), plain, federated()) > 1e-4


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


@pytest.mark.parametrize("kind", ["mse", "pairwise"])
@pytest.mark.parametrize("part", ["head", "all"])
def test_one_step_is_a_step_on_the_loss(kind: Any, part: Any, mlp: Model) -> None:
    """theta - lr grad of the definition, from the aggregate, on all inputs as one batch."""
    federation = double(make_federation(mlp, make_clients(sizes=(20, 20, 20))))
    setting = Setting(mlp, TARGET, Local(lr=0.3, batch=8))
    plain = recipes.labelset_fedavg(setting)
    algorithm = tuned(plain, loss=kind, steps=1, batch=40, lr=0.7, optimizer="sgd", part=part)
    got, before = final(algorithm, federation, 1), final(plain, federation, 1)
    replies: list[Parts] = []

    def listening(update: Any, jobs: Any) -> Any:
        for reply in loop(update, jobs):
            replies.append(reply.update)
            yield reply

    first = start(plain, federation)
    play_round(plain, federation, first.server, {}, torch.arange(3), 1, listening)
    x, weights = algorithm.inputs, before.weights
    said = []
    for i, params in enumerate(clients_models(federation, before, replies)):
        held = federation.table["labels"][i] > 0
        z = mlp(params, {}, x)["logits"].masked_fill(~held, -torch.inf)
        said.append(z.softmax(1))
    leaves = {k: v.clone().requires_grad_() for k, v in before.server["params"].items()}
    q = mlp(leaves, {}, x)["logits"].softmax(1)
    risk = torch.zeros((), dtype=torch.float64)
    for i, p in enumerate(said):
        held = federation.table["labels"][i] > 0
        a, b = p[:, held], q[:, held]
        pairs = a[:, :, None] * b[:, None] - a[:, None] * b[:, :, None]
        terms = (a - b).square().sum(1) if kind == "mse" else pairs.square().sum((1, 2))
        risk = risk + weights[i] * terms.mean()
    grads = dict(zip(leaves, torch.autograd.grad(risk, list(leaves.values())), strict=True))
    for k, v in before.server["params"].items():
        moves = part == "all" or k in HEAD
        want = v - 0.7 * grads[k] if moves else v
        assert float((got.server["params"][k] - want).abs().max()) < (1e-14 if moves else 1e-300)
    assert float(grads["body.1.weight"].abs().max()) > 1e-5
    assert abs(float(got.server["tuning"]["loss"][0]) - float(risk.detach())) < 1e-14
    assert float(got.server["tuning"]["loss"][1]) < float(risk.detach())


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


def test_recipes_build_it(setting: Setting, federated: Any) -> None:
    inputs = drawn(40, FEATURES, seed=5)
    with_inputs = replace(setting, server_inputs=inputs)
    made = recipes.labelset_fedprox(with_inputs, tune="pairwise", tune_steps=2, tune_part="all")
    assert isinstance(made, CentralTuning)
    assert (made.loss, made.steps, made.lr, made.part) == ("pairwise", 2, 1e-3, "all")
    assert made.inputs is inputs
    assert isinstance(recipes.labelset_fedprox(with_inputs), LabelSets)
    assert with_inputs == setting
    assert "inputs" not in repr(made)
    with pytest.raises(InputError, match=r'tune = "mse" needs unlabeled .* server_inputs=x\)'):
        recipes.labelset_fedavg(setting, tune="mse")
    with pytest.raises(InputError, match='unknown tune "pair"; allowed: mse, none, pairwise'):
        recipes.labelset_fedavg(setting, tune="pair")  # type: ignore[arg-type]


def test_impossible_settings_are_refused(setting: Setting, federated: Any) -> None:
    plain = recipes.labelset_fedavg(setting)
    for options, message in (
        ({"loss": "pair"}, 'unknown loss of central tuning "pair".* Did you mean "pairwise"'),
        ({"part": "body"}, 'unknown part to tune "body"; allowed: all, head'),
        ({"optimizer": "lion"}, 'unknown optimizer of central tuning "lion"'),
        ({"steps": -1}, "-1 tuning steps of 16 inputs; give 0 or more of 1 or more"),
        ({"lr": 0.0}, "tuning lr must be a positive number, got 0.0"),
    ):
        with pytest.raises(InputError, match=message):
            tuned(plain, **options)
    with pytest.raises(InputError, match="central tuning has no inputs"):
        CentralTuning(plain, torch.zeros(0, FEATURES))
    for wrong, message in (
        (CentralTuning(plain, torch.zeros(3, FEATURES + 1)), "the model fails on inputs"),
        (CentralTuning(recipes.fedavg(setting), torch.zeros(3, FEATURES)), "give a LabelSets, not"),
        (tuned(plain, head=("haed.",)), r"\['haed\.'\] matches no parameter"),
    ):
        with pytest.raises(InputError, match=message):
            final(wrong, federated(), 1)
    with pytest.raises(TrainingError, match="central tuning diverged at lr = 1e"):
        final(tuned(plain, optimizer="sgd", lr=1e38, part="all"), federated(), 1)
