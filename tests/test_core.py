"""Trees, seeds and plans, on which everything else rests."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift import tree
from fedshift.client.local import Local, plan_all
from fedshift.data import Examples, Task, client_data, count, label_counts, plan_phase, take
from fedshift.errors import InputError
from fedshift.seeds import Seeds, generator, key, numpy_generator
from fedshift.server.combine import check_weights, combine_counters
from fedshift.server.weights import BySize

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 2, 1, 1, 0])


def test_keys_keep_parts_apart() -> None:
    assert len({key("ab", "c"), key("a", "bc"), key("abc"), key(1), key("1"), key(1, 0)}) == 6
    assert key("x", 3) == key("x", np.int64(3))
    assert 0 <= key("anything") < 2**63


def test_streams_do_not_depend_on_one_another() -> None:
    first = torch.rand(3, generator=generator(0, "batch", 1, 2))
    torch.rand(1000, generator=generator(0, "cohort", 1))
    assert torch.equal(first, torch.rand(3, generator=generator(0, "batch", 1, 2)))
    assert not torch.equal(first, torch.rand(3, generator=generator(0, "batch", 1, 3)))
    draws = [numpy_generator(0, "split").random() for _ in range(2)]
    assert draws[0] == draws[1]
    assert Seeds.of(3) == Seeds(3, 3, 3, 3)


def test_weighted_sum_skips_zero_weights_and_sums_in_double() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [3.0, 4.0]])
    w = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64)
    got = tree.weighted_sum(w, {"a": rows})["a"]
    assert torch.equal(got, torch.tensor([2.5, 3.5]))
    big = torch.tensor([[1e8], [1.0], [-1e8]])
    exact = tree.weighted_sum(torch.ones(3).double(), {"a": big})["a"]
    assert exact.item() == 1.0
    assert (big[0] + big[1] + big[2]).item() == 0.0  # what float32 makes of it


@pytest.mark.parametrize("shape", [(), (7,), (300, 5)])
def test_rows_are_summed_in_turn(shape: tuple[int, ...]) -> None:
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(40, *shape, generator=source)
    weights = torch.rand(40, dtype=torch.float64, generator=source)

    def in_turn(order: range) -> torch.Tensor:
        whole = torch.zeros(shape, dtype=torch.float64)
        for i in order:
            whole += rows[i].double() * weights[i]
        return whole

    total = torch.zeros(shape, dtype=torch.float64)
    tree.accumulate(total, rows.unbind(), weights.unbind())
    assert torch.equal(total, in_turn(range(40)))
    assert torch.equal(tree.weighted_sum(weights, {"a": rows})["a"], total.float())
    # Another order gives other bits somewhere, where there is more than a number.
    assert len(shape) < 2 or not torch.equal(total, in_turn(range(39, -1, -1)))


def test_stack_is_strict() -> None:
    a = {"p": {"x": torch.zeros(2)}}
    assert torch.equal(tree.stack([a, a])["p"]["x"], torch.zeros(2, 2))
    for other in ({"p": {"x": torch.zeros(1)}}, {"p": {"y": torch.zeros(2)}}, {"q": {}}):
        with pytest.raises(InputError, match="cannot stack: "):
            tree.stack([a, other])  # type: ignore[list-item]


def test_flatten_and_back() -> None:
    parts = {"params": {"a.b": torch.ones(2), "c": torch.zeros(())}, "empty": {}}
    again = tree.unflatten(tree.flatten(parts), parts)
    assert again.keys() == parts.keys()
    assert torch.equal(again["params"]["a.b"], parts["params"]["a.b"])


def test_models_of_other_names_do_not_add() -> None:
    with pytest.raises(InputError, match="different parameter names"):
        tree.add({"a": X}, {"b": X})
    assert float(tree.sq_norm({"a": X, "b": X})) == 2 * float((X * X).sum())
    assert float(tree.sq_norm({})) == 0.0


@given(
    n=st.integers(0, 70),
    batch=st.integers(1, 20),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_epochs_use_every_example_once(n: int, batch: int, epochs: int, seed: int) -> None:
    plan = plan_phase(n, batch=batch, lr=0.1, generator=generator(seed), epochs=epochs)
    used = plan.rows[plan.weight > 0]
    assert torch.equal(used.bincount(minlength=n), torch.full((n,), epochs))
    assert plan.sizes == tuple(plan.weight.sum(1).int().tolist())
    assert plan.steps == epochs * -(-n // batch)


@given(n=st.integers(1, 70), batch=st.integers(1, 20), steps=st.integers(1, 30))
def test_steps_are_counted(n: int, batch: int, steps: int) -> None:
    plan = plan_phase(n, batch=batch, lr=0.1, generator=generator(0), steps=steps)
    assert plan.steps == steps
    per_epoch = -(-n // batch)
    counts = plan.rows[plan.weight > 0].bincount(minlength=n)
    # Whole epochs use every example; the begun one uses some of them once.
    assert int(counts.min()) >= steps // per_epoch
    assert int(counts.max()) <= -(-steps // per_epoch)


def test_a_batch_holds_its_rows() -> None:
    data = client_data(X, Y, 0)
    plan = plan_phase(6, batch=4, lr=0.5, generator=generator(0), epochs=1)
    first, second = take(data, plan, 0), take(data, plan, 1)
    assert len(first.y) == 4
    assert len(second.y) == 2
    assert float(second.size) == 2
    assert torch.equal(first.x, X[first.rows])
    assert torch.equal(second.y, Y[second.rows])
    assert float(count(data)) == 6
    assert label_counts(data, 4).tolist() == [2, 3, 1, 0]


def test_plans_of_a_client_do_not_depend_on_others() -> None:
    data = client_data(X, Y, 0)
    phases = {"train0": Local(batch=2)}
    one = plan_all(phases, data, 3, 7, 5)["train0"].rows
    assert torch.equal(one, plan_all(phases | {"more": Local()}, data, 3, 7, 5)["train0"].rows)
    others = [
        plan_all(phases, data, *args)["train0"].rows for args in ((4, 7, 5), (3, 8, 5), (3, 7, 6))
    ]
    assert not all(torch.equal(one, other) for other in others)


def test_counters_take_the_largest_that_counts() -> None:
    stacked = {"seen": torch.tensor([3, 9, 5])}
    w = torch.tensor([0.5, 0.0, 0.5])
    assert int(combine_counters(w, stacked)["seen"]) == 5


def test_sizes_that_no_number_can_hold() -> None:
    with pytest.raises(InputError, match="sum to more than a number can hold; the largest is 1e"):
        BySize()({"n": torch.tensor([1e308, 1e308], dtype=torch.float64)})


@pytest.mark.parametrize(
    ("weights", "at_fault"),
    [
        ([0.5, 0.4], "sum to 0.9"),
        ([1.5, -0.5], "-0.5"),
        ([float("nan"), 1.0], "client 0 of the cohort is nan"),
        ([0.0, float("inf")], "client 1 of the cohort is inf"),
        ([1e308, 1e308], "more than a number"),
        ([1.0], "shape (1,)"),
        ([[0.5, 0.5]], "shape (1, 2)"),
    ],
)
def test_weights_off_the_simplex_are_refused(weights: list[Any], at_fault: str) -> None:
    check_weights(torch.tensor([0.5, 0.5]).double(), 2)
    with pytest.raises(InputError, match=re.escape(at_fault)):
        check_weights(torch.tensor(weights, dtype=torch.float64), 2)


@pytest.mark.parametrize(
    ("options", "at_fault"),
    [
        ({"epochs": 1, "steps": 3}, "epochs"),
        ({"epochs": 0}, "epochs"),
        ({"batch": 0}, "batch"),
        ({"lr": -0.1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"decay": -1.0}, "decay"),
        ({"only": "head."}, "only"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum"),
    ],
)
def test_local_refuses(options: dict[str, Any], at_fault: str) -> None:
    with pytest.raises(InputError, match=at_fault):
        Local(**options)


def test_one_epoch_is_what_local_training_has_without_steps() -> None:
    ten = Local(steps=10)
    assert (ten.epochs, ten.steps) == (None, 10)
    assert ten == Local(epochs=None, steps=10)
    assert Local() == Local(epochs=1) == Local(epochs=None) == Local(epochs=None, steps=None)
    assert Local() != ten
    assert "epochs=1, batch=32, steps=None" in repr(Local())
    assert replace(ten, lr=0.5).steps == 10
    assert replace(ten, steps=None) == Local()
    with pytest.raises(InputError, match="not both"):
        replace(Local(), steps=10)


def test_tasks_that_do_not_fit_are_refused() -> None:
    client, examples = client_data(X, Y, 0), Examples(X, Y)
    target = torch.tensor([0.5, 0.5, 0.0]).double()

    def task(**changed: object) -> Task:
        fields = {
            "clients": (client,), "validation": (examples,), "target": target,
            "test": examples, "target_validation": None, "classes": ("a", "b", "c"),
        }  # fmt: skip
        return Task(**(fields | changed))  # type: ignore[arg-type]

    assert task().table()["labels"].tolist() == [[2, 3, 1]]
    for changed, at_fault in (
        ({"clients": (), "validation": ()}, "clients"),
        ({"validation": (examples, examples)}, "2 validation sets"),
        ({"clients": (client_data(X, Y, 4),)}, "ids"),
        ({"target": target[:2]}, "target"),
    ):
        with pytest.raises(InputError, match=at_fault):
            task(**changed)
    with pytest.raises(InputError, match="6 inputs and 2 labels"):
        client_data(X, Y[:2], 0)
