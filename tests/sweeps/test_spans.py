"""Grids as written after -c."""

from __future__ import annotations

import pytest

from fedshift.errors import InputError
from fedshift.sweeps.spans import values_of


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("training.lr=0.01,0.1", ("0.01", "0.1")),
        ("training.lr= 0.01 , 0.1", ("0.01", "0.1")),
        ("training.lr=0.1", ("0.1",)),
        ("model.hidden=[100, 50]", ("[100, 50]",)),
        ("model.hidden=[100],[200, 50]", ("[100]", "[200, 50]")),
        ("training.optimizer=sgd,adam", ("sgd", "adam")),
        ('name="one, two"', ('"one, two"',)),
        ("training.momentum=", ("",)),
    ],
)
def test_a_list_is_several_values(typed: str, values: tuple[str, ...]) -> None:
    assert values_of(typed) == (typed.partition("=")[0], values)


@pytest.mark.parametrize("typed", ["training.lr=0.1,", "training.lr=,0.1", "training.lr=0.1,0.1"])
def test_lists_with_gaps_and_repeats_are_refused(typed: str) -> None:
    with pytest.raises(InputError, match=r"empty value|there twice"):
        values_of(typed)
