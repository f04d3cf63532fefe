"""Clients with a few labels each, and the server's own examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import ServerData
from fedshift.experiments.task.preparing import Prepared, prepare, scaled
from fedshift.experiments.task.server_rows import reserve
from fedshift.seeds import numpy_generator
from fedshift.shifts import LabelSetSplit, check_partition, label_counts
from fedshift.shifts.base import Ints
from fedshift.shifts.label_sets import cyclic_sets, shared_evenly
from support.label_set_fixtures import tables

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
        sizes = counts[counts > 0]
        assert set(sizes.tolist()) <= {100 // k, -(-100 // k)}
        assert (counts.sum(0) > 0).all()  # every label has a client


def test_labels_and_extra_examples_are_drawn_uniformly() -> None:
    """Without `cover`, label y is in Y_i with probability k / K: within 4.5 s.e. of it."""
    draws = [dealt(LabelSetSplit(3, samples=31, cover=False), seed=s) for s in range(250)]
    share = np.mean([c > 0 for c in draws], axis=0)
    error = np.sqrt(0.3 * 0.7 / 250)
    assert np.abs(share - 0.3).max() < 4.5 * error
    more = np.mean([c == 11 for c in draws], axis=(0, 1))
    assert np.abs(more - 0.1).max() < 4.5 * np.sqrt(0.1 * 0.9 / 2000)
    lonely = [c for c in draws if (c.sum(0) == 0).any()]
    assert lonely  # some label has no client: the control of the test above


@pytest.mark.parametrize(("common", "union"), [(0, 9), (1, 7), (2, 5), (3, 3)])
def test_any_two_clients_have_the_common_labels_alone(common: int, union: int) -> None:
    holds = dealt(LabelSetSplit(3, samples=90, common=common), clients=3) > 0
    assert (holds.sum(1) == 3).all()
    assert holds.any(0).sum() == union
    both = holds.astype(int) @ holds.T.astype(int)
    assert (both[~np.eye(3, dtype=bool)] == common).all()
    other = dealt(LabelSetSplit(3, samples=90, common=common), clients=3, seed=1) > 0
    assert (holds != other).any()  # which labels, is drawn


def test_even_shares() -> None:
    holds = np.array([[True, False, True, True], [False, True, False, False]])
    counts = shared_evenly(8, holds, numpy_generator(0, "shares"))
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


def ready(**changes: Any) -> Prepared:
    return prepare(validate(tables(**changes)))


def rows_of(prepared: Prepared, sets: Sequence[torch.Tensor]) -> list[set[int]]:
    """Which training images these are, set by set. Images that the file has twice are left out."""
    first: dict[bytes, list[int]] = {}
    for i, image in enumerate(scaled(prepared.data.train.x).numpy()):
        first.setdefault(image.tobytes(), []).append(i)
    places = [[first[image.tobytes()] for image in x.numpy()] for x in sets]
    return [{place[0] for place in some if len(place) == 1} for some in places]


def test_clients_and_server_share_no_examples() -> None:
    prepared = ready(data={"validation": 0.1})
    task = prepared.task
    assert prepared.server_inputs is not None
    assert task.target_validation is not None
    sets = [prepared.server_inputs, task.target_validation.x]
    sets += [c.x for c in task.clients] + [v.x for v in task.validation]
    rows = rows_of(prepared, sets)
    assert [len(x) for x in sets[:2]] == [100, 50]
    assert sum(map(len, rows)) == len(set().union(*rows)) > 400
    assert not rows[0] & set(prepared.pool.tolist())  # nor does the oracle draw them


def test_tests_and_the_servers_examples_are_of_the_union() -> None:
    shift = {"clients": 3, "labels_per_client": 2, "common_labels": 1}
    prepared = ready(shift=shift)
    present = prepared.task.table()["labels"].sum(0) > 0
    assert int(present.sum()) == 4
    assert torch.equal(prepared.task.target, present.double() / 4)
    counts = torch.bincount(prepared.task.test.y, minlength=10)
    assert set(counts[present].tolist()) == {int(counts.max())}
    assert int(counts[~present].sum()) == 0
    assert prepared.server_inputs is not None
    assert prepared.task.target_validation is not None
    assert len(prepared.server_inputs) == 40  # 10 of each label of the union
    assert torch.equal(torch.bincount(prepared.task.target_validation.y, minlength=10) > 0, present)


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
    """The split is that of a run from before there was [server]."""
    plain = tables()
    plain["method"] = {"name": "labelset_fedavg"}
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
            r'tune = "mse" needs unlabeled inputs on the server; give server.unlabeled = n',
        ),
        ({"shift": {"target": "clients"}}, r"\[server\] takes its examples from a training file"),
        ({"shift": {"target": "drawn"}}, r"server.validation: with shift.target = \"drawn\""),
        ({"shift": {"beta": 0.5}}, r'"beta" is not an option of kind "label-sets" \(labels_per'),
        (
            {"shift": {"common_labels": 5}},
            r"shift.common_labels = 5; allowed: a whole number from 0 to 4",
        ),
        ({"shift": {"kind": "sparsity"}}, r'"samples" is not an option of kind "sparsity"'),
        ({"server": {"unlabelled": 3}}, 'unknown key "server.unlabelled".*Did you mean'),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        validate(tables(**changes))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"server": {"unlabeled": 9000}}, "server.unlabeled = 9000, and 7000 training examples"),
        ({"server": {"unlabeled": 3}}, r"server.unlabeled = 3: .* Raise server.unlabeled"),
        ({"shift": {"samples": 2000}}, "shift.samples = 2000 for each of 6 clients"),
    ],
)
def test_tasks_that_cannot_be(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ready(**changes)


# --------------------------------------------------------------------------- cyclic sets


def test_cyclic_sets_hold_each_label_equally_often() -> None:
    """Pairs of ten labels: 5 blocks, then 10 sets more for each step, 45 in all; by hand."""
    sizes = [len(cyclic_sets(10, 2, r)) for r in range(7)]
    assert sizes == [5, 10, 20, 30, 40, 45, 45]
    for k, reach in ((2, 0), (2, 3), (2, 5), (3, 1), (3, 4), (5, 0)):
        sets = cyclic_sets(10, k, reach)
        assert len(set(sets)) == len(sets)
        assert {len(set(s)) for s in sets} == {k}
        assert len({sum(y in s for s in sets) for y in range(10)}) == 1
    assert set(cyclic_sets(10, 2, 5)) == set(combinations(range(10), 2))


@pytest.mark.parametrize("reach", [0, 1, 2, 5])
def test_clients_get_cyclic_sets_in_turn(reach: int) -> None:
    """As many labels and labels per client at every reach; the pairs that share a client differ."""
    labels = np.tile(np.arange(10), 400)
    parts = LabelSetSplit(2, samples=20, reach=reach)(labels, 10, 90, np.random.default_rng(3))
    sets = [tuple(np.unique(labels[p])) for p in parts]
    assert {len(p) for p in parts} == {20}
    assert {y for s in sets for y in s} == set(range(10))
    pairs = Counter(sets)
    assert len(pairs) == len(cyclic_sets(10, 2, reach))
    assert max(pairs.values()) - min(pairs.values()) <= 1
    # In another draw the ring is in another order, but for all pairs.
    other = LabelSetSplit(2, samples=20, reach=reach)(labels, 10, 90, np.random.default_rng(4))
    again = {tuple(np.unique(labels[p])) for p in other}
    assert (again == set(sets)) == (reach == 5)


@pytest.mark.parametrize(
    ("options", "clients", "message"),
    [
        ({"reach": 5}, 44, "has 45 different sets of 10 labels, and there are 44 clients; give 45"),
        ({"reach": 0, "labels_per_client": 3}, 90, "cuts 10 labels into blocks"),
        ({"reach": -1}, 90, "reach"),
        ({"reach": 1, "common": 1}, 90, "common=1 and reach=1 both say how sets overlap"),
        ({"reach": 1, "labels_per_client": 11}, 90, "of 10 labels leaves no set"),
    ],
)
def test_cyclic_sets_that_cannot_be(options: dict[str, int], clients: int, message: str) -> None:
    labels = np.tile(np.arange(10), 400)
    with pytest.raises(InputError, match=message):
        LabelSetSplit(**{"labels_per_client": 2, "samples": 20, **options})(
            labels, 10, clients, np.random.default_rng(0)
        )
