"""SCAFFOLD and Ditto among private label sets, what clients serve, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from fedshift import recipes
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.labelsets import LabelSets, Mode
from fedshift.algorithms.scaffold import Scaffold
from fedshift.client.local import Local
from fedshift.client.sharing import Share
from fedshift.data import client_data
from fedshift.engine.run import Round, run, start
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model, build
from fedshift.recipes import Setting
from fedshift.server.combine import Mean
from fedshift.server.confree import ConFree
from fedshift.server.rows import row_mean
from fedshift.server.weights import Uniform
from fedshift.tree import Parts, add, flatten
from support.by_hand import final, max_difference
from support.comparing import same
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation

HEAD = ("head.weight", "head.bias")
WHOLE = Local(lr=0.3, epochs=1, batch=200)


def uniform(model: Model, local: Local) -> LabelSets:
    return LabelSets(FedAvg(model, local=local, combine=Mean(Uniform())))


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


class ByPopulation(LabelSets):
    """SCAFFOLD's own rule, sum_i c_i / N, for rows that some clients lack."""

    def _control(self, server: Parts, updates: Parts) -> Parts:
        ids = updates["cohort"]["id"]
        new = self._by_label(server, ids, updates["control"])
        shares = torch.full((len(ids), CLASSES), 1 / len(server["population"]["weight"])).double()
        moved = row_mean(server["population"]["weight"][ids], shares, new, HEAD)
        return {"control": add(server["control"], moved)}


def test_corrections_of_a_row_cancel(mlp: Model) -> None:
    """One full-batch step of all clients is private FedSGD: holders' corrections sum to 0.

    With c(y) over the whole population, holders would be pulled by c_i(y) of nobody.
    """
    federation, inner = double(make_federation(mlp)), Scaffold(mlp, local=WHOLE)
    plain = uniform(mlp, WHOLE)
    assert same(LabelSets(inner), plain, federation, 3) < 1e-13
    assert same(ByPopulation(inner), plain, federation, 3) > 1e-3


def test_the_first_round_of_scaffold_is_fedavg(setting: Setting, federated: Any) -> None:
    controlled, plain = recipes.labelset_scaffold(setting), uniform(setting.model, setting.local)
    assert same(controlled, plain, federated(), 1) == 0
    assert same(controlled, plain, federated(), 2) > 1e-3


def personal(played: Round, client: int) -> dict[str, torch.Tensor]:
    return played.states[client]["personal"]


def test_personal_models_know_their_own_labels_alone(setting: Setting, federated: Any) -> None:
    federation = federated()
    free, tied = (final(recipes.labelset_ditto(setting, lam=x), federation, 2) for x in (0.0, 1.0))
    for played in (free, tied):
        assert max_difference(
            played.server["params"],
            final(recipes.labelset_fedavg(setting), federation, 2).server["params"],
        ) == 0  # fmt: skip
        assert {personal(played, i)["head.weight"].shape for i in range(6)} == {(3, 10)}
    # lam = 0: nothing of the others; so another population gives the same personal model.
    others = (*make_clients()[:2], *make_clients(seed=7)[2:])
    again = final(recipes.labelset_ditto(setting, lam=0.0), federated(others), 2)
    assert max_difference(personal(again, 1), personal(free, 1)) == 0
    assert max_difference(personal(again, 1), personal(tied, 1)) > 1e-3


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


def test_a_term_with_a_memory_is_the_inner_one_for_full_sets(setting: Setting) -> None:
    clients = tuple(c._replace(y=torch.arange(len(c.y)) % CLASSES) for c in make_clients())
    federation, moon = make_federation(setting.model, clients), recipes.moon(setting)
    assert same(LabelSets(moon), moon, federation) == 0
    assert same(LabelSets(moon), recipes.fedavg(setting), federation) > 1e-4


