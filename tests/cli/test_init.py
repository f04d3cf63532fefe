"""`fedshift init`: what it reports of a table, and that the files it writes run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.tasks.doubts import doubts
from fedshift.tasks.names import coded
from fedshift.tasks.rows import Columns, column_of
from support.custom_files import table

GIVEN = ("--client", "hospital", "--label", "outcome")


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "patients.csv").write_text(table())
    return tmp_path


def init(*arguments: str) -> int:
    return perform(app, ["init", "patients.csv", *arguments])


def test_it_reports_what_it_read(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (patients / "patients.csv").read_text().splitlines()
    lines = [text[0], *(line.replace(",f,", ",,") for line in text[1:8]), *text[8:]]
    (patients / "patients.csv").write_text("\n".join(lines))
    assert init(*GIVEN, "--target", "north") == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    missing = sum(",," in line for line in lines)
    assert "patients.csv: 240 rows, 5 columns." in out
    assert ["sex", "categories", "2", str(missing)] in rows
    assert ["ward", "constant", "1", "0"] in rows
    north = [line for line in lines if line.startswith("north")]
    ill = sum(line.endswith("ill") for line in north)
    assert ["north (target)", "80", f"{100 * ill / 80:.1f}", f"{100 - 100 * ill / 80:.1f}"] in rows
    assert 'Column "ward" is constant in training; it was left out.' in out
    assert "Not covered: no weighting of the clients gives the target's label" in out
    assert "Next: fedshift run experiment.toml" in out


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "target", ["north", "clients", "pooled", "ill=0.7, well=0.3", "test.csv", None]
)
def test_the_written_file_runs(
    patients: Path, target: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = patients / "a b" / "c"
    (patients / "test.csv").write_text(table(seed=1, rows=60))
    assert init(*GIVEN, *(("--target", target) if target else ()), "--folder", str(folder)) == 0
    assert {p.name for p in folder.iterdir()} == {"experiment.toml", "net.py"}
    few = ["-c", "training.rounds=2", "-c", "training.steps=1", "-c", "training.epochs="]
    assert perform(app, ["run", str(folder / "experiment.toml"), "--out", "o", *few]) == 0
    summary = json.loads((patients / "o" / "summary.json").read_text())
    assert summary["classes"] == ["ill", "well"]
    assert summary["method"] == ("fedavg" if target in ("clients", "pooled", None) else "fedpals")
    capsys.readouterr()


@pytest.mark.few(1)
@pytest.mark.parametrize("typed", ["ill=0.7,well=0.3", " ill = 0.7 , well = .3", "ill=70,well=30"])
def test_label_shares_as_text(patients: Path, typed: str) -> None:
    """The shares become a table in the file, and the run's target."""
    assert init(*GIVEN, "--target", typed) == 0
    data = tomllib.loads((patients / "experiment.toml").read_text())["data"]
    total = sum(data["target"].values())
    assert {k: v / total for k, v in data["target"].items()} == {"ill": 0.7, "well": 0.3}
    few = ["-c", "training.rounds=1", "-c", "method.ess=0.5"]
    assert perform(app, ["run", "experiment.toml", "--out", "o", *few]) == 0
    summary = json.loads((patients / "o" / "summary.json").read_text())
    assert dict(zip(summary["classes"], summary["target"], strict=True)) == {
        "ill": 0.7,
        "well": 0.3,
    }


def test_a_client_called_like_shares(patients: Path) -> None:
    (patients / "patients.csv").write_text(table().replace("north", "ward=3"))
    assert init(*GIVEN, "--target", "ward=3") == 0
    assert 'target = "ward=3"' in (patients / "experiment.toml").read_text()


