"""Pickled tables are read without pandas, and nothing that they name is run."""

from __future__ import annotations

import io
import lzma
import struct
from pathlib import Path

import numpy as np
import pytest

from fedshift.datasets import pickled_tables, safe_pickle
from fedshift.datasets.pickled_tables import load_columns, load_object
from fedshift.errors import DataError
from support.damage import Reader, fuzz_file
from support.pickled import block, dtype, named, numbers, objects, packed, small_table, table, text


def test_a_table_of_numbers_and_texts(tmp_path: Path) -> None:
    columns = load_columns(packed(tmp_path / "a.pkl", small_table()))
    assert {name: list(values) for name, values in columns.items()} == {
        "x": [0.5, 1.5], "g": ["a", "b"], "y": [2.5, 3.5],
    }  # fmt: skip
    assert list(columns) == ["x", "g", "y"]


CALLS = {
    "a command": named("posix", "system") + text("touch MARK") + b"\x85R.",
    "an expression": named("builtins", "eval") + text("open('MARK', 'w')") + b"\x85R.",
    "another file": named("pandas", "read_pickle") + text("MARK") + b"\x85R.",
    "a memory": named("numpy", "memmap") + text("MARK") + text("u1") + text("w+") + b"\x87R.",
    "a way inside": b"\x80\x04" + text("builtins") + text("slice.__class__") + b"\x93.",
    "a method of a table": b"\x80\x04" + text("pandas.core.frame") + text("DataFrame.eval")
    + b"\x93.",
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_nothing_that_a_pickle_names_is_run(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = packed(tmp_path / "a.pkl", CALLS[case])
    with pytest.raises(DataError, match=r"the pickle asks for .* Nothing was run"):
        load_columns(path)
    header = b"\x93NUMPY\x01\x00\x01\x00\n"
    (tmp_path / "a.npy").write_bytes(header + CALLS[case])
    with pytest.raises(DataError, match=r"Nothing was run"):
        load_object(tmp_path / "a.npy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "a.pkl"]


X = numbers(bytes(16), (1, 2))
FORGED = {
    "no table": (text("x") + b".", "holds no table"),
    "a table without columns": (
        named("pandas.core.frame", "DataFrame") + b")\x81.", "holds no table"
    ),
    "a shape": (table(["x"], block(numbers(bytes(16), (1 << 30, 2)), 0, 1)), "comes with 2 values"),
    "a negative shape": (
        table(["x"], block(numbers(bytes(16), (-1, 2)), 0, 1)), "impossible shape (-1, 2)"
    ),
    "a type": (table(["x"], block(numbers(bytes(16), (1, 2), "V8"), 0, 1)), "array of type 'V8'"),
    "a column too many": (table(["x"], block(X, 0, 1), block(X, 1, 2)), "ValueError"),
    "a column too few": (table(["x", "y"], block(X, 0, 1)), "columns are incomplete"),
    "other lengths": (
        table(["x", "y"], block(X, 0, 1), block(objects(["a"], (1, 1)), 1, 2)), "unequal length"
    ),
    "another state": (
        named("pandas.core.frame", "DataFrame") + b")\x81}b.", "not that of pandas 1.3 to 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_forged_tables_are_refused(tmp_path: Path, case: str) -> None:
    stream, message = FORGED[case]
    path = packed(tmp_path / "a.pkl", stream)
    with pytest.raises(DataError) as refused:
        load_columns(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


def test_a_large_archive_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_tables, "LARGEST", 100)
    with pytest.raises(DataError, match="not a complete pickle"):
        load_columns(packed(tmp_path / "a.pkl", small_table()))


def test_an_object_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    content = {"x": [np.arange(6.0).reshape(2, 3)], "y": np.array([1, 2]), "names": ["a", "b"]}
    np.save(path, np.array(content, dtype=object), allow_pickle=True)
    whole = load_object(path)
    assert whole["x"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert whole["y"].tolist() == [1, 2]
    assert whole["names"] == ["a", "b"]


def test_arrays_in_another_byte_order_are_refused(tmp_path: Path) -> None:
    swapped = dtype("f8").replace(text("<"), text(">"))
    with pytest.raises(DataError, match="not little-endian"):
        load_columns(packed(tmp_path / "a.pkl", b"\x80\x05" + swapped + b"."))


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")
def test_damaged_tables_are_refused_in_one_message(tmp_path: Path) -> None:
    """The pickle inside is damaged; xz itself would see most damage by its checksum."""
    path = tmp_path / "a.pkl"
    path.write_bytes(small_table())

    def read() -> None:
        stream = io.BytesIO(path.read_bytes())
        safe_pickle.load(path, pickled_tables.stand_in, lambda _: stream, protocol=5)

    fuzzed = fuzz_file(Reader("table", path, read), 150, seed=0)
    assert fuzzed.broken == ()
    assert fuzzed.refused > 50
    path.write_bytes(lzma.compress(small_table()))
    fuzzed = fuzz_file(Reader("xz", path, lambda: load_columns(path)), 50, seed=0)
    assert fuzzed.broken == ()


def test_lengths_of_byte_arrays_are_checked_before_they_are_read(tmp_path: Path) -> None:
    stream = small_table().replace(b"\x96" + struct.pack("<Q", 16), b"\x96" + b"\xff" * 8)
    assert stream != small_table()
    with pytest.raises(DataError, match="not a complete pickle"):
        load_columns(packed(tmp_path / "a.pkl", stream))
