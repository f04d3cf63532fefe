"""Names in CSV files: of clients, labels and categories that look like numbers or dates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedshift as fs
from fedshift.errors import InputError
from support.patients import CLIENTS, patients, read, written


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
