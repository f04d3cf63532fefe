"""Central tuning by KL: absent labels, rounds, variants, and whether it will pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.local import Local
from fedshift.data import Examples, client_data
from fedshift.engine.run import play_round, run, start
from fedshift.errors import InputError
from fedshift.model import Model, build
from fedshift.recipes import Setting
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


class Normalised(nn.Module):
    """Its logits are logarithms of probabilities, so that each depends on all rows of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(x).relu()).log_softmax(1)}


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({"loss": "kl", "part": "all"}, True),
        ({"loss": "mse", "over": "union"}, True),
        ({"loss": "mse"}, False),
    ],
)
def test_rounding_does_not_move_absent_labels(options: dict[str, Any], stays: bool) -> None:
    """A gradient of 1e-9 moved such rows by 0.008 in three rounds, as Adam makes steps of it."""
    model = build(Normalised, seed=0)
    clients = tuple(c._replace(y=c.y.clamp(max=CLASSES - 3)) for c in make_clients())
    federation = make_federation(model, clients)
    plain = recipes.labelset_fedavg(Setting(model, TARGET, Local(lr=0.1, steps=3)))
    params = final(tuned(plain, steps=20, **options), federation, 2).server["params"]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(params[name][-2:], federation.params[name][-2:]) == stays
        assert not torch.equal(params[name][:-2], federation.params[name][:-2])


@pytest.mark.slow
def test_later_rounds_are_the_inner_methods(setting: Setting, federated: Any) -> None:
    """rounds = 2: two rounds as without a limit; the third trains on, and tunes no more."""
    plain, federation = recipes.labelset_scaffold(setting), federated()
    limited, always = (tuned(plain, loss="kl", rounds=r) for r in (2, 0))
    for t in (1, 2):
        assert same(limited, always, federation, t) == 0
    assert same(limited, always, federation, 3) > 1e-4
    second, third = (final(limited, federation, t).server for t in (2, 3))
    assert max_difference(second["tuning"], third["tuning"]) == 0
    assert limited.at(2) == limited
    assert limited.at(3) == replace(limited, steps=0, rounds=0)
    everyone = torch.arange(len(federation.clients))
    after = final(limited, federation, 2)
    by_hand = play_round(plain, federation, after.server, after.states, everyone, 3)
    assert max_difference(by_hand.server["params"], third["params"]) == 0


LABELLED = Examples(drawn(30, FEATURES, seed=6), torch.arange(30) % 3 + 1)


@pytest.mark.few(1)
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


def test_tuning_is_not_tuned_again(setting: Setting, federated: Any) -> None:
    once = tuned(recipes.labelset_fedavg(setting))
    with pytest.raises(InputError, match="around a CentralTuning that is centrally tuned.* give"):
        start(tuned(once), federated())
    start(once, federated())


@pytest.mark.parametrize(
    ("options", "without"),
    [
        ({"tune_moments": "kept"}, False),
        ({"tune_stop": "held-out"}, False),
        ({"tune_weights": "confidence"}, True),
    ],
)
def test_options_of_steps_are_refused_where_there_are_none(
    options: dict[str, Any], without: bool, setting: Setting
) -> None:
    """without: allowed with labelled examples, for which the weights matter."""
    blind = replace(setting, server_inputs=drawn(40, FEATURES, seed=5))
    (name,) = options
    for given in (blind, replace(blind, server_examples=LABELLED)):
        recipes.labelset_fedavg(given, tune="kl", tune_steps=1, **options)
        recipes.labelset_fedavg(given, tune="kl", tune_steps=0)
        if without and given is not blind:
            recipes.labelset_fedavg(given, tune="kl", tune_steps=0, **options)
            continue
        with pytest.raises(InputError, match=f"^{name}=.* with tune_steps=0 there are none; set"):
            recipes.labelset_fedavg(given, tune="kl", tune_steps=0, **options)


def test_without_steps_weights_and_temperature_change_the_optima(mlp: Model) -> None:
    """Therefore they are not refused there."""
    federation = make_federation(mlp, make_clients(sizes=(30, 40, 20)))
    setting = Setting(mlp, TARGET, Local(lr=0.3, epochs=4, batch=8))
    labelled = Examples(drawn(300, FEATURES, seed=6), torch.arange(300) % CLASSES)
    only = tuned(recipes.labelset_fedavg(setting), loss="kl", steps=0, labelled=labelled)
    usual = final(only, federation, 1).server["tuning"]["accuracy"]
    variants: tuple[dict[str, Any], ...] = ({"weights": "confidence"}, {"temperature": "fitted"})
    for options in variants:
        accuracy = final(replace(only, **options), federation, 1).server["tuning"]["accuracy"]
        assert accuracy[0] == usual[0]
        assert not torch.equal(accuracy, usual)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((0, FEATURES), [], "labelled has no example; give one at least"),
        (
            (2, FEATURES),
            [0, 5],
            "labelled has label 5, and the model has 5 classes; labels are 0 to",
        ),
        ((2, FEATURES + 1), [0, 1], "the model fails on inputs"),
    ],
)
def test_labelled_examples_that_do_not_fit_are_refused(
    x: Any, y: list[int], message: str, setting: Setting, federated: Any
) -> None:
    labelled = Examples(torch.zeros(x), torch.tensor(y, dtype=torch.long))
    with pytest.raises(InputError, match=message):
        start(tuned(recipes.labelset_fedavg(setting), labelled=labelled), federated())
    start(tuned(recipes.labelset_fedavg(setting), labelled=LABELLED), federated())


def test_what_is_kept_of_a_run_that_uses_no_new_option(setting: Setting, federated: Any) -> None:
    """Checkpoints of earlier versions have these parts, and no run needs more."""
    plain = recipes.labelset_fedavg(setting)
    parts = start(plain, federated()).server.keys()
    server = start(tuned(plain), federated()).server
    assert server.keys() == parts | {"tuning"}
    assert server["tuning"].keys() == {"loss", "outside"}
    federation, labelled = federated(), tuned(plain, labelled=LABELLED)
    after = final(tuned(plain), federation, 1)  # of a version that measured nothing
    *_, went_on = run(labelled, federation, 2, after=after)
    assert (
        max_difference(went_on.server["params"], final(labelled, federation, 2).server["params"])
        == 0
    )
    assert float(went_on.server["tuning"]["accuracy"][0]) > 0
    state = start(tuned(plain, moments="kept"), federated()).server
    assert {k for k in state if k.startswith("tuning_")} == {
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
    method = recipes.labelset_ditto(with_inputs, tune="kl", tune_rounds=3, tune_moments="kept")
    assert isinstance(method, CentralTuning)
    assert (method.loss, method.rounds, method.moments) == ("kl", 3, "kept")
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
    with pytest.raises(InputError, match="holds out every fifth input, and there are 4; give 5 or"):
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
