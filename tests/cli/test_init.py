"""`fedshift init`: what it says of a table, and that the files that it writes run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedshift.cli.app import app
from fedshift.cli.ending import perform
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


def test_it_says_what_it_saw(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("target", ["north", "clients", "test.csv", None])
def test_what_it_writes_runs(
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
    assert summary["method"] == ("fedpals" if target in ("north", "test.csv") else "fedavg")
    capsys.readouterr()


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
        ((*GIVEN, "--target", "nort"), '--target "nort" is no client; there are east, north, s'),
    ],
)  # fmt: skip
def test_nothing_is_guessed(
    patients: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written then."""
    assert init(*arguments) in (2, 3)
    assert message in capsys.readouterr().err
    assert [p.name for p in patients.iterdir()] == ["patients.csv"]


def test_a_label_of_numbers_makes_a_regression_that_runs(
    patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init("--client", "hospital", "--label", "age", "--target", "north") == 0
    assert 'kind = "regression"' in (patients / "experiment.toml").read_text()
    few = ["-c", "training.rounds=1", "-c", "training.lr=1e-5"]
    assert perform(app, ["run", "experiment.toml", "--out", "o", *few]) == 0
    shown = capsys.readouterr()
    assert "target RMSE" in shown.out
    assert "divide them" in shown.out + shown.err


def test_a_label_of_free_text(patients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More texts than are read of a column: a message, and no defect."""
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


def test_names_are_written_as_they_are(patients: Path) -> None:
    """Quotes, umlauts and backslashes in names of columns and clients."""
    text = table().replace("hospital", 'Klinik "\u00fc\\"', 1).replace("north", "n'\u00f6\\rd")
    head, rest = text.split("\n", 1)
    (patients / "patients.csv").write_text(f'"Klinik ""\u00fc\\""",{head.split(",", 1)[1]}\n{rest}')
    options = ("--client", 'Klinik "\u00fc\\"', "--label", "outcome", "--target", "n'\u00f6\\rd")
    assert init(*options) == 0
    few = ["-c", "training.rounds=1", "-c", "method.ess=1.0"]
    assert perform(app, ["run", "experiment.toml", "--out", "o", *few]) == 0
