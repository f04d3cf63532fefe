"""The marks by which versions of a user's code are distinguished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.fitting.sources import mark_of

scale, helper_scale = 1.0, 1.0


def helped(x: Tensor) -> Tensor:
    return helper_scale * x


def loss(z: Tensor, y: Tensor) -> Tensor:
    return helped(scale * z.sum(1))


def with_weights(w: Tensor) -> Callable[..., Tensor]:
    return lambda z, y: w[y] * z.sum(1)


@pytest.mark.parametrize("name", ["scale", "helper_scale"])
def test_variables_around_a_function_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mark_of(loss)
    assert mark_of(loss) == before
    monkeypatch.setitem(globals(), name, 2.0)
    assert mark_of(loss) != before


def test_every_number_of_a_long_tensor_counts() -> None:
    weights = torch.ones(5000)
    changed = weights.clone()
    changed[2500] = 2
    assert mark_of(with_weights(weights)) == mark_of(with_weights(weights.clone()))
    assert mark_of(with_weights(weights)) != mark_of(with_weights(changed))


def test_what_is_part_of_itself_has_a_mark() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert mark_of(ring) == mark_of(ring)
