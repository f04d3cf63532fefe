"""CSV files and targets that cannot be meant are refused in one sentence, with a cure."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshift as fs
from fedshift.errors import DataError, InputError
from support.patients import ROWS, patients, read, spoilt, written


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "patients.csv is empty; its first line must name the columns"),
        ('""\n', {}, "patients.csv is empty; its first line must name the columns"),
        ("hospital,age,outcome\n", {}, "names columns and has no rows"),
        (ROWS, {"client": "hospitl"}, 'no column "hospitl"; .* Did you mean "hospital"?'),
        (ROWS, {"label": "outcom"}, 'no column "outcom"; .* Did you mean "outcome"?'),
        (ROWS, {"drop": ["agee"]}, 'no column "agee"; .* Did you mean "age"?'),
        (ROWS, {"label": "hospital"}, 'client and label are both "hospital"'),
        (ROWS, {"drop": ["age"]}, "no column is left to learn from"),
        (ROWS.partition("\n")[2], {}, "first line looks like data: give header="),
        ("age,age,hospital,outcome\n1,2,a,x\n", {}, '2 columns are named "age"; give each its'),
        (ROWS + "a,5\n", {}, "line 6: 2 cells; the first line names 3 columns, with a comma"),
        (ROWS + "b,5,y\n" * 300 + "a,5,x,7\n", {}, "Expected 3 fields in line 306, saw 4; look"),
        (ROWS + "b,5,y\n" * 300 + 'a,"5,x\n', {}, "EOF inside string"),
        (ROWS + "b,5,y\n" * 300 + "a,5\n", {}, "line 306: 2 cells for 3 columns; complete that"),
        (ROWS + "b,5,y\n" * 300 + "a,5\n", {"drop": ["age"]}, "line 306: 2 cells for 3 columns"),
        (
            ROWS,
            {"header": ["hospital", "age", "outcome"]},
            "line 1 names the columns, and he",
        ),
        (
            ROWS,
            {"header": ["outcome", "age", "hospital"]},
            "line 1 names the columns, and he",
        ),
        (ROWS, {"drop": ["outcome"]}, '^drop names "outcome", which is the label: it is read, and'),
        (ROWS, {"columns": ["age", "hospital"]}, '^columns names "hospital", which is the client'),
        (
            ROWS,
            {"columns": ["age"], "drop": ["age"]},
            '^columns and drop both name "age"; ',
        ),
        (ROWS, {"kind": "multilabel"}, "one label column, of 2 classes .x, y.; give label= a list"),
        (b"PK\x03\x04......", {}, "no CSV file but a packed table; save it as CSV"),
        (ROWS, {"encoding": "utf-99"}, 'not utf-99; give its encoding="..."'),
        (ROWS, {"separator": ";;"}, 'separator=";;": give one sign'),
        (ROWS, {"target": "c"}, 'target="c" is no client; there are a, b'),
        (ROWS.replace(",x", ",").replace(",y", ","), {"target": "a"}, "y has 0 classes"),
    ],
)
def test_refused_in_one_sentence(
    tmp_path: Path, text: str | bytes, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(spoilt(tmp_path, text), **{"target": "b"} | options)


def test_empty_cells_are_no_short_line(tmp_path: Path) -> None:
    """Control of the refusals above: the last cells are empty, and so are whole lines."""
    text = ROWS.replace("age,outcome", "outcome,age") + "\n  \nb,x,\n" + "b,y,5\n" * 300 + "a,x,\n"
    rows = [row.replace("1,x", "x,1").replace("2,y", "y,2") for row in text.split("\n")]
    task = read(spoilt(tmp_path, "\n".join(rows[:3] + rows[5:])), target="b")
    assert len(task.places.codes) == 304


def test_a_target_without_labels_is_refused_with_a_cure(tmp_path: Path) -> None:
    frame = patients()
    frame.loc[frame.hospital == "north", "outcome"] = None
    with pytest.raises(InputError, match="a label to test on; to estimate its accuracy, give"):
        read(written(tmp_path, frame))
    shares = {"good": 0.5, "poor": 0.5}
    assert read(written(tmp_path, frame), target=shares).clients == ("east", "south", "west")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "outcome",
            ["1", "0"],
            "target: its labels .0, 1. are none of the clients' .good, poor.; ",
        ),
        ("outcome", ["Poor", "Good"], "target: its labels .Good, Poor. are none of the clients'"),
        ("outcome", [None], "target: its rows have no label to test on; to estimate the accuracy"),
    ],
)
def test_labels_of_a_test_set_that_cannot_be_meant(
    tmp_path: Path, column: str, value: list[Any], message: str
) -> None:
    """Control: one label of the clients is among them."""
    frame, test = patients(), patients(40).drop(columns="hospital")
    names, file = {"client": "hospital", "label": "outcome"}, tmp_path / "test.csv"
    test[column] = np.resize(np.array(value, dtype=object), 40)
    test.to_csv(file, index=False)
    for target in (str(file), test):
        with pytest.raises(InputError, match=message):
            read(written(tmp_path, frame), target=target)
    test.loc[3, column] = "good"
    assert "good" in fs.Task.from_frame(frame, **names, target=test).classes


def test_the_table_itself_is_no_target(tmp_path: Path) -> None:
    """By whatever name. Control: a copy of the file."""
    path = written(tmp_path, patients())
    with pytest.raises(InputError, match='is the table itself, whose rows train; give "pooled"'):
        read(path, target=str(tmp_path / "." / path.name))
    copy = tmp_path / "copy.csv"
    copy.write_bytes(path.read_bytes())
    assert len(read(path, target=str(copy)).build().task.test) == 200


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, patients())
    with pytest.raises(InputError, match='there is no file .* Did you mean "patients.csv"?'):
        read(tmp_path / "patient.csv")
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path)


@pytest.mark.parametrize("value", ["1e300", "1.797e308", "inf"])
def test_numbers_beyond_32_bits_are_named_by_column_and_row(value: str, tmp_path: Path) -> None:
    """Control: 1e30 is read."""
    for cell, fits in ((value, False), ("1e30", True)):
        rows = ["a,x,1.5", f"b,y,{cell}", "a,y,2.5", "b,x,3.5", "c,x,1", "c,y,2"]
        path = tmp_path / "t.csv"
        path.write_text("\n".join(["client,label,size", *rows]) + "\n")
        with contextlib.ExitStack() as stack:
            if not fits:
                why = 'column "size" holds infinity, or a number beyond 3.4e38, in row 2'
                stack.enter_context(pytest.raises(InputError, match=why))
            fs.Task.from_csv(path, client="client", label="label", target="c")


def test_a_last_column_that_is_dropped_may_hold_anything(tmp_path: Path) -> None:
    """Its short lines are still refused. Control: the column is refused where it is read."""
    path, few = tmp_path / "t.csv", 300
    rows = [f"{'abc'[i % 3]},{'xy'[i % 2]},{i},1e300" for i in range(few)]
    names = {"client": "client", "label": "label", "target": "c"}
    path.write_text("\n".join(["client,label,size,last", *rows]) + "\n")
    assert fs.Task.from_csv(path, **names, drop=["last"]).clients == ("a", "b")
    with pytest.raises(InputError, match="beyond 3.4e38"):
        fs.Task.from_csv(path, **names)
    path.write_text("\n".join(["client,label,size,last", *rows, "a,x,1"]) + "\n")
    with pytest.raises(DataError, match=f"line {few + 2}: 3 cells for 4 columns"):
        fs.Task.from_csv(path, **names, drop=["last"])


@pytest.mark.parametrize("text", ["plain", '"a, b"', '"two\nlines"', '"a ""word"", two"'])
def test_lengths_of_lines_are_counted_outside_quotes(text: str, tmp_path: Path) -> None:
    """A file cut short is refused however its cells are quoted, and others are read."""
    path = tmp_path / "t.csv"
    rows = [f"{'abc'[i % 3]},{'xy'[i % 2]},{text},{i if i % 5 else ''}" for i in range(300)]
    names = {"client": "client", "label": "label", "target": "c", "drop": ["text"]}
    path.write_text("\n".join(["client,label,text,size", *rows]) + "\n")
    assert fs.Task.from_csv(path, **names).clients == ("a", "b")
    path.write_text("\n".join(["client,label,text,size", *rows, f"a,x,{text}"]) + "\n")
    with pytest.raises(DataError, match="3 cells for 4 columns"):
        fs.Task.from_csv(path, **names)
