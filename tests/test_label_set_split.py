"""Clients with a few labels each, the server's own examples, and what a run says of label sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedshift import recipes
from fedshift.engine.backends import Job, loop
from fedshift.engine.rounds import Federation, run
from fedshift.engine.traffic import Meter, Traffic
from fedshift.errors import InputError
from fedshift.experiments.config import ServerData
from fedshift.experiments.folder import record, summary_of
from fedshift.experiments.label_sets import SetRound, sentences
from fedshift.experiments.load import load_config, validate
from fedshift.experiments.server_rows import reserve
from fedshift.experiments.task import Prepared, prepare, scaled
from fedshift.experiments.training import silent
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.report.page import page
from fedshift.report.run_folder import read_run
from fedshift.seeds import numpy_generator
from fedshift.server.agreement import disagreement, seen_by
from fedshift.shifts import LabelSetSplit, check_partition, label_counts
from fedshift.shifts.base import Ints
from fedshift.shifts.label_sets import shared_evenly
from fedshift.tree import size_in_bytes

POOL = np.repeat(np.arange(10), 300)


def dealt(shift: LabelSetSplit, clients: int = 8, seed: int = 0) -> Ints:
    rng = numpy_generator(seed, "split")
    parts = shift(POOL, 10, clients, rng)
    check_partition(parts, len(POOL), clients)
    return label_counts(POOL, parts, 10)


# --------------------------------------------------------------------------- the split


@pytest.mark.parametrize("k", [3, 7, 10])
def test_every_client_has_k_labels_and_as_many_examples(k: int) -> None:
    for seed in range(5):
        counts = dealt(LabelSetSplit(k, samples=100), seed=seed)
        assert (counts.sum(1) == 100).all()
        assert ((counts > 0).sum(1) == k).all()
        held = counts[counts > 0]
        assert set(held.tolist()) <= {100 // k, -(-100 // k)}
        assert (counts.sum(0) > 0).all()  # every label has a client


def test_labels_are_drawn_uniformly_and_so_is_who_gets_one_more() -> None:
    """Without `cover`, label y is in Y_i with probability k / K: within 4.5 s.e. of it."""
    draws = [dealt(LabelSetSplit(3, samples=31, cover=False), seed=s) for s in range(250)]
    held = np.mean([c > 0 for c in draws], axis=0)
    error = np.sqrt(0.3 * 0.7 / 250)
    assert np.abs(held - 0.3).max() < 4.5 * error
    more = np.mean([c == 11 for c in draws], axis=(0, 1))
    assert np.abs(more - 0.1).max() < 4.5 * np.sqrt(0.1 * 0.9 / 2000)
    lonely = [c for c in draws if (c.sum(0) == 0).any()]
    assert lonely  # some label has no client: the control of the test above


@pytest.mark.parametrize(("common", "union"), [(0, 9), (1, 7), (2, 5), (3, 3)])
def test_any_two_clients_have_the_common_labels_alone(common: int, union: int) -> None:
    held = dealt(LabelSetSplit(3, samples=90, common=common), clients=3) > 0
    assert (held.sum(1) == 3).all()
    assert held.any(0).sum() == union
    both = held.astype(int) @ held.T.astype(int)
    assert (both[~np.eye(3, dtype=bool)] == common).all()
    other = dealt(LabelSetSplit(3, samples=90, common=common), clients=3, seed=1) > 0
    assert (held != other).any()  # which labels, is drawn


def test_even_shares() -> None:
    held = np.array([[True, False, True, True], [False, True, False, False]])
    counts = shared_evenly(8, held, numpy_generator(0, "shares"))
    assert sorted(counts[0].tolist()) == [0, 2, 3, 3]
    assert counts[1].tolist() == [0, 8, 0, 0]


@pytest.mark.parametrize(
    ("shift", "clients", "says"),
    [
        (LabelSetSplit(1, samples=10), 8, "in the last one some label had no client. Raise labels"),
        (LabelSetSplit(2, samples=400), 8, "samples=400 for each of 8 clients; there are 3000 in "),
        (LabelSetSplit(2, samples=300, common=2), 8, "is held by 8 clients that want"),
        (LabelSetSplit(3, samples=9, common=1), 8, "needs 17 labels; there are 10. Use fewer"),
        (LabelSetSplit(11, samples=20), 2, "labels_per_client=11; allowed: 1 to 10"),
    ],
)
def test_sets_that_cannot_be(shift: LabelSetSplit, clients: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        dealt(shift, clients)


def test_options_out_of_range() -> None:
    with pytest.raises(InputError, match=r"samples=2; allowed: a whole number of at least 3"):
        LabelSetSplit(3, samples=2)
    with pytest.raises(InputError, match=r"common=4; allowed: a whole number from 0 to 3"):
        LabelSetSplit(3, common=4)


# --------------------------------------------------------------------------- the server's examples


def tables(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": {"name": "fashion-mnist-mini", "validation": 0.0},
        "shift": {
            "kind": "label-sets", "clients": 6, "labels_per_client": 4, "samples": 80,
            "target": "union",
        },
        "server": {"unlabeled": 100, "validation": 50},
        "model": {"name": "mlp", "hidden": (8,)},
        "method": {"name": "labelset_fedavg", "tune": "mse", "tune_steps": 2},
        "training": {"rounds": 2, "batch": 16, "evaluate_every": 1},
    }  # fmt: skip
    return {k: v | changes.get(k, {}) for k, v in found.items()}


def ready(**changes: Any) -> Prepared:
    return prepare(validate(tables(**changes)))


def rows_of(found: Prepared, sets: Sequence[torch.Tensor]) -> list[set[int]]:
    """Which training images these are, set by set. Images that the file has twice are left out."""
    first: dict[bytes, list[int]] = {}
    for i, image in enumerate(scaled(found.data.train.x).numpy()):
        first.setdefault(image.tobytes(), []).append(i)
    places = [[first[image.tobytes()] for image in x.numpy()] for x in sets]
    return [{place[0] for place in some if len(place) == 1} for some in places]


def test_nobodys_examples_are_somebody_elses() -> None:
    found = ready(data={"validation": 0.1})
    task = found.task
    assert found.server_inputs is not None
    assert task.target_validation is not None
    sets = [found.server_inputs, task.target_validation.x]
    sets += [c.x for c in task.clients] + [v.x for v in task.validation]
    rows = rows_of(found, sets)
    assert [len(x) for x in sets[:2]] == [100, 50]
    assert sum(map(len, rows)) == len(set().union(*rows)) > 400
    assert not rows[0] & set(found.pool.tolist())  # nor does the oracle draw them


def test_tests_and_the_servers_examples_are_of_the_union() -> None:
    shift = {"clients": 3, "labels_per_client": 2, "common_labels": 1}
    found = ready(shift=shift)
    held = found.task.table()["labels"].sum(0) > 0
    assert int(held.sum()) == 4
    assert torch.equal(found.task.target, held.double() / 4)
    counts = torch.bincount(found.task.test.y, minlength=10)
    assert set(counts[held].tolist()) == {int(counts.max())}
    assert int(counts[~held].sum()) == 0
    assert found.server_inputs is not None
    assert found.task.target_validation is not None
    assert len(found.server_inputs) == 40  # 10 of each label of the union
    assert torch.equal(torch.bincount(found.task.target_validation.y, minlength=10) > 0, held)


def test_what_the_server_has_depends_on_no_client() -> None:
    y = torch.tensor(POOL)
    rows = reserve(y, 10, ServerData(unlabeled=50, validation=30), 0)
    assert np.bincount(POOL[rows.unlabeled]).tolist() == [5] * 10
    assert np.bincount(POOL[rows.validation]).tolist() == [3] * 10
    assert len(set().union(*map(set, map(np.ndarray.tolist, rows)))) == len(POOL)
    assert (reserve(y, 10, ServerData(unlabeled=50), 0).unlabeled == rows.unlabeled).all()
    assert (reserve(y, 10, ServerData(unlabeled=50), 1).unlabeled != rows.unlabeled).any()
    nothing = reserve(y, 10, ServerData(), 0)
    assert nothing.others.tolist() == list(range(len(POOL)))
    first = ready().server_inputs
    second = ready(shift={"labels_per_client": 5}).server_inputs
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_without_the_servers_examples_nothing_changes() -> None:
    """The split of a run that was made before there was [server] is the same."""
    plain = tables()
    plain["method"]["tune"] = "none"
    one = prepare(validate({k: v for k, v in plain.items() if k != "server"}))
    two = prepare(validate(plain | {"server": {"unlabeled": 0}}))
    assert one.split_sha256 == two.split_sha256
    assert one.split_sha256 != ready().split_sha256
    assert one.server_inputs is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"server": {"unlabeled": 0}},
            r'tune = "mse" needs unlabeled inputs on the server; .*file',
        ),
        ({"shift": {"target": "clients"}}, r"\[server\] takes its examples from a training file"),
        ({"shift": {"target": "drawn"}}, r"server.validation: with shift.target = \"drawn\""),
        ({"shift": {"beta": 0.5}}, r'"beta" is not an option of kind "label-sets" \(labels_per'),
        ({"shift": {"common_labels": 5}}, r"common=5; allowed: a whole number from 0 to 4"),
        ({"shift": {"kind": "sparsity"}}, r'"samples" is not an option of kind "sparsity"'),
        ({"server": {"unlabelled": 3}}, 'unknown key "server.unlabelled".*Did you mean'),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        validate(tables(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"server": {"unlabeled": 9000}}, "server.unlabeled = 9000, and 7000 training examples"),
        ({"server": {"unlabeled": 3}}, r"server.unlabeled = 3: .* Raise server.unlabeled"),
        ({"shift": {"samples": 2000}}, r"\[shift\]: samples=2000 for each of 6 clients"),
    ],
)
def test_tasks_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ready(**changes)


# --------------------------------------------------------------------------- what is sent, counted


def test_bytes_are_those_of_the_messages(mlp: Model, federated: Callable[..., Federation]) -> None:
    """Up 4 (|phi| + (d + 1) L), id and loss; down the same, 8 L for the slots. Public: L = K."""
    setting = Setting(mlp, (0.2,) * 5)
    params, _ = mlp.init()
    head = sum(v.numel() for k, v in params.items() if k.startswith("head."))
    body, row = sum(v.numel() for v in params.values()) - head, head // 5
    whole = size_in_bytes({"params": params})
    assert whole == 4 * (body + 5 * row)
    for mode, slots in (("private", 3), ("private", 4), ("public", 5)):
        meter = Meter()
        given = {"slots": slots} if mode == "private" else {}
        algorithm = recipes.labelset_fedavg(setting, mode=mode, **given)
        for _ in run(algorithm, federated(), 2, cohort=4, backend=meter):
            pass
        wire = 4 * (body + slots * row)
        assert meter.last.each() == (wire + 8 * slots * (mode == "private"), wire + 12)
        assert meter.last.clients == 4  # the last round's alone
    assert Traffic().each() == (0.0, 0.0)


def test_the_meter_changes_nothing(mlp: Model, federated: Callable[..., Federation]) -> None:
    algorithm = recipes.labelset_fedavg(Setting(mlp, (0.2,) * 5))
    seen: list[int] = []

    def backend(update: Any, jobs: Any) -> Any:
        def told() -> Any:
            job: Job
            for job in jobs:
                seen.append(job.client)
                yield job

        return loop(update, told())

    ends = [
        [*run(algorithm, federated(), 2, backend=b)][-1].server["params"]
        for b in (loop, Meter(), Meter(backend))
    ]
    assert all(torch.equal(ends[0][k], other[k]) for other in ends[1:] for k in ends[0])
    assert seen == list(range(6)) * 2


# --------------------------------------------------------------------------- what a run says


def test_a_run_tells_what_was_absent_and_where_mass_went(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "training": {"cohort": 2, "rounds": 3},
        "shift": {"labels_per_client": 3, "cover": False, "clients": 4},
        "method": {"tune": "pairwise"},
        "server": {"validation": 0},
    }  # fmt: skip
    config = validate(tables(**changes) | {"name": "sets"})
    experiment = record(tmp_path, config, prepare(config), silent)
    found = summary_of(tmp_path)
    sets, server = found["label_sets"], experiment.outcome.last.server
    assert sets["holders"] == np.array(found["label_counts"]).astype(bool).sum(0).tolist()
    assert sets["absent_rounds"] == server["absent"]["rounds"].tolist()
    assert [r["round"] for r in sets["rounds"]] == [1, 2, 3]
    last = sets["rounds"][-1]
    assert last["absent"] == int(server["absent"]["now"].sum()) >= 4
    assert last["outside_after"] == pytest.approx(float(server["tuning"]["outside"][1]))
    assert found["final"]["sets_outside_after"] == last["outside_after"]
    assert found["final"]["bytes_model"] == size_in_bytes({"p": experiment.outcome.params})
    why = " ".join(found["why"])
    assert "central tuning moved the mass on the" in why
    html = page([read_run(tmp_path)])
    assert "Clients that hold it" in html
    assert "Mass on absent labels before" in html


def test_a_run_without_label_sets_says_nothing_of_them(tmp_path: Path) -> None:
    plain = tables(training={"rounds": 1}) | {"method": {"name": "fedavg"}, "name": "plain"}
    config = validate(plain)
    record(tmp_path, config, prepare(config), silent)
    found = summary_of(tmp_path)
    assert found["label_sets"] is None
    assert not any(k.startswith("sets_") for k in found["final"])
    assert found["final"]["bytes_down"] == found["final"]["bytes_model"]
    assert 'id="label-sets"' not in page([read_run(tmp_path)])


def test_sentences_name_labels_of_nobody_and_labels_absent_at_times() -> None:
    one = SetRound(9, 2, 0.5, 0.4, 0.25, 0.75)
    found = {"holders": [1, 0, 2], "absent_rounds": [4, 9, 0], "rounds": [vars(one)]}
    said = sentences(found, ("cat", "dog", "cow"))
    assert said == [
        'No client holds "dog": the rows of the head stay as they began.',
        'Rounds of 9 in which nobody of the cohort held a label: "cat" (4).',
        "In the last round central tuning moved the mass on the 2 absent labels from 25.0% to "
        "75.0%.",
    ]
    calm = {"holders": [1], "absent_rounds": [0], "rounds": [vars(replace(one, absent=0))]}
    assert sentences(calm, ("cat",)) == []


def test_an_experiment_file_can_say_all_this(tmp_path: Path) -> None:
    path = tmp_path / "sets.toml"
    path.write_text(
        '[shift]\nkind = "label-sets"\ntarget = "union"\nclients = 10\nlabels_per_client = 2\n'
        'samples = 500\n[server]\nunlabeled = 1000\n[method]\nname = "labelset_fedprox"\n'
        'mode = "public"\ntune = "pairwise"\n'
    )
    config = load_config(path)
    assert config.shift.shift() == LabelSetSplit(2, samples=500)
    assert config.server.unlabeled == 1000


# --------------------------------------------------------------------------- how tuning fails


def test_a_label_of_few_holders_can_take_all_without_pairwise_loss() -> None:
    """h(a|x) = 1 has loss 0 if all holders of a are sure of it; else not, and never for MSE."""
    labels = torch.tensor([[0, 1], [2, 3], [2, 4]])
    sure = torch.tensor([[[1.0, 0.0]], [[0.3, 0.7]], [[0.9, 0.1]]])  # client 0 holds 0, alone
    winner = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    weights = torch.full((3,), 1 / 3)

    def loss(kind: Literal["mse", "pairwise"], p: torch.Tensor) -> float:
        return float(disagreement(kind, p, seen_by(winner, labels), weights))

    assert loss("pairwise", sure) == 0.0
    assert loss("mse", sure) > 0.1
    unsure = sure.clone()
    unsure[0] = torch.tensor([[0.5, 0.5]])
    assert loss("pairwise", unsure) > 0.1
