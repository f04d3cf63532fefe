"""Clients named by whole numbers have one name everywhere, as in the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedshift as fs
from fedshift.errors import InputError
from support.custom_tasks import Net, rows

NUMBERS = {"north": 101, "south": 102, "east": 103, "west": 104}


@pytest.fixture(scope="module")
def result() -> fs.Result:
    x, y, site = rows()
    plants = np.array([NUMBERS[one] for one in site])
    task = fs.Task.from_arrays(x, y, client=plants, target="clients")
    assert task.clients == ("101", "102", "103", "104")
    return fs.fit(task, Net, method="ditto", rounds=2, steps=2, progress=False)


def test_names_are_those_of_the_task(result: fs.Result, tmp_path: Path) -> None:
    assert result.clients == ("101", "102", "103", "104")
    assert (*result.accuracies,) == result.clients
    loaded = fs.load(result.save(tmp_path / "run"), net=Net)
    assert loaded.clients == result.clients
    assert loaded.accuracies == result.accuracies


@pytest.mark.parametrize("name", ["102", 102, 102.0, "client 102"])
def test_a_client_is_found_by_any_way_to_write_it(result: fs.Result, name: str | int) -> None:
    """Control: another client has another network."""
    given, expected = (result.module(client=one).state_dict() for one in (name, result.clients[1]))
    assert all(torch.equal(v, expected[k]) for k, v in given.items())
    other = result.module(client=101).state_dict()
    assert not all(torch.equal(v, expected[k]) for k, v in other.items())
    x = rows()[0][:3]
    assert [*result.predict(x, client=name).names] == [*result.predict(x, client="102").names]


def test_another_one_is_not(result: fs.Result) -> None:
    with pytest.raises(InputError, match='unknown client "105"; allowed: 101, 102, 103, 104'):
        result.module(client=105)