@dataclass(frozen=True)
class First:
    """All weight on the cohort's first client."""

    needs = ("n",)

    def __call__(self, table: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.eye(len(table["n"]), dtype=torch.float64)[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", ["private", "holders", "public"])
def test_clients_without_weight_hold_nothing(mode: Any, mlp: Model) -> None:
    """Its labels count as absent, round after round; none is before the first."""
    inner = FedAvg(mlp, local=Local(batch=8), combine=Mean(First()))
    algorithm = LabelSets(Ditto(inner), mode)  # which trains all clients all the same
    federation = make_federation(mlp)
    assert not start(algorithm, federation).server["absent"]["now"].any()
    done = final(algorithm, federation, 3).server
    absent = federation.table["labels"][0] == 0
    assert absent.any()
    assert torch.equal(done["absent"]["now"], absent)
    assert torch.equal(done["absent"]["rounds"], 3 * absent)
    for k in HEAD:
        assert torch.equal(done["params"][k][absent], federation.params[k][absent]) == (
            mode != "public"
        )


def test_the_seed_is_that_of_the_slots(setting: Setting, federated: Any) -> None:
    plain, federation = recipes.fedavg(setting), federated()
    one, two, three = (
        start(LabelSets(plain, slots=5, seed=k), federation).server["sets"]["slot"]
        for k in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_recipes_draw_slots_from_the_settings_seed(setting: Setting, federated: Any) -> None:
    """Another seed is another order, and the same model bit for bit."""
    federation = federated()
    one, two = (
        final(recipes.labelset_fedavg(replace(setting, seed=k), slots=5), federation, 2).server
        for k in (0, 1)
    )
    assert not torch.equal(one["sets"]["slot"], two["sets"]["slot"])
    assert max_difference(one["params"], two["params"]) == 0
    assert max_difference(one["params"], federation.params) > 1e-3


def test_one_label_alone(setting: Setting, federated: Any) -> None:
    """A client of one label is always right: it sends a change of exactly 0."""
    lonely = client_data(make_clients()[0].x, torch.full((9,), 4), 0)
    algorithm = recipes.labelset_fedavg(setting)
    one, two = (federated((lonely, *rest)) for rest in (make_clients()[1:], ()))
    assert max_difference(final(algorithm, two, 1).server["params"], two.params) == 0
    assert max_difference(final(algorithm, one, 1).server["params"], one.params) > 1e-3


def test_a_client_registered_with_other_labels_is_named(setting: Setting, federated: Any) -> None:
    federation = federated()
    labels = federation.table["labels"].clone()
    labels[1, 0] = 5
    wrong = replace(federation, table=federation.table | {"labels": labels})
    with pytest.raises(TrainingError, match="client 1 has examples of 3 labels and is regis.* 4;"):
        final(recipes.labelset_fedavg(setting), wrong, 1)


def refused(algorithm: Any, federation: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        final(algorithm, federation, 1)


def test_what_cannot_be_is_refused(setting: Setting, federated: Any) -> None:
    plain, federation = recipes.fedavg(setting), federated()
    for make, message in (
        (lambda: LabelSets(plain, "privat"), 'unknown mode of label sets "privat".*"private"'),
        (lambda: LabelSets(FineTune(plain, 1)), "label sets are for FedAvg.* not FineTune"),
        (lambda: LabelSets(replace(plain, combine=ConFree(0.5))), "give a Mean, not ConFree"),
        (lambda: LabelSets(replace(plain, share=Share(("body.",)))), r"\['body\.'\] stay on"),
        (lambda: LabelSets(plain, "public", slots=3), 'slots = 3 and mode = "public"'),
        (lambda: LabelSets(plain, slots=2.5), "slots must be a whole number or left out, got 2.5"),
    ):
        with pytest.raises(InputError, match=message):
            make()
    refused(LabelSets(plain, head=("haed.",)), federation, r"\['haed\.'\] matches no parameter.*he")
    refused(LabelSets(plain, head=("body.",)), federation, r"body\.1\.weight is \(10, 8\)")
    half = r"has head\.bias and not head\.weight of the same layer; give head=\(\"head\.\",\)"
    refused(LabelSets(plain, head=("head.bias",)), federation, half)
    refused(LabelSets(plain, slots=2), federation, "slots=2 is too few, as client . holds 3 labels")
    bare = replace(federation, table={"n": federation.table["n"]})
    refused(LabelSets(plain), bare, 'label sets need the table\'s "labels"')


class Unbiased(nn.Module):
    """A classifier that cannot say never."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def test_a_head_without_bias_trains_and_does_not_serve() -> None:
    model = build(Unbiased, seed=1)
    federation = make_federation(model)
    algorithm = recipes.labelset_fedavg(Setting(model, TARGET, Local(batch=8)))
    done = final(algorithm, federation, 1)
    assert max_difference(done.server["params"], federation.params) > 1e-3
    with pytest.raises(InputError, match=r"the head \(head\.weight\) has no bias"):
        algorithm.model_for(done.server, done.states[0])


def test_running_statistics_travel_as_ever(normed: Model) -> None:
    federation = make_federation(normed)
    setting = Setting(normed, TARGET, Local(batch=7))
    done = final(recipes.labelset_fedavg(setting), federation, 2).server["buffers"]
    assert done.keys() == federation.buffers.keys()
    name = "body.1.running_mean"
    assert float((done[name] - federation.buffers[name]).abs().max()) > 1e-3


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