def test_a_client_without_labels_has_no_rows(
    patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be the target; the message says what can."""
    lines = [
        line.rpartition(",")[0] + "," if line.startswith("north") else line
        for line in table().splitlines()
    ]
    (patients / "patients.csv").write_text("\n".join(lines))
    assert init(*GIVEN, "--target", "north") == 2
    error = capsys.readouterr().err
    assert "to estimate its accuracy, give label shares, as ill=0.7,well=0.3\n" in error
    assert init(*GIVEN, "--target", "ill=0.5,well=0.5") == 0
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["north", "0", "–", "–"] in rows


def test_nothing_is_overwritten(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (patients / "net.py").write_text("mine")
    assert init(*GIVEN) == 2
    assert "net.py: is there already, and nothing is overwritten; give --folder" in (
        capsys.readouterr().err
    )
    assert (patients / "net.py").read_text() == "mine"
    assert not (patients / "experiment.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (GIVEN[2:], "--client: which column says whose row it is? It may be hospital (3 values), "
         'sex (2 values). Give it, as in --client "hospital"'),
        (GIVEN[:2], "--label: which column is to be predicted? It may be outcome (2 values), sex "
         '(2 values). Give it, as in --label "outcome"'),
        (("--client", "hospitl", *GIVEN[2:]), 'has no column "hospitl"; it has hospital, age, sex'),
        ((*GIVEN, "--target", "ill=0.7,well"), '"well" is no label with its share; give each label '
         "once, as in --target ill=0.7,well=0.3"),
        ((*GIVEN, "--target", "ill=0.7,ill=0.3"), '"ill" is there twice'),
        ((*GIVEN, "--target", "ill=0.7,wel=0.3"), 'the label "wel" is not among the classes ill, '
         'well. Did you mean "well"?'),
        ((*GIVEN, "--target", "ill=0.7,well=0.7"), "--target sums to 1.4; give shares that sum"),
        ((*GIVEN, "--target", "nort"), '--target "nort" is no client; there are east, north, s'),
        ((*GIVEN, "--target", "nort"), "name, label shares, as ill=0.7,well=0.3"),
        (("--client", "age", *GIVEN[2:]), "values are in one row alone; give the column that says "
         "whose row it is, such as a site. It may be hospital, sex."),
        ((*GIVEN[:2], "--label", "hospital"), "--client and --label are both"),
        ((*GIVEN[:2], "--label", "ward"), "--label has 1 class (one); at least 2 are needed"),
        ((*GIVEN, "-c", "training.rounds=2"), "-c training.rounds: init takes data.kind, data."),
        ((*GIVEN, "-c", "data.dorp=age"), 'it writes. Did you mean "data.drop"?'),
        ((*GIVEN, "-c", "data.drop=age"), 'data.drop = "age": must be a list'),
        ((*GIVEN, "-c", "data.drop=['outcome']"), 'data.drop names "outcome", which is the label:'),
        ((*GIVEN, "-c", "data.drop=['hospital']"), 'data.drop names "hospital", which is the cli'),
        ((*GIVEN, "-c", "data.drop=['agee']"), 'has no column "agee"; it has hospital, age, s'),
        ((*GIVEN, "--folder", "patients.csv"), "patients.csv: is not a folder; give another place"),
    ],
)  # fmt: skip
def test_nothing_is_guessed(
    patients: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a choice is unclear, nothing is written."""
    assert init(*arguments) in (2, 3)
    assert message in capsys.readouterr().err
    assert [p.name for p in patients.iterdir()] == ["patients.csv"]


@pytest.mark.parametrize("name", ["patients.csv.zip", "patients.xlsx", "patients.dat"])
def test_other_files_are_to_be_unpacked(
    patients: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (patients / name).write_bytes(b"PK\x03\x04")
    assert perform(app, ["init", name, *GIVEN]) == 2
    assert (
        f"{name}: init looks at tables (.csv, .tsv, .txt, .gz, .parquet); unpack it, or save"
        in (capsys.readouterr().err)
    )


@pytest.mark.slow
def test_a_mixed_column_is_left_out_as_the_message_says(
    patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option that the message names is written to the experiment, which runs."""
    (patients / "patients.csv").write_text(table().replace("east,", "east,o", 9))
    assert init(*GIVEN) == 2
    error = capsys.readouterr().err
    assert 'column "age" holds numbers and "o' in error
    assert """or give -c 'data.categories=["age"]' or -c 'data.drop=["age"]'""" in error
    assert init(*GIVEN, "-c", 'data.drop=["age"]', "-c", "data.validation=0.3") == 0
    data = tomllib.loads((patients / "experiment.toml").read_text())["data"]
    assert (data["drop"], data["validation"], data["test"]) == (["age"], 0.3, 0.2)
    assert perform(app, ["run", "experiment.toml", "--out", "o", "-c", "training.rounds=1"]) == 0
    assert "age" not in (patients / "o" / "encoding.json").read_text()


@pytest.mark.slow
def test_a_table_without_header(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (patients / "patients.csv").write_text(table().partition("\n")[2])
    assert init(*GIVEN) == 3
    assert "looks like data: give -c 'data.header=[names of the columns]'." in (
        capsys.readouterr().err
    )
    assert init(*GIVEN, "-c", 'data.header=["hospital","age","sex","ward","outcome"]') == 0
    assert perform(app, ["run", "experiment.toml", "--out", "o", "-c", "training.rounds=1"]) == 0


def test_what_to_look_at_is_named(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For example a column that repeats the label under another name, or row numbers."""
    head, *rows = table().splitlines()
    more = (
        (row, row.endswith("ill"), 1000 + i, f"{2000 + i // 2}-01-05", i % 30 if i % 9 else -99)
        for i, row in enumerate(rows)
    )
    lines = [f"{head},sick,patient,day,stay", *(",".join(map(str, row)) for row in more)]
    (patients / "patients.csv").write_text("\n".join(lines).replace("south", "East", 3))
    assert init(*GIVEN) == 0
    out = " ".join(capsys.readouterr().out.split())
    for sentence in (
        'Column "sick" tells the label "outcome" in every row. If it is the label by another '
        "name, give -c 'data.drop=[\"sick\"]'.",
        'Column "patient" holds another whole number in every row, as numbers of rows or people',
        'Column "stay" holds -99 several times, far from its other values.',
        "Clients that differ by case or spaces alone: East, east. Write each in one way.",
        '-01-05" and the like are dates; put days or years in their place.',
    ):
        assert sentence in out
    for name in ("age", "sex"):
        assert f'Column "{name}"' not in out


def test_copies_of_rows_are_named() -> None:
    """Controls: rows that differ, and few categories, of which chance makes equal rows.

    Also where these follow each other, so that there are more.
    """
    rng = np.random.default_rng(0)
    few = {name: coded(rng.integers(0, 3, 400)) for name in ("site", "a", "b", "y")}
    many = {"marker": column_of("marker", rng.normal(size=400))}
    assert doubts(Columns(few), "site", "y", ["a", "b"]) == []
    assert doubts(Columns(few | many), "site", "y", ["a", "b", "marker"]) == []
    follow = {"c": coded(few["a"].codes + few["b"].codes)}
    assert doubts(Columns(few | follow), "site", "y", ["a", "b", "c"]) == []
    again = np.arange(400) % 370
    copies = {name: coded(np.array(c.names)[c.codes][again]) for name, c in few.items()}
    copies["site"] = few["site"]  # also where a patient is in two hospitals
    copied = Columns(copies | {"marker": many["marker"][again]})
    noted = doubts(copied, "site", "y", ["a", "b", "marker"])
    assert ["its label: 30. If they are copies" in sentence for sentence in noted] == [True]


def test_doubtful_labels_of_numbers_are_noted() -> None:
    """A label that is another column in other units, or a threshold of one; a client's code."""
    rng = np.random.default_rng(0)
    n = 200
    site, cm = rng.integers(0, 4, n), rng.normal(170, 9, n)
    columns = {
        "site": coded([f"s{i}" for i in site]), "cm": column_of("cm", cm),
        "inch": column_of("inch", cm / 2.54), "tall": coded(cm > 170),
        "code": column_of("code", site * 10.0), "noise": column_of("noise", rng.normal(size=n)),
    }  # fmt: skip
    given = [name for name in columns if name != "site"]
    noted = doubts(Columns(columns), "site", "inch", [*given[:1], "noise", "code"])
    assert [sentence[:20] for sentence in noted] == ['Column "cm" tells th', 'Column "code" names ']
    noted = doubts(Columns(columns), "site", "tall", ["cm", "noise"])
    assert [sentence[:20] for sentence in noted] == ['Column "cm" tells th']


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_a_label_of_numbers_makes_a_regression_that_runs(
    patients: Path, scale: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file runs as written, whatever the numbers' size, and predicts better than the mean."""
    head, *rows = table().splitlines()
    cells = [row.split(",") for row in rows]
    ages = [(hospital, f"{float(age) * scale:.9g}", *rest) for hospital, age, *rest in cells]
    (patients / "patients.csv").write_text("\n".join([head, *map(",".join, ages)]))
    assert init("--client", "hospital", "--label", "age", "--target", "north") == 0
    assert 'kind = "regression"' in (patients / "experiment.toml").read_text()
    assert '"age" holds numbers, which are predicted as such' in capsys.readouterr().out
    assert perform(app, ["run", "experiment.toml", "--out", "o"]) == 0
    assert "target RMSE" in capsys.readouterr().out
    final = json.loads((patients / "o" / "summary.json").read_text())["final"]
    assert final["r2"] > 0.2


def test_a_label_of_free_text(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More texts than are read of a column: a message, and no traceback."""
    rows = (f"{i % 3},{i},text {i}" for i in range(20_100))
    (patients / "patients.csv").write_text("hospital,age,outcome\n" + "\n".join(rows))
    assert init(*GIVEN) == 2
    assert '--label "outcome" holds free text; give a column of few' in capsys.readouterr().err


def test_what_is_no_table_is_refused(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert perform(app, ["init", str(patients), *GIVEN]) == 2
    assert "init looks at tables (.csv, .tsv, .txt, .gz, .parquet); an experiment file names" in (
        capsys.readouterr().err
    )


def test_as_json(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(*GIVEN, "--format", "json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["clients"] == ["east", "north", "south"]
    assert facts["rows"] == 240
    assert facts["columns"][1]["kind"] == "numbers"
    assert facts["diagnosis"]["covered"]


@pytest.mark.slow
def test_names_are_written_as_they_are(patients: Path) -> None:
    """Also quotes, umlauts and backslashes in names of columns and clients."""
    text = table().replace("hospital", 'Klinik "\u00fc\\"', 1).replace("north", "n'\u00f6\\rd")
    head, rest = text.split("\n", 1)
    (patients / "patients.csv").write_text(f'"Klinik ""\u00fc\\""",{head.split(",", 1)[1]}\n{rest}')
    options = ("--client", 'Klinik "\u00fc\\"', "--label", "outcome", "--target", "n'\u00f6\\rd")
    assert init(*options) == 0
    few = ["-c", "training.rounds=1", "-c", "method.ess=1.0"]
    assert perform(app, ["run", "experiment.toml", "--out", "o", *few]) == 0
