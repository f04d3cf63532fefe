"""From a configuration to task, oracle and selection, on the shipped data."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import datasets, recipes
from fedshift.data import ClientData, Examples
from fedshift.errors import InputError
from fedshift.experiments.config.load import dumps, load_config, validate
from fedshift.experiments.config.places import line_in
from fedshift.experiments.config.schema import (
    Config,
    Data,
    Method,
    SeedTable,
    Selection,
    Split,
    Training,
)
from fedshift.experiments.config.toml_lines import lines_of
from fedshift.experiments.config.training_objects import setting
from fedshift.experiments.demo import demo_config, method_configs
from fedshift.experiments.experiment import run_experiment
from fedshift.experiments.folder.why import reasons
from fedshift.experiments.selection import candidates, choose
from fedshift.experiments.task.preparing import Prepared, oracle_clients, prepare, scaled
from fedshift.seeds import Seeds

QUICK = Training(rounds=2, evaluate_every=1)
FAST = Config.model_validate(
    {"shift": {"labels_per_client": 3}, "model": {"name": "linear"}, "training": QUICK}
)


@pytest.fixture(scope="module")
def ready() -> Prepared:
    return prepare(FAST)


def rows(x: torch.Tensor) -> set[bytes]:
    """Images as bytes, to find the clients that have them."""
    return {one.numpy().tobytes() for one in x}


def test_the_split_is_the_papers(ready: Prepared) -> None:
    """C labels with equal counts everywhere, n_i equal, T uniform on C labels."""
    counts = ready.task.table()["labels"]
    assert ((counts > 0).sum(1) == 3).all()
    assert len(counts[counts > 0].unique()) == 1
    assert sorted(ready.task.target.unique().tolist()) == pytest.approx([0, 1 / 3])
    assert ready.task.target.sum() == pytest.approx(1)
    tested = ready.task.test.y.bincount(minlength=10)
    assert tested.tolist() == [300 if t > 0 else 0 for t in ready.task.target]


def test_no_example_is_dealt_twice(ready: Prepared) -> None:
    task = ready.task
    groups = [c.x for c in task.clients] + [v.x for v in task.validation] + [task.test.x]
    assert task.target_validation is not None
    groups.append(task.target_validation.x)
    sizes = [len(rows(g)) for g in groups]
    # The shipped images are distinct, so that equal pictures mean a shared example.
    assert sizes == [len(g) for g in groups]
    assert len(set().union(*map(rows, groups))) == sum(sizes)


def test_held_out_examples_follow_their_client(ready: Prepared) -> None:
    for client, held_out in zip(ready.task.clients, ready.task.validation, strict=True):
        rest, out = client.y.bincount(minlength=10), held_out.y.bincount(minlength=10)
        assert torch.equal(out, ((rest + out) * 0.2 + 1e-9).long())


def test_the_target_validates_with_its_own_part(ready: Prepared) -> None:
    validation = ready.task.target_validation
    assert validation is not None
    share = validation.y.bincount(minlength=10) / len(validation)
    assert torch.allclose(share.double(), ready.task.target)


def test_oracle_clients_follow_the_target(ready: Prepared) -> None:
    clients = oracle_clients(ready)
    assert [len(c.y) for c in clients] == [len(c.y) for c in ready.task.clients]
    assert [int(c.id) for c in clients] == list(range(9))
    for client in clients:
        share = client.y.bincount(minlength=10).double() / len(client.y)
        assert float((share - ready.task.target).abs().max()) <= 1 / len(client.y)
        assert len(rows(client.x)) == len(client.x)  # no example twice in one client
    validation = ready.task.target_validation
    assert validation is not None
    validated = rows(validation.x).union(*(rows(v.x) for v in ready.task.validation))
    assert not validated & set().union(*(rows(c.x) for c in clients))
    base = setting(FAST.training, ready.model, ready.announced, clients=9, seed=0)
    weights = recipes.fedpals(base, ess=0.3)
    federation = ready.federation(clients)
    server = weights.init(federation.params, federation.buffers, federation.table)
    solved = weights.weigh(server, torch.arange(9))
    assert float((solved - 1 / 9).abs().max()) < 1e-12  # FedPALS has nothing to do there


def test_an_oracle_client_is_no_larger_than_the_supply() -> None:
    """A client shrinks to floor(min_y supply_y / T_y), and none if that is as large as it is."""
    mostly = (0.91, *(0.01,) * 9)
    whole = prepare(FAST.model_copy(update={"shift": Split(labels_per_client=10, clients=2)}))
    rare = replace(whole, task=replace(whole.task, target=torch.tensor(mostly).double()))
    supply = np.bincount(whole.data.train.y.numpy()[whole.pool], minlength=10)
    largest = int(supply[0] / mostly[0])
    sizes = [len(client.y) for client in whole.task.clients]
    assert largest < min(sizes)
    for client in oracle_clients(rare):
        counts = client.y.bincount(minlength=10)
        assert (len(client.y), len(rows(client.x))) == (largest, largest)
        assert np.abs(counts.numpy() - largest * np.array(mostly)).max() <= 1
    assert [len(client.y) for client in oracle_clients(whole)] == sizes


def test_an_oracle_without_examples_of_a_label_is_refused(ready: Prepared) -> None:
    y = int(ready.task.target.argmax())
    labels = ready.data.train.y.numpy()
    without = replace(ready, pool=ready.pool[labels[ready.pool] != y])
    with pytest.raises(
        InputError, match=rf"needs examples of {ready.task.classes[y]}.* has 0; leave"
    ):
        oracle_clients(without)


def test_oracle_overlap_is_even() -> None:
    """Where clients need more than the supply, uses of examples differ by at most one."""
    ready = prepare(FAST.model_copy(update={"shift": Split(labels_per_client=3, clients=30)}))
    used: dict[int, dict[bytes, int]] = {}
    for client in oracle_clients(ready):
        for image, label in zip(client.x, client.y.tolist(), strict=True):
            times = used.setdefault(label, {})
            times[image.numpy().tobytes()] = times.get(image.numpy().tobytes(), 0) + 1
    for times in used.values():
        assert max(times.values()) - min(times.values()) <= 1
    assert max(max(times.values()) for times in used.values()) > 1  # there was overlap to spread


@pytest.mark.slow
def test_targets_can_be_given() -> None:
    numbers = (0.5, 0.5, 0, 0, 0, 0, 0, 0, 0, 0)
    for target, expected in (("uniform", [0.1] * 10), (numbers, list(numbers))):
        split = Split(labels_per_client=3, target=target)
        task = prepare(FAST.model_copy(update={"shift": split})).task
        assert task.target.tolist() == pytest.approx(expected)
        assert task.target_validation is None
    doubled = tuple(2 * v for v in numbers)
    split = Split(labels_per_client=3, target=doubled, normalise_target=True)
    task = prepare(FAST.model_copy(update={"shift": split})).task
    assert task.target.tolist() == pytest.approx(list(numbers))
    with pytest.raises(InputError, match="sums to 2.*normalise_target = true"):
        prepare(FAST.model_copy(update={"shift": Split(labels_per_client=3, target=doubled)}))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "split",
    [
        Split(kind="dirichlet-per-client", beta=0.3),
        Split(kind="dirichlet-per-class", beta=0.5, min_size=10, capacity=True),
        Split(kind="shards", shards_per_client=2),
        Split(kind="iid"),
        Split(kind="quantity", beta=0.5),
    ],
    ids=lambda s: s.kind,
)
def test_every_kind_of_shift_makes_a_task(split: Split) -> None:
    task = prepare(FAST.model_copy(update={"shift": split})).task
    assert len(task.clients) == 9
    assert task.target.sum() == pytest.approx(1)
    share = task.test.y.bincount(minlength=10).double() / len(task.test)
    assert float((share - task.target).abs().max()) <= 1 / len(task.test) + 1e-12


def test_scaling_is_the_authors() -> None:
    bytes_ = torch.tensor([0, 127, 255], dtype=torch.uint8)
    assert scaled(bytes_).tolist() == pytest.approx([(b / 255 - 0.5) / 0.5 for b in (0, 127, 255)])
    floats = torch.tensor([0.3])
    assert scaled(floats) is floats


def test_methods_share_all_but_their_method() -> None:
    """Methods are paired: the same split, first model and batches; only the method differs."""
    configs = method_configs(demo_config(["training.rounds=1"])[0])
    assert [c.method.name for c in configs] == ["fedavg", "fedpals", "oracle"]
    assert (
        len({dumps(c.model_copy(update={"method": Method(), "name": "x"})) for c in configs}) == 1
    )


def test_the_grid_drops_what_lambda_0_already_reaches(ready: Prepared) -> None:
    counts = ready.task.table()["labels"].numpy()
    grid = candidates(counts, ready.task.target.numpy(), (0.0, 0.1, 0.25, 0.5, 0.75))
    labels = [label for label, _, _ in grid]
    assert labels[0] == "lambda=0"
    reached = grid[0][2].ess_fraction
    assert labels[1:] == [f"ess={100 * f:g}%" for f in (0.1, 0.25, 0.5, 0.75) if f > reached]


class Final:
    """The last metrics of a simulated run."""

    def __init__(self, estimate: float, validation: float, source: float, target: float) -> None:
        self.estimated_accuracy, self.validation_accuracy = estimate, validation
        self.source_accuracy, self.target_accuracy = source, target


class Pretended:
    weight_sums = None

    def __init__(self, *scores: float) -> None:
        self.final = Final(*scores)


def test_each_selector_picks_its_own_best(ready: Prepared) -> None:
    grid = candidates(
        ready.task.table()["labels"].numpy(), ready.task.target.numpy(), (0.0, 0.5, 0.75)
    )
    scores = {"lambda=0": (0.9, 0.7, 0.1, 0.2), "ess=50%": (0.8, 0.9, 0.2, 0.2),
              "ess=75%": (0.7, 0.8, 0.3, 0.3)}  # fmt: skip
    train: Any = lambda label, fraction: Pretended(*scores[label])  # noqa: E731
    choice = choose(ready.task, Selection(), grid, train)
    assert choice.picks == {"estimate": "lambda=0", "validation": "ess=50%", "source": "ess=75%",
                            "oracle": "ess=75%"}  # fmt: skip
    assert choice.chosen.label == "lambda=0"
    assert choose(ready.task, Selection(rule="validation"), grid, train).chosen.label == "ess=50%"
    level: Any = lambda label, fraction: Pretended(0.5, math.nan, 0.5, 0.5)  # noqa: E731
    tie = choose(ready.task, Selection(), grid, level)
    assert tie.chosen.label == "ess=75%"  # ties go to the larger sample size
    assert "validation" not in tie.picks


def test_selection_without_examples_is_refused() -> None:
    split = Split(labels_per_client=3, target="uniform")
    config = FAST.model_copy(
        update={"shift": split, "method": Method.model_validate({"name": "fedpals", "ess": "auto"}),
                "selection": Selection(rule="validation")}
    )  # fmt: skip
    with pytest.raises(InputError, match="needs examples that follow the target"):
        run_experiment(config)


def test_seeds_can_be_set_apart() -> None:
    table = SeedTable(run=3, split=5)
    assert table.resolved() == Seeds(split=5, init=3, cohort=3, batch=3)


def test_reasons_name_what_is_missing() -> None:
    lines = reasons(("a", "b", "c"), [0.6, 0.4, 0.0], [0.2, 0.4, 0.4], [0.5, 0.4, 0.1])
    assert lines[0] == (
        'Sample-size weights train too little on "a" (60 % of the target, 20 % in FedAvg, '
        "50 % here)."
    )
    assert "40 % of what FedAvg trains on are labels that the target never sees" in lines[1]
    gone = reasons(("a", "b"), [0.5, 0.5], [0.0, 1.0], [0.0, 1.0], unmeasured=0.5)
    assert gone[0].startswith('No client has any example of "a", 50 % of the target')
    assert gone[1].startswith("The estimate leaves out 50 % of the target")
    assert not any("too little" in sentence for sentence in gone)
    assert "little to gain" in reasons(("a", "b"), [0.5, 0.5], [0.49, 0.51], [0.5, 0.5])[0]


def test_every_configuration_survives_its_own_text(tmp_path: Path) -> None:
    methods = (
        {"name": "fedpals", "lam": math.inf},
        {"name": "fedpals", "ess": "auto", "cap": 0.5},
        {"name": "fedprox", "mu": 0.1},
    )
    for method in methods:
        config = validate(
            {
                "name": "a b",
                "method": method,
                "shift": {"labels_per_client": 2, "target": [0.1] * 10},
                "seeds": {"run": 4},
                "model": {"name": "mlp", "hidden": [3, 4]},
            }
        )
        path = tmp_path / "c.toml"
        path.write_text(dumps(config))
        assert load_config(path) == config


def test_lines_are_found() -> None:
    text = 'name = "x"\n\n[training]\n# lr = 1\nlr = 2\n[data]\n'
    assert line_in(lines_of(text), ("training", "lr")) == 5
    assert line_in(lines_of(text), ("training", "rounds")) == 3
    assert line_in(lines_of(text), ("name",)) == 1
    assert line_in(lines_of(text), ("model", "name")) is None


def test_models_that_do_not_fit_the_data() -> None:
    config = FAST.model_copy(
        update={"data": Data(name="gaussians"), "shift": Split(kind="iid", clients=2)}
    )
    assert len(prepare(config).task.clients) == 2
    with pytest.raises(InputError, match='"lenet" needs square images'):
        prepare(config.model_copy(update={"model": Config().model}))


def test_the_shipped_data_are_what_the_digest_says() -> None:
    assert datasets.load("fashion-mnist-mini").sha256 == prepare(FAST).data.sha256
    assert isinstance(prepare(FAST).task.clients[0], ClientData)
    assert isinstance(prepare(FAST).task.test, Examples)


def test_one_file_serves_to_compare_methods(tmp_path: Path) -> None:
    """Another method drops the file's options that it lacks; those of -c stay, and are checked."""
    path = tmp_path / "c.toml"
    path.write_text('[method]\nname = "fedpals"\ness = 0.5\nmu = 0.2\n')
    assert load_config(path, ["method.name=fedavg"]).method.options == {}
    assert load_config(path, ["method.name=fedprox"]).method.options == {"mu": 0.2}
    with pytest.raises(InputError, match='unknown key "method.ess" for fedavg'):
        load_config(path, ["method.name=fedavg", "method.ess=0.5"])
    assert load_config(path, ["method.ess=", "method.lam=3.0"]).method.options == {
        "lam": 3.0,
        "mu": 0.2,
    }
    path.write_text('name = "mine"')
    assert load_config(path).method.name == "fedavg"


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n"])
def test_a_file_without_a_key_is_refused(text: str, tmp_path: Path) -> None:
    """For example where saving failed: it would train for 150 rounds on the default data."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(InputError, match="no key is set; an experiment begins with .data. and its"):
        load_config(path)


@pytest.mark.parametrize(
    ("file", "override", "key", "before", "after"),
    [
        ('[method]\nname = "fedprox"\nmu = 0.01', "method.name=moon", "method.mu",
         "the pull towards the model received", "the strength of the contrastive term"),
        ('[method]\nname = "ditto"\nlam = 0.01', "method.name=feddrm_shared_head", "method.lam",
         "the pull of the personal model to the model received", "the weight of the class loss"),
        ('[model]\nname = "resnet18"\nprojection = 0.01', "model.name=mlp-moon",
         "model.projection", "the width of a linear layer before the classifier",
         "the width of the projection head"),
        ('[shift]\nkind = "quantity"\nbeta = 0.01', "shift.kind=dirichlet-per-class",
         "shift.beta", "how even the clients' sizes are",
         "how evenly a label's examples are shared among the clients"),
    ],
)  # fmt: skip
def test_an_option_is_never_carried_over_to_another_meaning(
    file: str, override: str, key: str, before: str, after: str, tmp_path: Path
) -> None:
    """Refused with both meanings; an option set or removed by -c is no longer the file's."""
    path = tmp_path / "c.toml"
    path.write_text(file)
    old, new = file.split('"')[1], override.partition("=")[2]
    with pytest.raises(InputError) as refused:
        load_config(path, [override])
    assert str(refused.value) == (
        f"-c {override}: {key} = 0.01 is {before} in {old}, and {after} in {new}; set it as well "
        f"with -c {key}=VALUE, or leave it out with -c {key}="
    )
    if key.startswith("method"):
        section, _, option = key.partition(".")
        net = "mlp-moon" if new == "moon" else "mlp-projected"
        others = ["shift.target=clients", f"model.name={net}", f"{section}.name={new}"]
        assert load_config(path, [*others, f"{key}=0.5"]).method.options == {option: 0.5}
        assert load_config(path, [*others, f"{key}="]).method.options == {}


