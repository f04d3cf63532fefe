"""Tables with natural clients: their counts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedshift.datasets import Table, load_table
from fedshift.datasets.natural.loading import find_table, natural
from fedshift.errors import DataError, InputError


def loaded(name: str) -> Table:
    """The table, where its package is installed."""
    one = natural(name)
    if find_table(one) is None:
        pytest.skip(f"{name} needs the package {one.package.name}: {one.package.how}")
    return load_table(name)


def test_penguins() -> None:
    """One species lives on two islands, each of the others on one."""
    table = loaded("penguins")
    assert table.clients == ("Biscoe", "Dream", "Torgersen")
    assert table.counts.tolist() == [[44, 0, 124], [56, 68, 0], [52, 0, 0]]
    assert table.source.startswith("palmerpenguins ")
    assert table.time is not None
    assert set(table.time) == {"2007", "2008", "2009"}
    assert list(table.inputs.isna().sum()) == [2, 2, 2, 2, 11]


def test_an_absent_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(DataError, match=r'palmerpenguins, .* pip install "fedshift\[data\]"'):
        load_table("penguins")


def test_an_unknown_name() -> None:
    with pytest.raises(InputError, match=r'unknown table "penguin".* Did you mean "penguins"\?'):
        load_table("penguin")


def made(**changes: object) -> Table:
    names = np.array(["a", "b", "b"], dtype=object)
    fields = {
        "name": "made", "inputs": np.zeros((3, 2), np.float32), "y": names, "client": names,
        "time": None, "classes": ("a", "b"), "label": "kind", "by": "site", "licence": "none",
        "source": "made 1",
    } | changes  # fmt: skip
    return Table(**fields)  # type: ignore[arg-type]


def test_a_table_is_whole() -> None:
    assert made().counts.tolist() == [[1, 0], [0, 2]]
    with pytest.raises(InputError, match=r"client has 2 rows and y has 3"):
        made(client=np.array(["a", "b"], dtype=object))
    with pytest.raises(InputError, match=r'label "b" is not among the classes: a'):
        made(classes=("a",))


def test_clients_that_are_numbers_are_in_their_order() -> None:
    assert made(client=np.array(["10", "9", "9"], dtype=object)).clients == ("9", "10")
