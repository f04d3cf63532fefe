"""Inputs of reports: run folders, label counts and targets; every fault is named and located."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedshift.csv_counts import read_counts, read_target
from fedshift.errors import DataError
from fedshift.record.folder import read_run
from fedshift.report.figures import save_figures
from support.report_fixtures import write_run

# --------------------------------------------------------------------------- run folder


@pytest.mark.parametrize(
    "name", ["summary.json", "metrics.csv", "clients.csv", "lock.json", "config.resolved.toml"]
)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "a")
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"has no {re.escape(name)}: the run did not finish"):
        read_run(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no run folder .*gone; `fedshift run FILE.toml` makes one"
    ):
        read_run(tmp_path / "gone")


DAMAGE = {
    "cut short": ("summary.json", lambda t: t[: len(t) // 2], "EOF while parsing"),
    "not JSON": ("summary.json", lambda t: "x" + t, "Invalid JSON"),
    "NaN": ("summary.json", lambda t: t.replace("0.8125", "NaN", 1), '"final.target_accuracy'),
    "text": ("summary.json", lambda t: t.replace("123.0", '"123"'), r'"ess": Input should be'),
    "no field": ("summary.json", lambda t: t.replace('"why"', '"how"'), '"why": Field required'),
    "short list": ("summary.json", lambda t: t.replace("[1.0, 0.0,", "[1.0,"), '"target" has 2'),
    "negative": ("summary.json", lambda t: t.replace("[0.7,", "[-0.7,"), r'"weights.0": Input'),
    "no column": ("metrics.csv", lambda t: t.replace("ess", "esss"), r'no column "ess".*"esss"'),
    "bad cell": ("metrics.csv", lambda t: t.replace("1.25", "1,25x"), "line 2: 10 cells"),
    "bad number": ("metrics.csv", lambda t: t.replace("1.25", "1.2.5"), 'line 2, column "target_l'),
    "no round": ("metrics.csv", lambda t: t.replace("\n2,", "\n,"), 'line 3, column "round": a n'),
    "fewer clients": ("clients.csv", lambda t: t[: t.rindex("\n3,") + 1], r"3 clients; .*has 4"),
    "other counts": ("clients.csv", lambda t: t.rstrip() + "9\n", 'of client "3" differ'),
    "no label": ("clients.csv", lambda t: t.replace("label_owl", "owl"), 'no column "label_owl"'),
    "lock": ("lock.json", lambda t: t[:-3], "lock.json, line 1:"),
    "no TOML": ("config.resolved.toml", lambda t: t + "\nlr = ", "Invalid value"),
    "no seeds": ("config.resolved.toml", lambda t: "seeds = 5", "a table of seeds is needed"),
    "lock list": ("lock.json", lambda t: "[]", "an object of versions is needed"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    name, harm, message = DAMAGE[case]
    folder = write_run(tmp_path / "a")
    (folder / name).write_text(harm((folder / name).read_text()))
    with pytest.raises(DataError, match=message) as caught:
        read_run(folder)
    assert name in str(caught.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match=r"cannot read .*summary.json"):
        read_run(folder)


def test_a_loss_that_diverged_is_missing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text.replace("1.5", "nan").replace("1.25", "inf"))
    first = read_run(folder).rounds[0]
    assert first.values["train_loss"] is None
    assert first.values["target_loss"] is None
    assert first.values["target_accuracy"] == 0.4375


# --------------------------------------------------------------------------- counts and targets


def saved(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_what_pandas_calls_a_column_without_a_name_is_no_label(tmp_path: Path) -> None:
    counts = read_counts(saved(tmp_path / "a.csv", "Unnamed: 0,cat,dog\n0,1,2\n1,3,4\n"))
    assert (counts.classes, counts.clients) == (("cat", "dog"), ("0", "1"))
    target = saved(tmp_path / "t.csv", "Unnamed: 0,cat,dog\n0,0.25,0.75\n")
    assert read_target(target, counts.classes).tolist() == [0.25, 0.75]


def test_counts_with_and_without_client_names(tmp_path: Path) -> None:
    named = read_counts(saved(tmp_path / "a.csv", '\ufeffclient,cat,dog\nx, 1,2\n\n"y, z",3,4.0\n'))
    assert named.classes == ("cat", "dog")
    assert named.clients == ("x", "y, z")
    assert named.counts.tolist() == [[1, 2], [3, 4]]
    bare = read_counts(saved(tmp_path / "b.csv", "cat,dog\n1,2\n3,4e1\n"))
    assert bare.clients == ("0", "1")
    assert bare.counts.tolist() == [[1, 2], [3, 40]]


def test_targets_in_a_row_or_in_a_column(tmp_path: Path) -> None:
    want = [0.25, 0.5, 0.25]
    for text in (
        "cat,dog,owl\n.25,.5,.25\n",
        "owl,dog,cat\n.25,.5,.25\n",
        "client,cat,dog,owl\ntarget,.25,.5,.25\n",
        "label,value\ncat,0.25\nowl,0.25\ndog,0.5\n",
        "cat,0.25\nowl,0.25\ndog,0.5\n",
    ):
        got = read_target(saved(tmp_path / "t.csv", text), ("cat", "dog", "owl"))
        assert got.tolist() == want, text
    two = read_target(saved(tmp_path / "t.csv", "dog,cat\n0.75,0.25\n"), ("cat", "dog"))
    assert two.tolist() == [0.25, 0.75]


BAD_COUNTS = {
    "": "is empty; the first row must hold the label names",
    "cat,dog\n": "a header and no rows",
    "client\nx\n": "line 1: no label names after the client column",
    "cat,cat\n1,2\n": 'line 1: label "cat" is given 2 times',
    "cat,,dog\n1,2,3\n": "line 1: a label without a name",
    "client,cat\nx,1\nx,2\n": 'lines 2, 3: client "x" is given 2 times',
    "cat,dog\n1,2\n3\n": "line 3: 1 cells; the first row has 2",
    "cat,dog\n1,2\n3,-4\n": r'line 3, column 2 \("dog"\): -4 is out of range',
    "cat,dog\n1,nan\n": r'line 2, column 2 \("dog"\): "nan" is not a number',
    "cat,dog\n1,1e999\n": r'line 2, column 2 \("dog"\): 1e999 is out of range',
    "cat,dog\n1,1_0\n": '"1_0" is not a number',
    "cat,dog\n1,\n": 'line 2, column 2 .*"" is not a number',
    "site,cat\nA,1\n": r'line 2, column 1 \("site"\): "A" .*client names, call it "client"',
    "cat,dog\n50%,50%\n": '"50%" is not a number; .* Leave out the percent sign',
    "cat;dog\n1;2\n": "line 1: columns must be separated by commas",
    'cat,dog\n"1,2\n': "line 2: unexpected end of data",
}


@pytest.mark.parametrize("text", BAD_COUNTS)
def test_bad_counts_are_located(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=BAD_COUNTS[text]) as caught:
        read_counts(saved(tmp_path / "counts.csv", text))
    assert "counts.csv" in str(caught.value)


BAD_TARGETS = {
    "cat,dgo,owl\n1,0,0\n": 'line 1: label "dgo" is not among .* Did you mean "dog"',
    "cat,dog\n1,0\n": r'no value for label "owl" \(1 of 3',
    "cat,dog\n1,0\n1,1\n": r'line 1, column 2 \("cat"\): "dog" is not a number',
    "cat,dog,owl\n1,0,0\n0,1,0\n": "2 rows under the label names",
    "label,value\ncat,1\ndog,0\n": r'"owl" \(1 of 3 labels are missing\); write 0',
    "label,value\ncat,1\ncat,0\ndog,0\nowl,0\n": 'lines 2, 3: label "cat" is given 2 times',
    "label,value\ncat,x\ndog,0\nowl,0\n": r'line 2, column 2 \("cat"\): "x" is not a number',
}


@pytest.mark.parametrize("text", BAD_TARGETS)
def test_bad_targets_are_located(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=BAD_TARGETS[text]) as caught:
        read_target(saved(tmp_path / "target.csv", text), ("cat", "dog", "owl"))
    assert "target.csv" in str(caught.value)


def test_a_table_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = saved(tmp_path / "counts.csv", "cat,dog\n" + "1,2\n" * 10)
    monkeypatch.setattr("fedshift.csv_counts.LARGEST", len(table.read_text()))
    assert read_counts(table).counts.shape == (10, 2)
    monkeypatch.setattr("fedshift.csv_counts.LARGEST", len(table.read_text()) - 1)
    with pytest.raises(DataError, match="counts.csv: more than 0 MB; counts are one row"):
        read_counts(table)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none.csv: No such file"):
        read_counts(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"cat,d\xe9g\n1,2\n")
    with pytest.raises(DataError, match=r"b.csv is not UTF-8 text \(byte 5\)"):
        read_counts(tmp_path / "b.csv")


FIGURES = ("accuracy", "loss", "recall", "weights", "ess-curve")


@pytest.mark.slow
def test_figures_are_written_twice_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra `report`")
    runs = [read_run(write_run(tmp_path / name)) for name in ("a", "b")]
    first = save_figures(runs, tmp_path / "one")
    second = save_figures(runs, tmp_path / "two")
    names = {f"{n}.{s}" for n in FIGURES for s in ("pdf", "png")}
    assert {p.name for p in first} == names
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert first[0].read_bytes().startswith(b"%PDF")
