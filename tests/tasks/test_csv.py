"""`fedshift.Task.from_csv`: real-world files are read rightly, or refused with a cure."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift as fs
from fedshift.errors import DataError, InputError
from fedshift.tasks.encoding import Encoding

CLIENTS = ("east", "north", "south", "west")


def patients(n: int = 200) -> pd.DataFrame:
    """A table of hospitals with an age, a dose with decimals, a ward and an outcome."""
    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "hospital": np.array(CLIENTS)[np.arange(n) % 4],
            "age": rng.integers(20, 90, n),
            "dose": rng.normal(2.0, 0.5, n).round(3),
            "ward": np.array(["A", "B", "Kinderklinik Köln"])[rng.integers(0, 3, n)],
            "outcome": np.array(["good", "poor"])[rng.integers(0, 2, n)],
        }
    )


def written(folder: Path, frame: pd.DataFrame, **options: Any) -> Path:
    path = folder / "patients.csv"
    frame.to_csv(path, index=False, **options)
    return path


def read(path: Path, **options: Any) -> fs.Task:
    given: dict[str, Any] = {"client": "hospital", "label": "outcome", "target": "north"}
    return fs.Task.from_csv(path, **given | options)


def test_columns_are_standardised_by_the_clients_pooled_sums(tmp_path: Path) -> None:
    frame = patients()
    task = read(written(tmp_path, frame))
    built = task.build()
    x = torch.cat([c.x for c in built.task.clients])
    assert task.input_shape == (2 + 3 + 1,)
    assert x[:, :2].mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert x[:, :2].std(0, correction=0).tolist() == pytest.approx([1, 1], abs=1e-5)
    assert torch.equal(x[:, 2:].sum(1), torch.ones(len(x)))
    assert [c.name for c in built.encoding.columns] == ["age", "dose", "ward"]
    assert built.encoding.columns[2].categories == ("A", "B", "Kinderklinik Köln")
    assert task.name == "patients"


def test_raw_rows_are_encoded_as_the_tasks_were(tmp_path: Path) -> None:
    frame = patients()
    built = read(written(tmp_path, frame)).build()
    north = frame[frame.hospital == "north"]
    again = Encoding.from_json(built.encoding.to_json())
    assert again == built.encoding
    rows = north.to_dict("records")
    for raw in (north, {name: north[name].to_numpy() for name in north}, rows):
        assert torch.equal(again.apply(raw), built.task.test.x)
    assert torch.equal(again.apply(rows[0]), built.task.test.x[:1])
    with pytest.raises(InputError, match='no column "dose"'):
        again.apply(north.drop(columns="dose"))
    with pytest.raises(InputError, match='column "age" holds "old"'):
        again.apply(rows[0] | {"age": "old"})


@pytest.mark.parametrize(
    "options",
    [
        {"sep": ";"},
        {"sep": "\t"},
        {"sep": "|"},
        {"sep": ";", "decimal": ","},
        {"encoding": "utf-8-sig"},
        {"encoding": "cp1252"},
        {"encoding": "utf-16"},
        {"quoting": 1},
        {"sep": " "},
    ],
    ids=str,
)
def test_another_way_of_writing_is_the_same_task(tmp_path: Path, options: Any) -> None:
    frame = patients()
    plain = read(written(tmp_path, frame)).build()
    other = read(written(tmp_path, frame, **options)).build()
    assert other.digest == plain.digest
    assert other.encoding == plain.encoding


def test_a_frame_is_the_same_task(tmp_path: Path) -> None:
    frame = patients()
    frame["dose"] = frame["dose"].astype(np.float32)
    names = {"client": "hospital", "label": "outcome", "target": "north"}
    built = fs.Task.from_frame(frame, name="patients", **names).build()
    assert built.digest == read(written(tmp_path, frame)).build().digest
    texts = frame.astype({"age": str})
    assert fs.Task.from_frame(texts, name="patients", **names).build().digest == built.digest


def test_thousands_in_files_with_decimal_commas(tmp_path: Path) -> None:
    frame = patients()
    frame["cost"] = [f"{i % 7 + 1}.{i + 100},5" for i in range(len(frame))]
    built = read(written(tmp_path, frame, sep=";", decimal=",")).build()
    costs = built.encoding.columns[3]
    expected = [(i % 7 + 1) * 1000 + i + 100.5 for i in range(200) if i % 4 != 1]
    assert costs.name == "cost"
    assert costs.mean == pytest.approx(np.mean(expected), rel=0.05)


def german(text: str) -> str:
    """1,234.5 as 1.234,5."""
    return text.translate(str.maketrans(",.", ".,"))


@pytest.mark.few(6)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("sep", "write"),
    [
        (",", "{:,}"), ("\t", "{:,}"), (";", "{:,}"), (",", "{:.1f}"), (";", german),
        (",", german),
    ],
    ids=lambda value: getattr(value, "__name__", value),  # workers see the same names
)  # fmt: skip
def test_signs_within_numbers(tmp_path: Path, sep: str, write: Any, missing: bool) -> None:
    """Commas between thousands, and decimal commas, also where "?" stands for some numbers.

    Control: the same numbers without any sign in them.
    """
    frame = patients()
    costs = [i % 7 * 1000 + i + 100.5 for i in range(len(frame))]
    written_as = (lambda v: german(f"{v:,}")) if write is german else write.format
    built = []
    for of in (written_as, str):
        frame["cost"] = ["?" if missing and i % 9 == 0 else of(v) for i, v in enumerate(costs)]
        decimal = "," if write is german and of is written_as else "."
        built.append(read(written(tmp_path, frame, sep=sep, decimal=decimal, quoting=0)).build())
    assert built[0].encoding == built[1].encoding
    assert built[0].digest == built[1].digest
    note = "a decimal comma" if write is german else "commas between thousands"
    assert (note in built[0].notes[0]) == (write != "{:.1f}")
    assert note not in built[1].notes[0]


def test_missing_values_get_the_mean_and_a_column_of_their_own(tmp_path: Path) -> None:
    frame = patients().astype({"age": object})
    frame.loc[frame.index[:40], "age"] = None
    frame.loc[frame.index[10:30], "ward"] = None
    path = written(tmp_path, frame)
    built = read(path).build()
    age, dose, ward = built.encoding.columns
    assert (age.indicator, dose.indicator, ward.indicator) == (True, False, True)
    x = built.encoding.apply([{"age": None, "dose": dose.mean, "ward": None}])
    assert x[0].tolist() == pytest.approx([0, 1, 0, 0, 0, 0, 0, 1], abs=1e-6)
    with pytest.raises(InputError, match=r'column "age" has no value in \d+ rows; fill them in'):
        read(path, missing="refuse").build()


def test_marks_of_missing_numbers_are_named(tmp_path: Path) -> None:
    frame = patients().astype({"age": object})
    frame.loc[[3, 8], "age"] = "?"
    built = read(written(tmp_path, frame)).build()
    assert 'Column "age": "?" stands for a missing number, 2 times.' in built.notes
    frame.loc[8, "age"] = "old"
    with pytest.raises(InputError, match='column "age" holds numbers and "old"; empty that cell'):
        read(written(tmp_path, frame))


def test_text_far_down_a_column_of_numbers(tmp_path: Path) -> None:
    frame = patients(3000).astype({"age": object})
    frame.loc[2500, "age"] = "old"
    with pytest.raises(InputError, match='column "age" holds numbers and "old"'):
        read(written(tmp_path, frame))
    task = read(written(tmp_path, frame), categories=["age"])
    assert "old" in (task.build().encoding.columns[0].categories or ())


def test_columns_that_teach_nothing_are_left_out_and_named(tmp_path: Path) -> None:
    frame = patients()
    frame.insert(0, "", range(len(frame)))
    frame["constant"] = 7.0
    frame["same"] = "yes"
    frame["empty"] = np.nan
    frame["patient_id"] = np.arange(len(frame)) * 7 + 10**9
    frame["name"] = [f"Person {i}" for i in range(len(frame))]
    built = read(written(tmp_path, frame)).build()
    assert [c.name for c in built.encoding.columns] == ["age", "dose", "ward"]
    notes = " ".join(built.notes)
    for sentence in (
        'Column "unnamed: 0" numbers the rows',
        'Column "constant" is constant',
        'Column "same" is constant',
        'Column "empty" is empty',
        'Column "patient_id" numbers the rows',
        'Column "name" holds 12',
    ):
        assert sentence in notes
    assert 'categories=["name"] encodes it' in notes


def test_row_numbers_by_another_name_are_learned_from_with_a_note(tmp_path: Path) -> None:
    """Controls: numbers of which one comes twice, halves, and the column dropped."""
    frame = patients()
    frame["serial"] = np.arange(len(frame)) + 10_000
    frame["twice"] = frame["serial"] // 2
    frame["half"] = frame["serial"] + 0.5
    path = written(tmp_path, frame)
    text = str(read(path))
    assert 'Column "serial" holds another whole number in every row' in text
    assert 'If these are such, give drop=["serial"].' in text
    assert '"twice"' not in text
    assert '"half"' not in text
    assert "another whole number" not in str(read(path, drop=["serial"]))


def test_columns_are_chosen_and_dropped(tmp_path: Path) -> None:
    path = written(tmp_path, patients())
    only = read(path, columns=["age"]).build()
    assert [c.name for c in only.encoding.columns] == ["age"]
    rest = read(path, drop=["age"]).build()
    assert [c.name for c in rest.encoding.columns] == ["dose", "ward"]


def test_an_unknown_category_at_the_target_is_other(tmp_path: Path) -> None:
    frame = patients()
    north = frame.index[frame.hospital == "north"]
    frame.loc[north[:5], "ward"] = "C"
    built = read(written(tmp_path, frame)).build()
    assert 'Column "ward": 5 values outside training are none of its' in " ".join(built.notes)
    assert built.task.test.x[:5, -1].tolist() == [1] * 5


def changed(frame: pd.DataFrame, where: Any) -> pd.DataFrame:
    """Numbers that are huge, missing or marked, and new categories, in some rows."""
    frame = frame.astype({"age": object, "ward": object})
    rows = frame.index[where]
    frame.loc[rows, "dose"] = 4e9 + np.arange(len(rows)) / 8
    frame.loc[rows[:9], "dose"] = np.nan
    frame.loc[rows, "age"] = 2**40 + 1
    frame.loc[rows[:20], "age"] = "?"
    frame.loc[rows, "ward"] = [f"ward {i}" for i in range(len(rows))]
    return frame


@pytest.mark.parametrize("from_file", [True, False])
def test_the_targets_rows_change_nothing_that_is_trained_on(
    tmp_path: Path, from_file: bool
) -> None:
    """Control: those of a client do."""
    frame = patients(2000)
    frame["dose"] += 1e5 * np.pi  # so that it is not the same in 32 bits

    def built(given: pd.DataFrame) -> Any:
        names = {"client": "hospital", "label": "outcome", "target": "north"}
        if from_file:
            return read(written(tmp_path, given)).build()
        return fs.Task.from_frame(given, **names).build()

    before = built(frame)
    after, control = (built(changed(frame, frame.hospital == n)) for n in ("north", "west"))
    assert after.encoding == before.encoding != control.encoding
    for name in ("clients", "validation"):
        for one, two in zip(getattr(before.task, name), getattr(after.task, name), strict=True):
            assert torch.equal(one.x, two.x)
            assert torch.equal(one.y, two.y)
    assert not torch.equal(before.task.test.x, after.task.test.x)
    assert before.encoding.columns[1].wide


def test_a_test_set_in_a_file_of_its_own(tmp_path: Path) -> None:
    frame = patients()
    there = frame.hospital == "north"
    path = written(tmp_path, frame[~there])
    frame[there].drop(columns="hospital").to_csv(tmp_path / "test.csv", index=False)
    built = read(path, target=str(tmp_path / "test.csv")).build()
    held_out = read(written(tmp_path, frame)).build()
    assert torch.equal(built.task.test.x, held_out.task.test.x)
    assert built.encoding == held_out.encoding


def test_labels_of_one_client_alone_and_a_client_of_one_row(tmp_path: Path) -> None:
    frame = patients()
    frame.loc[frame.index[frame.hospital == "west"][:9], "outcome"] = "odd"
    frame.loc[0, "hospital"] = "lone"
    notes = " ".join(read(written(tmp_path, frame)).build().notes)
    assert "Labels of one client alone: odd" in notes
    assert "less than 2 rows: lone" in notes


def spoilt(folder: Path, text: str | bytes) -> Path:
    path = folder / "patients.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


ROWS = "hospital,age,outcome\na,1,x\nb,2,y\na,3,y\nb,4,x\n"


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


@pytest.mark.parametrize("word", ["None", "NA", "null"])
def test_words_that_count_as_no_label_are_named(tmp_path: Path, word: str) -> None:
    """The control has another word, and an empty cell, of which nothing is noted."""
    frame = patients()
    frame["outcome"] = np.array([word, "mild", "severe"])[np.arange(200) % 3]
    sentence = f'Column "outcome": "{word}" (67 rows) counts as a missing value; if it is meant'
    notes = read(written(tmp_path, frame)).notes
    assert any(note.startswith(sentence) for note in notes)
    assert read(written(tmp_path, frame.replace(word, "no"))).classes == ("mild", "no", "severe")
    for control in ("no", ""):
        notes = read(written(tmp_path, frame.replace(word, control))).notes
        assert "counts as a missing value" not in " ".join(notes)


def test_a_word_that_counts_as_no_client_is_named(tmp_path: Path) -> None:
    frame = patients().replace("south", "NA")
    notes = read(written(tmp_path, frame)).notes
    assert any('"hospital": "NA" (50 rows) counts as a missing value' in note for note in notes)


def test_names_that_differ_by_case_or_spaces_are_noted(tmp_path: Path) -> None:
    """Of labels, clients and categories. Spaces around a name are dropped in silence."""
    frame = patients()
    assert "differ by case" not in " ".join(read(written(tmp_path, frame)).build().notes)
    frame.loc[::7, "outcome"] = frame.loc[::7, "outcome"].str.upper()
    frame.loc[::5, "hospital"] = frame.loc[::5, "hospital"] + " "
    frame.loc[1::20, "hospital"] = "North"
    frame.loc[frame.ward.str.contains(" "), "ward"] = "A  B"
    frame.loc[::9, "ward"] = "a b"
    notes = read(written(tmp_path, frame)).build().notes
    how = "that differ by case or spaces alone:"
    assert f"Labels {how} GOOD, POOR, good, poor. Write each in one way." in notes
    assert f"Clients {how} North, north. Write each in one way." in notes
    assert f'Column "ward": categories {how} A  B, a b. Write each in one way.' in notes


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%Y-%m-%d", "%Y-%m-%d %H:%M:%S"])
def test_dates_that_count_as_names_are_noted(tmp_path: Path, form: str) -> None:
    """Once, whether a file or a frame has them. Control: months of a year."""
    frame, names = patients(), {"client": "hospital", "label": "outcome", "target": "north"}
    days = pd.Series(pd.date_range("2024-01-01", periods=200, freq="D"))[np.arange(200) % 9 * 20]
    frame["visit"] = days.to_numpy()
    begin = 'Column "visit" holds dates, which count as names; give numbers'
    tasks = [fs.Task.from_frame(frame, **names)]
    frame["visit"] = days.dt.strftime(form).to_numpy()
    tasks += [read(written(tmp_path, frame)), fs.Task.from_frame(frame, **names)]
    assert [sum(n.startswith(begin) for n in task.build().notes) for task in tasks] == [1, 1, 1]
    frame["visit"] = days.dt.strftime("%B").to_numpy()
    assert "dates" not in " ".join(read(written(tmp_path, frame)).build().notes)


def test_classes_that_no_row_has_are_noted(tmp_path: Path) -> None:
    path = written(tmp_path, patients())
    notes = read(path, classes=["poor", "good", "fair"]).build().notes
    assert "Classes that no row has: fair." in notes
    assert "no row has" not in " ".join(read(path, classes=["poor", "good"]).build().notes)


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


def test_columns_that_the_target_does_not_have_are_noted(tmp_path: Path) -> None:
    """Also in the file of a test set. Control: one value is there."""
    for column in ("dose", "ward"):
        frame = patients()
        frame.loc[(frame.hospital == "north") & (frame.index > 1), column] = np.nan
        path, note = written(tmp_path, frame), f'Column "{column}" has no value in any row of the t'
        assert not any(note in n for n in read(path).build().notes)
        frame.loc[frame.hospital == "north", column] = np.nan
        assert any(note in n for n in read(written(tmp_path, frame)).build().notes)


def test_rows_unlike_those_of_training_are_warned_of(tmp_path: Path) -> None:
    """Categories by other names, and columns without a value. Controls: rows as they were."""
    frame = patients()
    encoding = read(written(tmp_path, frame)).build().encoding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoding.apply(frame)
        encoding.apply(frame.assign(age=frame.age.where(frame.index > 3)))
        encoding.apply(frame.iloc[:0])
    for column, value, what in (
        ("ward", "b", 'values, such as "b", are none of the categories .A, B, Kinderklinik Köln.'),
        ("ward", None, "no value in any row, which counts as .other."),
        ("age", np.nan, "no value in any row; the mean of training stands for it"),
    ):
        what = what.replace("categories .", "categories that training had .")
        with pytest.warns(UserWarning, match=f'Column "{column}".*{what}'):
            encoding.apply(frame.assign(**{column: value}))


def test_marks_of_missing_numbers_are_read_in_prediction_too(tmp_path: Path) -> None:
    frame = patients().astype({"age": object})
    frame.loc[::9, "age"] = "?"
    encoding = read(written(tmp_path, frame)).build().encoding
    empty = frame.assign(age=pd.to_numeric(frame.age, errors="coerce"))
    assert torch.equal(encoding.apply(frame), encoding.apply(empty))
    with pytest.raises(InputError, match='holds "11,5"; .* give one with a decimal point'):
        encoding.apply(frame.assign(age="11,5"))
    with pytest.raises(InputError, match="give the rows, as pd.read_csv"):
        encoding.apply("patients.csv")


def test_lines_above_the_names_of_columns(tmp_path: Path) -> None:
    built = read(spoilt(tmp_path, f"Export of May\n\n{ROWS}"), target="b").build()
    assert "Read with 2 lines above the names of columns." in built.notes
    assert len(built.task.test) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, patients())
    with pytest.raises(InputError, match='there is no file .* Did you mean "patients.csv"?'):
        read(tmp_path / "patient.csv")
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path)


def test_a_file_without_header_and_one_that_is_packed(tmp_path: Path) -> None:
    frame = patients()
    plain = read(written(tmp_path, frame)).build()
    other = read(written(tmp_path, frame, header=False), header=list(frame.columns)).build()
    assert other.digest == plain.digest
    frame.to_csv(tmp_path / "patients.csv.gz", index=False)
    assert read(tmp_path / "patients.csv.gz").build().encoding == plain.encoding


def test_long_numbers_of_clients_stay_apart(tmp_path: Path) -> None:
    frame = patients()
    frame["hospital"] = frame["hospital"].map(
        dict(zip(CLIENTS, [f"1234567890123456{i}" for i in range(4)], strict=True))
    )
    task = read(written(tmp_path, frame), target="12345678901234561")
    assert task.clients == tuple(f"1234567890123456{i}" for i in (0, 2, 3))


def test_zeros_of_clients_names_are_kept(tmp_path: Path) -> None:
    """ "01" and "1" are two clients. Whole numbers with a point are those without, as in frames."""
    frame = patients()
    for names, expected in (
        (["01", "1", "0002", "3"], ("01", "0002", "3")),
        (["1.0", "1", "2.0", "1.50"], ("1.50", "2")),
    ):
        frame["hospital"] = np.array(names)[np.arange(200) % 4]
        path = written(tmp_path, frame)
        assert read(path, target="1").clients == expected
    numbers = frame.assign(hospital=np.array([1, 2, 3, np.nan])[np.arange(200) % 4])
    given = {"client": "hospital", "label": "outcome", "target": 3, "name": "patients"}
    frames = fs.Task.from_frame(numbers, **given).build()
    assert read(written(tmp_path, numbers), target=3).build().digest == frames.digest


def test_long_numbers_of_labels_and_of_clients_in_frames_stay_apart(tmp_path: Path) -> None:
    """As codes of SNOMED CT. Control: short ones are numbers, with and without a point."""
    frame, codes = patients(), [999000071000000100 + i for i in range(4)]
    frame["outcome"] = np.array(codes)[np.arange(200) % 3]
    names = {"client": "hospital", "label": "outcome", "target": "north", "name": "patients"}
    expected = tuple(map(str, codes[:3]))
    path = written(tmp_path, frame)
    assert read(path).classes == fs.Task.from_frame(frame, **names).classes == expected
    assert read(path).build().digest == fs.Task.from_frame(frame, **names).build().digest
    frame["hospital"] = np.array(codes)[np.arange(200) % 4]
    for task in (
        read(written(tmp_path, frame), target=codes[3]),
        fs.Task.from_frame(frame, **names | {"target": codes[3]}),
    ):
        assert task.clients == expected
    frame["outcome"] = np.array(["7", "7.0", "8"])[np.arange(200) % 3]
    assert read(written(tmp_path, frame), target=codes[3]).classes == ("7", "8")


def test_what_parquet_needs_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r'pip install "fedshift\[parquet\]"'):
            fs.Task.from_parquet(tmp_path / "a.parquet", client="a", label="b", target="c")
        return
    frame = patients()
    frame.to_parquet(tmp_path / "patients.parquet")
    names = {"client": "hospital", "label": "outcome", "target": "north"}
    built = fs.Task.from_parquet(tmp_path / "patients.parquet", **names).build()
    assert built.encoding == fs.Task.from_frame(frame, **names).build().encoding


def test_the_targets_rows_in_parquet_round_nothing(tmp_path: Path) -> None:
    """Clients have numbers that float32 would change, the target only ones that it would not."""
    pytest.importorskip("pyarrow")
    frame = patients()
    frame["large"] = 1e6 + np.arange(200) % 7 / 100
    names = {"client": "hospital", "label": "outcome", "target": "north"}
    seen = []
    for value in (1e6, 0.0):
        frame.loc[frame.hospital == "north", "large"] = value
        frame.to_parquet(tmp_path / "patients.parquet")
        built = fs.Task.from_parquet(tmp_path / "patients.parquet", **names).build()
        seen.append(torch.cat([c.x for c in built.task.clients]))
    assert torch.equal(*seen)


def test_large_numbers_that_differ_by_little_keep_their_digits(tmp_path: Path) -> None:
    frame = patients()
    frame["second"] = 1.7e9 + np.arange(200) % 7 + 0.25
    built = read(written(tmp_path, frame)).build()
    x = built.encoding.apply(frame)[:, -1]
    assert len(x.unique()) == 7
    assert built.encoding.columns[-1].sd == pytest.approx(2.0, abs=0.1)
    assert torch.equal(built.encoding.apply(frame.iloc[:1]), built.encoding.apply(frame)[:1])


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


def test_a_column_of_missing_whole_numbers_is_no_client() -> None:
    frame = patients()
    frame["hospital"] = pd.array([None] * len(frame), dtype="Int64")
    with pytest.raises(InputError, match="client is empty in every row"):
        fs.Task.from_frame(frame, client="hospital", label="outcome", target="pooled")


def test_a_name_of_zeros_and_a_single_column_are_what_a_user_means(tmp_path: Path) -> None:
    """Controls: the whole name, and a list of the column."""
    path = tmp_path / "t.csv"
    rows = "".join(f"0{i % 3},{i},{i * i % 7},{i % 2}\n" for i in range(30))
    path.write_text(f"ward,x,xx,y\n{rows}")

    def task(**given: Any) -> fs.Task:
        return fs.Task.from_csv(path, client="ward", label="y", **{"target": "02"} | given)

    with pytest.raises(InputError, match='target="2" is no client; .* Did you mean "02"?'):
        task(target=2)
    assert task().clients == ("00", "01")
    for given in ({"drop": "xx"}, {"columns": "x"}):
        (option, name), *_ = given.items()
        assert names_learned(task(**given)) == names_learned(task(**{option: [name]})) == ["x"]


def names_learned(task: fs.Task) -> list[str]:
    return [column.name for column in task.build().encoding.columns]
