"""`fedshift.Task.from_csv`: real-world files are read rightly."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedshift as fs
from fedshift.errors import InputError
from fedshift.tasks.encoding import Encoding
from support.patients import ROWS, patients, read, spoilt, written


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


def test_a_file_without_header_and_one_that_is_packed(tmp_path: Path) -> None:
    frame = patients()
    plain = read(written(tmp_path, frame)).build()
    other = read(written(tmp_path, frame, header=False), header=list(frame.columns)).build()
    assert other.digest == plain.digest
    frame.to_csv(tmp_path / "patients.csv.gz", index=False)
    assert read(tmp_path / "patients.csv.gz").build().encoding == plain.encoding


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
