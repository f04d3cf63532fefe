"""Accuracies on few test examples, or on rows that are not the target's, are reported as such."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fedshift.evaluation.scores import Score
from fedshift.experiments.measures.task_scores import FEW, few_tests
from fedshift.record.headline import measured_on, target_words

CLASSES, TARGET = ("survived", "died", "transferred"), (0.5, 0.3, 0.2)


def scored(right: list[int], total: list[int]) -> Score:
    return Score(torch.tensor(right), torch.tensor(total), torch.tensor(total), 1.0)


def test_few_test_examples_are_reported_with_their_interval() -> None:
    """Wilson's interval in its closed form; the control has enough examples."""
    (line,) = few_tests(scored([2, 1, 0], [3, 1, 1]), CLASSES, TARGET)
    n, p, z = 5, 3 / 5, 1.959964
    middle = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * spread) / (1 + z * z / n) for sign in (-1, 1))
    assert line.startswith("Target accuracy is measured on 5 test examples alone: by them it lies")
    assert f"between {low:.0%} and {high:.0%} (95 % interval)" in line
    assert '"died" has 1 of them' in line  # 1 of 0.3 is scarcer than 1 of 0.2
    assert few_tests(scored([2, 1, 0], [FEW - 2, 1, 1]), CLASSES, TARGET) == []
    assert few_tests(scored([0, 0, 0], [0, 0, 0]), CLASSES, TARGET) == []


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"survived": 0.5, "died": 0.5}, False),
        ([0.5, 0.5], False),
        ("pooled", False),
        ("tests.csv", True),
        ("lakeside", True),
    ],
)
def test_a_report_says_whose_rows_were_tested(given: object, rows: bool) -> None:
    """From the run's configuration, where `fedshift.fit` has left no sentence."""
    if isinstance(given, dict):
        value = "{" + ", ".join(f"{k} = {v}" for k, v in given.items()) + "}"
    else:
        value = json.dumps(given)
    config = f'[data]\nsource = "sites"\ntarget = {value}\n'
    words = measured_on([target_words({}, config)])
    assert words.startswith("the target's own" if rows else "the clients' test rows")
    assert target_words({"target": "the client x, held out"}, config).startswith("the client x")
    # The library's data sets have a test set of their own.
    assert target_words({}, '[data]\nname = "fashion-mnist"\n') == ""
