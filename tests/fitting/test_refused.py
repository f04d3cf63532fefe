"""What `fit` refuses at the door: one sentence with the cure, before anything is trained."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

import fedshift as fs
from fedshift.fitting.class_weights import weights_of
from support.custom_tasks import Net, hospitals
from support.number_tasks import prices, symptoms

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "progress": False}


@pytest.fixture(scope="module")
def task() -> fs.Task:
    return hospitals()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"ill": 3.0}, 'no weight for well; give each class one, or "balanced"'),
        (
            {"ills": 3.0, "well": 1},
            'no class "ills". Did you mean "ill"? The classes are ill, well',
        ),
        ({}, "no weight for ill, well"),
        ([1.0], "2 numbers above 0, one per class, got [1.0]"),
        (["a", "b"], "2 numbers above 0, one per class, got a list: ['a', 'b']"),
        ({"ill": None, "well": 1}, "2 numbers above 0"),
        ({1.0, 2.0}, "2 numbers above 0"),
        (True, "2 numbers above 0"),
        ("even", 'give "balanced", a dict by class'),
    ],
)
def test_class_weights_are_of_every_class(task: fs.Task, given: Any, match: str) -> None:
    with pytest.raises(fs.InputError) as refused:
        fs.fit(task, Net, class_weights=given, **QUICK)
    assert match in str(refused.value)


def test_class_weights_by_name_are_in_the_order_of_the_classes(task: fs.Task) -> None:
    for given in ({"well": 1, "ill": 3.0}, pd.Series({"well": 1.0, "ill": 3.0}), [3.0, 1.0]):
        weights = weights_of(given, task.build())
        assert weights is not None
        assert weights.tolist() == [3.0, 1.0]


@pytest.mark.parametrize("made", [prices, symptoms])
def test_class_weights_are_refused_where_there_are_no_classes(made: Any) -> None:
    with pytest.raises(fs.InputError, match="class_weights are of classes, and this task is"):
        weights_of("balanced", made(n=100).build())
