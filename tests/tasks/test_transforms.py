"""Random changes of training examples: repeatable, for training alone, and odd ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedshift as fs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.errors import InputError
from fedshift.model import Model
from support.drawn_tasks import drawn_task


def noise(x: Any, random: torch.Generator) -> Any:
    return x + torch.randn(x.shape, generator=random)


def test_draws_depend_on_the_seed_of_the_step() -> None:
    built = drawn_task("north", transform=noise).build()
    assert built.augment is not None
    x = built.task.clients[0].x
    assert torch.equal(built.augment(x, 3), built.augment(x, 3))
    assert not torch.equal(built.augment(x, 3), built.augment(x, 4))
    assert drawn_task("north").build().augment is None


def test_packed_inputs_are_changed_as_the_network_gets_them() -> None:
    x = (torch.rand(12, 2), torch.arange(12)[:, None])
    built = fs.Task.from_arrays(
        x, [0, 1] * 6, client=["a"] * 6 + ["b"] * 6, target="b",
        transform=lambda given, random: (given[0] * 0, given[1]),
    ).build()  # fmt: skip
    assert built.augment is not None
    assert built.encoding.layout is not None
    changed = built.encoding.layout.unpack(built.augment(built.task.test.x, 0))
    assert (changed[0] == 0).all()
    assert torch.equal(changed[1], x[1][6:])


def test_training_sees_changed_examples_and_tests_do_not() -> None:
    """Control: without the transform another model is learnt."""
    options = {"rounds": 2, "lr": 0.1, "prior": "none"}
    start = nn.Linear(3, 2)
    blind = fs.fit(drawn_task("north", transform=lambda x, random: 0 * x), start, **options)
    assert torch.equal(blind.module().weight, start.weight)  # no gradient reaches it
    model = fs.fit(drawn_task("north"), Model(start, augment=lambda x, seed: 0 * x), **options)
    assert torch.equal(model.module().weight, start.weight)
    seeing = fs.fit(drawn_task("north"), start, **options)
    assert not torch.equal(seeing.module().weight, start.weight)


def test_other_shapes_and_methods_with_their_own_network_are_refused() -> None:
    task = drawn_task("north", transform=lambda x, random: x[:, :2])
    with pytest.raises(InputError, match="transform made .* keep their shape"):
        fs.fit(task, nn.Linear(3, 2), rounds=1)
    method = FedAvg(Model(nn.Linear(3, 2)))
    with pytest.raises(InputError, match="the task's transform would not be applied"):
        fs.fit(drawn_task("north", transform=noise), None, method=method, rounds=1)
    twice = Model(nn.Linear(3, 2), augment=lambda x, seed: 0 * x)
    with pytest.raises(InputError, match="this task has a transform as well; give the task one"):
        fs.fit(drawn_task("north", transform=noise), twice, rounds=1)
    packed = fs.Task.from_arrays(
        (torch.rand(8, 2), torch.arange(8)[:, None]), [0, 1] * 4, client=list("aaaabbbb"),
        target="b",
    )  # fmt: skip
    with pytest.raises(InputError, match="this task packs its inputs"):
        fs.fit(packed, twice, rounds=1)
