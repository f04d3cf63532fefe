"""Types of pandas' columns: read rightly, or refused in a sentence, as in CSV files."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift as fs
from fedshift.tasks.encoding import Column, Encoding

N = 80
DRAWS = np.random.default_rng(0)
SITE = np.array(["a", "b", "c", "d"])[np.arange(N) % 4]
FEW = DRAWS.integers(0, 4, N)
HOURS = pd.Series(pd.to_timedelta(FEW, unit="h"))
NAMES = {"client": "site", "label": "y", "target": "a"}


def table(**columns: Any) -> pd.DataFrame:
    plain = {"site": SITE, "num": DRAWS.normal(size=N), "y": np.where(FEW > 1, "ill", "well")}
    return pd.DataFrame(plain | columns)


def column(values: Any) -> tuple[Column, tuple[str, ...]]:
    built = fs.Task.from_frame(table(v=values), **NAMES).build()
    (made,) = [one for one in built.encoding.columns if one.name == "v"]
    return made, built.notes


NUMBERS: dict[str, tuple[Any, Any]] = {
    "timedelta": (HOURS, FEW * 3600.0),
    "timedelta objects": (pd.Series([datetime.timedelta(hours=int(i)) for i in FEW], dtype=object),
                          FEW * 3600.0),
    "decimal": (pd.Series([Decimal(int(v)) / 8 for v in FEW], dtype=object), FEW / 8),
    "Int64": (pd.Series(FEW).astype("Int64"), FEW),
    "sparse": (pd.arrays.SparseArray(FEW.astype(float)), FEW),
    "boolean": (pd.Series(FEW > 1).astype("boolean"), FEW > 1),
    "text of numbers": (pd.Series(FEW.astype(str)).astype("string"), FEW),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_kinds_that_are_numbers(name: str) -> None:
    """Mean and deviation are those of the plain numbers; control: of others they differ."""
    given, plain = NUMBERS[name]
    (made, notes), (expected, _) = column(given), column(np.asarray(plain, np.float64))
    assert made == expected
    assert made != column(np.asarray(plain, np.float64) + 1)[0]
    durations = 'Column "v" holds durations, which count in seconds.'
    assert (durations in notes) == name.startswith("timedelta")
    if name != "text of numbers":
        frame = pd.DataFrame({"num": FEW, "v": given})
        ill = table()["y"]
        built = fs.Task.from_arrays(frame, ill, client=SITE, target="a").build()
        assert built.encoding.columns[1] == made
        assert (durations in built.notes) == name.startswith("timedelta")


@pytest.mark.parametrize(
    "given",
    [
        HOURS.where(FEW > 0),
        pd.Series(FEW).astype("Int64").where(FEW > 0),
        pd.Series(FEW > 1).astype("boolean").where(FEW > 0),
        pd.Series(FEW > 1).astype(object).where(FEW > 0, None),
    ],
)
def test_missing_ones_are_the_mean_and_an_indicator(given: Any) -> None:
    made, _ = column(given)
    assert made.categories is None
    assert made.indicator


@pytest.mark.parametrize(
    ("given", "categories"),
    [
        (pd.Categorical(np.array(["u", "v"])[FEW % 2], categories=["u", "v", "w"]), ("u", "v")),
        (pd.Categorical(FEW), ("0", "1", "2", "3")),
        (pd.cut(FEW, [-1, 1, 3]), ("(-1, 1]", "(1, 3]")),
        (pd.Series(np.array(["u", "v"])[FEW % 2]).astype("string").where(FEW > 0), ("u", "v")),
    ],
)
def test_kinds_that_are_categories(given: Any, categories: tuple[str, ...]) -> None:
    assert column(given)[0].categories == categories


def test_dates_are_names_and_the_notes_say_so() -> None:
    for given in (
        pd.Timestamp("2020-01-01") + HOURS,
        (pd.Timestamp("2020-01-01") + HOURS).dt.tz_localize("UTC"),
        pd.Series(pd.PeriodIndex.from_ordinals(FEW, freq="M")),
        pd.Series([datetime.date(2020, 1, int(i) + 1) for i in FEW], dtype=object),
    ):
        made, notes = column(given)
        assert len(made.categories or ()) == 4
        assert any("holds dates, which count as names; give numbers" in note for note in notes)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (FEW + 1j, r'column "v" holds complex numbers; give two columns, .real and .imag'),
        (pd.Series([[1, 2]] * N), 'column "v" holds a list in row 1; give one value per row'),
        (pd.Series([{"a": 1}] * N), 'column "v" holds a dict in row 1'),
        (pd.Series([np.ones(2)] * N), 'column "v" holds a ndarray in row 1'),
        (np.where(FEW == 0, np.inf, FEW), "holds infinity"),
    ],
)
def test_cells_that_nothing_reads(given: Any, match: str) -> None:
    with pytest.raises(fs.InputError, match=match):
        column(given)


def test_names_of_columns() -> None:
    """Whole numbers are names, too; those of several levels, and two alike, are refused."""
    whole = pd.DataFrame({0: SITE, 1: FEW, 2: FEW > 1})
    one: Any = fs.Task.from_frame(whole, client=0, label=2, target="a")  # type: ignore[arg-type]
    expected = fs.Task.from_frame(whole, client="0", label="2", target="a")
    assert one.build().digest == expected.build().digest
    twice = pd.concat([table(), table()[["site"]]], axis=1)
    levels = table()
    levels.columns = pd.MultiIndex.from_product([["m"], levels.columns])
    for frame, match in (
        (twice, 'two columns are named "site"'),
        (levels, r"names of several levels; give each one name, as by\n?.*join"),
        (table().set_index("site"), r'"site" is the table\'s index; give frame.reset_index\(\)'),
        (None, "frame is None; give a DataFrame"),
    ):
        with pytest.raises(fs.InputError, match=match):
            fs.Task.from_frame(frame, **NAMES)


def test_labels_and_clients_of_odd_kinds() -> None:
    x = DRAWS.normal(size=(N, 2)).astype(np.float32)

    def values(y: Any) -> Any:
        task = fs.Task.from_arrays(x, y, client=SITE, target="a", kind="regression")
        assert task.values is not None
        return task.values[:, 0].numpy()

    np.testing.assert_array_equal(values(HOURS), FEW * 3600)  # nanoseconds until now
    np.testing.assert_array_equal(values(FEW > 1), FEW > 1)
    with pytest.raises(fs.InputError, match=r"no number \(dates\), and regression predicts"):
        values(pd.Timestamp("2020-01-01") + HOURS)
    with pytest.raises(fs.InputError, match="complex"):
        values(FEW + 1j)
    with pytest.raises(fs.InputError, match="y holds a list in row 1; give one value per row"):
        fs.Task.from_arrays(x, [[1]] * N, client=SITE, target="a")
    with pytest.raises(fs.InputError, match="client holds a list in row 1"):
        fs.Task.from_arrays(x, FEW, client=[[1]] * N, target="a")


def both_ways(frame: pd.DataFrame, place: Path, **keys: Any) -> list[fs.Task]:
    """The task of a frame, and of the CSV file that pandas writes of it."""
    frame.to_csv(place / "table.csv", index=False)
    keys = NAMES | {"name": "table"} | keys
    return [fs.Task.from_frame(frame, **keys), fs.Task.from_csv(place / "table.csv", **keys)]


def test_a_frame_and_its_csv_file_are_one_task(tmp_path: Path) -> None:
    """Equal tensors and encodings of every type that both can hold; of boolean labels, too."""
    frame = table(
        flag=FEW > 1,
        maybe=pd.Series(FEW > 1).astype("boolean").where(FEW > 0),
        took=HOURS.where(FEW < 3),
        late=-HOURS,
        whole=FEW,
        some=pd.Series(FEW).astype("Int64").where(FEW > 0),
        word=np.array(["u", "v"])[FEW % 2],
        y=FEW > 2,
    )
    one, two = (task.build() for task in both_ways(frame, tmp_path))
    assert one.encoding == two.encoding
    assert one.digest == two.digest
    for a, b in zip(one.task.clients, two.task.clients, strict=True):
        assert torch.equal(a.x, b.x)
    assert one.task.classes == two.task.classes == ("False", "True")
    assert sorted(one.notes) == sorted(two.notes)
    other = fs.Task.from_frame(frame.assign(flag=FEW > 2), **NAMES).build()  # control
    assert other.digest != one.digest


def test_booleans_at_the_edges(tmp_path: Path) -> None:
    """Marks of missing ones, other texts at the target, numbers to predict, several labels."""
    text = np.where(FEW > 1, "true", "false").astype(object)
    text[1::8] = "?"
    for task in both_ways(table(flag=text), tmp_path):
        (made,) = [one for one in task.build().encoding.columns if one.name == "flag"]
        assert made.categories is None
        assert made.indicator
    text[0] = "maybe"  # a row of the target
    with pytest.raises(fs.InputError, match='"flag" holds True or False and "maybe"; empty'):
        both_ways(table(flag=text), tmp_path)
    flags = table(flag=FEW > 1, other=FEW > 2)
    several: dict[str, Any] = {"label": ["flag", "other"], "kind": "multilabel", "drop": ["y"]}
    one, two = (task.build() for task in both_ways(flags, tmp_path, **several))
    assert one.digest == two.digest
    numbers = {"label": "flag", "kind": "regression", "drop": ["y"]}
    one, two = (task.build() for task in both_ways(flags, tmp_path, **numbers))
    assert one.digest == two.digest
    kinds = both_ways(flags, tmp_path, categories=["flag"])
    assert kinds[0].build().encoding == kinds[1].build().encoding


def test_a_test_set_is_read_as_the_clients_table_is(tmp_path: Path) -> None:
    frame, path = table(flag=FEW > 1, y=FEW > 2, text=FEW.astype(str)), tmp_path / "test.csv"
    clients, rest = frame[frame.site != "a"], frame[frame.site == "a"]
    rest.to_csv(path, index=False)
    clients.to_csv(tmp_path / "clients.csv", index=False)
    keys = NAMES | {"name": "n"}
    digests = {
        fs.Task.from_frame(clients, **keys | {"target": rest}).build().digest,
        fs.Task.from_csv(tmp_path / "clients.csv", **keys | {"target": rest}).build().digest,
        fs.Task.from_csv(tmp_path / "clients.csv", **keys | {"target": path}).build().digest,
    }
    assert len(digests) == 1


def test_encodings_of_before_read_booleans_of_a_frame() -> None:
    """In those versions True and False of a CSV file were categories; a frame's became "other"."""
    flag = Encoding(("0", "1"), columns=(Column("flag", categories=("False", "True")),))
    for given in ([True, False], ["True", "False"], [1, 0], ["true", "false"]):
        assert flag.apply({"flag": given}).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert flag.apply({"flag": ["maybe"]}).tolist() == [[0, 0, 1]]  # control
    number = Encoding(("0", "1"), columns=(Column("flag", mean=0.5, sd=0.5),))
    for given in ([True, False], ["True", "False"], [1, 0]):
        assert number.apply({"flag": given}).tolist() == [[1], [-1]]
    with pytest.raises(fs.InputError, match='holds "maybe"; it is a column of numbers'):
        number.apply({"flag": ["maybe"]})