def test_every_shared_option_has_its_meanings_described() -> None:
    """An option of several methods has one meaning for all, or one for each of them."""
    meanings: dict[str, list[str | None]] = {}
    for recipe in recipes.recipes():
        for option in recipe.options:
            meanings.setdefault(option, []).append(recipe.meanings.get(option))
    described = {option for option, meant in meanings.items() if any(meant)}
    assert described == {
        "alpha",
        "beta",
        "lam",
        "mode",
        "mu",
        "share",
        "tau",
        "tune_part",
        "tune_rounds",
    }
    assert all(all(meanings[option]) and len(set(meanings[option])) > 1 for option in described)
    # If your method makes this fail: an option that means something else says so, by Annotated.
    alike = {option for option, meant in meanings.items() if len(meant) > 1} - described
    assert alike == {
        "a", "b", "beta1", "beta2", "byzantine", "clip", "density_rounds", "distance",
        "head_epochs", "hidden", "high", "least_ess", "low", "lr", "option", "rho", "ridge",
        "slots", "tune", "tune_lr", "tune_moments", "tune_over", "tune_steps", "tune_stop",
        "tune_temperature", "tune_weights", "virtual",
        "weighing_rounds",
    }  # fmt: skip


@pytest.mark.slow
def test_small_clients_hold_out_their_share_together() -> None:
    ready = prepare(FAST.model_copy(update={"shift": Split(labels_per_client=3, clients=600)}))
    held_out = sum(len(v) for v in ready.task.validation)
    total = held_out + sum(len(c.y) for c in ready.task.clients)
    assert abs(held_out / total - 0.2) < 0.02
    assert all(len(c.y) > 0 for c in ready.task.clients)


@pytest.mark.slow
def test_choosing_without_validation_examples_is_refused() -> None:
    method = Method.model_validate({"name": "fedpals", "ess": "auto"})
    config = FAST.model_copy(update={"data": Data(validation=0.0), "method": method})
    with pytest.raises(InputError, match="raise data.validation"):
        run_experiment(config)
    alone = run_experiment(config.model_copy(update={"method": Method()}))
    assert math.isnan(alone.outcome.final.estimated_accuracy)


def test_an_empty_target_is_refused() -> None:
    split = Split(kind="quantity", beta=0.02, min_size=0)
    with pytest.raises(InputError, match="the target drew no example"):
        prepare(FAST.model_copy(update={"shift": split}))


def test_a_cap_leaves_out_what_it_cannot_reach() -> None:
    counts = [[400, 0], [0, 400], [10, 10], [10, 10]]
    grid = candidates(counts, [0.5, 0.5], (0.25, 0.5, 0.9), cap=0.3)
    assert 0 < len(grid) < 3
    with pytest.raises(InputError, match=r"no fraction of selection\.grid can be reached"):
        candidates(counts, [0.5, 0.5], (0.9,), cap=0.3)
