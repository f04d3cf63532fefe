"""Rows to predict are matched with the task's inputs by name, and padded as in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedshift as fs
from fedshift.errors import InputError

DRAWS = np.random.default_rng(0)
CLIENT = np.arange(60) % 3
QUICK: dict[str, Any] = {"rounds": 1, "progress": False, "backend": "loop"}


class Both(nn.Module):
    def __init__(self, task: fs.Task) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.a(x["mri"]) - self.b(x["ct"])


class Reader(nn.Module):
    def __init__(self, task: fs.Task) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.words(ids) * mask[..., None]).sum(1))


def test_inputs_of_a_dict_are_matched_by_name() -> None:
    """Control: other numbers under the same names give other answers."""
    mri, ct = (DRAWS.normal(size=(60, 3)).astype("float32") for _ in range(2))
    task = fs.Task.from_arrays({"mri": mri, "ct": ct}, mri[:, 0] > 0, client=CLIENT, target="0")
    result = fs.fit(task, Both, **QUICK)
    given = result.predict({"mri": mri, "ct": ct}).probabilities
    assert (result.predict({"ct": ct, "mri": mri}).probabilities == given).all()
    assert (result.predict({"ct": mri, "mri": ct}).probabilities != given).any()
    for rows, why in (
        ({"mr": mri, "ct": ct}, 'no input "mr"; it has mri, ct. Did you mean "mri"?'),
        ({"mri": mri}, "lack the input ct"),
        ({"mri": mri, "ct": ct, "z": ct}, 'no input "z"'),
        ({"mri": mri[:, :2], "ct": ct}, '"mri" has examples of shape'),
        (mri, "no dict"),
    ):
        with pytest.raises(InputError) as refused:
            result.predict(rows)
        assert why in str(refused.value)


def test_sequences_are_padded_as_the_tasks_were() -> None:
    """One at a time or together; a longer one, or two inputs, are refused."""
    texts = [DRAWS.integers(1, 20, length).tolist() for length in 2 + np.arange(60) % 6]
    seen = [3 in text for text in texts]
    result = fs.fit(fs.Task.from_arrays(texts, seen, client=CLIENT, target="0"), Reader, **QUICK)
    together = result.predict(texts).probabilities
    alone = np.concatenate([result.predict([text]).probabilities for text in texts])
    assert np.abs(alone - together).max() < 1e-6
    arrays = np.array([np.array([1, 2]), np.array([3])], dtype=object)
    assert (result.predict(arrays).names == result.predict([[1, 2], [3]]).names).all()
    whole = (torch.tensor([[1, 2, 0, 0, 0, 0, 0]]), torch.arange(7)[None] < 2)
    assert (result.predict(whole).probabilities == result.predict([[1, 2]]).probabilities).all()
    for rows, why in (
        ([[1] * 8], "a sequence of 8, and the longest of the task has 7"),
        ((texts, texts, texts), "3 inputs, and the task has 1"),
        ([["a", "b"]], "no sequence of numbers"),
    ):
        with pytest.raises(InputError, match=why):
            result.predict(rows)


@pytest.mark.parametrize("length", [3, 9])
def test_a_test_set_of_sequences_may_be_shorter_or_longer(length: int) -> None:
    texts = [DRAWS.integers(1, 20, n).tolist() for n in 2 + np.arange(60) % 6]
    y = np.arange(60) % 2
    tests = ([list(range(1, length + 1))] * 4, [0, 1, 0, 1])
    built = fs.Task.from_arrays(texts, y, client=CLIENT, target=tests).build()
    layout = built.encoding.layout
    assert layout is not None
    ids, mask = layout.unpack(built.task.test.x)
    assert ids.shape == (4, max(7, length))
    assert mask.sum(1).tolist() == [length] * 4
    assert ids[0, :length].tolist() == list(range(1, length + 1))


@pytest.mark.slow
def test_a_batch_beyond_all_examples_takes_no_more_room() -> None:
    """The same steps: control, half of the examples are others."""
    x = DRAWS.normal(size=(60, 3))
    task = fs.Task.from_arrays(x, x[:, 0] > 0, client=CLIENT, target="0")
    net = nn.Linear(3, 2)

    def trained(batch: int) -> Tensor:
        return fs.fit(task, net, batch=batch, **QUICK).models.uncorrected[0]["weight"]

    assert torch.equal(trained(10**9), trained(16 * 100))
    assert not torch.equal(trained(10**9), trained(8))
