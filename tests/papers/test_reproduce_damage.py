"""Damaged results and odd requests of `fedshift reproduce`: named before anything is trained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli.app import main
from fedshift.errors import DataError, InputError
from fedshift.sweeps.spans import parse_seeds
from fedshift_papers.command import list_tables
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.reproduce import Request, reproduce

MINI = Request(
    "fedpals/table1", Path("reproduced"), ("fashion-mnist-mini",), ("C=3",), ("fedrs",), (0, 1), 1,
    overrides=("model.name=linear",),
)  # fmt: skip


@pytest.fixture
def one(tmp_path: Path) -> tuple[Request, Path]:
    """(a table of two runs, the folder of the one that is complete)."""
    request = replace(MINI, out=tmp_path)
    (name,) = reproduce(replace(request, seeds=(0,))).report.trained
    return request, tmp_path / "runs" / name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        ("summary.json", 60, "Unterminated string"),
        ("lock.json", 30, "Expecting|Unterminated"),
        ("config.resolved.toml", "[data]\n", "shift.labels_per_client is not there"),
        ("config.resolved.toml", 0, "shift.labels_per_client is not there"),
    ],
)
def test_damage_is_met_before_training(
    name: str, keep: int | str, message: str, one: tuple[Request, Path]
) -> None:
    """A configuration of which lines are lost might be any."""
    request, folder = one
    file = folder / name
    text = file.read_text()
    file.write_text(text[: keep if isinstance(keep, int) else text.index(keep) + len(keep)])
    with pytest.raises(DataError, match=message) as caught:
        reproduce(request)
    assert str(caught.value).startswith(str(file))
    assert [run.name for run in folder.parent.iterdir()] == [folder.name]


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda summary: summary.update({key: value})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda summary: summary.pop("final"), '"final": Field required'),
        (lambda summary: summary["best"].pop("round"), '"best.round": Field required'),
        (
            lambda summary: summary["best"].update(round="5"),
            '"best.round": Input should be a valid',
        ),
        (_set("ess_fraction", "all"), '"ess_fraction": Input should be a valid number'),
        (_set("why", "none"), '"why": Input should be a valid array'),
        (_set("target", None), '"target": Input should be a valid array'),
        (_set("target", [1.0]), '"target" has 1 entries, 10 are needed'),
        (
            lambda summary: summary["best"].pop("validation_loss"),
            '"best.validation_loss": Field',
        ),
    ],
)
def test_a_summary_that_lacks_something(
    change: Callable[[dict[str, Any]], Any], message: str, one: tuple[Request, Path]
) -> None:
    request, folder = one
    summary = json.loads((folder / "summary.json").read_text())
    change(summary)
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(DataError, match=f"summary.json: {message}.*Delete the folder"):
        reproduce(request)
    assert [run.name for run in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
def test_an_infinite_loss_is_no_damage(one: tuple[Request, Path]) -> None:
    """Finite parameters can have one."""
    request, folder = one
    summary = json.loads((folder / "summary.json").read_text())
    summary["final"]["validation_loss"] = summary["best"]["validation_loss"] = "inf"
    (folder / "summary.json").write_text(json.dumps(summary))
    assert len(reproduce(request).report.trained) == 1


@pytest.mark.slow
def test_one_of_several_candidates_is_looked_at_before_the_others_are_trained(
    tmp_path: Path,
) -> None:
    request = replace(MINI, out=tmp_path, methods=("fedpals",), seeds=(0,))
    names = reproduce(request).report.trained
    assert len(names) > 2
    (tmp_path / "runs" / names[1] / "summary.json").write_text("{")
    shutil.rmtree(tmp_path / "runs" / names[2])
    with pytest.raises(DataError, match=re.escape(names[1])):
        reproduce(request)
    assert not (tmp_path / "runs" / names[2]).exists()


@pytest.mark.slow
def test_a_grid_that_cannot_be_chosen_from_is_met_before_training(
    one: tuple[Request, Path],
) -> None:
    request, folder = one
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "best": None}))
    with pytest.raises(DataError, match="no best round"):
        reproduce(replace(request, seeds=(0,), tune=True))
    assert [run.name for run in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round\n1\n", "'target_accuracy' is not in list"),
        ("round,target_accuracy\n", "rows are missing, or cut"),
        ("round,target_accuracy\n1\n", "rows are missing, or cut"),
        ("round,target_accuracy\n1,0.3", "rows are missing, or cut"),
        ("", "not enough values"),
        ("round,target_accuracy\n1,x\n", "could not convert"),
    ],
)
def test_a_damaged_curve_is_met_before_training(text: str, message: str, tmp_path: Path) -> None:
    request = Request(
        "fedpals/fig7", tmp_path, ("fashion-mnist-mini",), ("C=3",), ("fedavg",), (0,), 1,
        overrides=MINI.overrides,
    )  # fmt: skip
    (name,) = reproduce(request).report.trained
    (tmp_path / "runs" / name / "metrics.csv").write_text(text)
    with pytest.raises(DataError, match=rf"metrics\.csv: {message}"):
        reproduce(replace(request, seeds=(0, 1)))
    assert [run.name for run in (tmp_path / "runs").iterdir()] == [name]


@pytest.mark.slow
def test_what_is_whole_goes_on(one: tuple[Request, Path]) -> None:
    assert len(reproduce(one[0]).report.trained) == 1
    assert reproduce(one[0]).report.trained == ()


@pytest.mark.slow
def test_damage_in_a_grid_is_met_before_training(one: tuple[Request, Path]) -> None:
    request, folder = one
    (folder / "lock.json").write_text("[]")
    with pytest.raises(DataError, match="not a JSON object"):
        reproduce(replace(request, seeds=(0,), tune=True))
    assert [run.name for run in folder.parent.iterdir()] == [folder.name]


COLUMN = "fashion-mnist-mini C=3"
RECORD = {"column": COLUMN, "row": "FedRS", "options": {"alpha": 0.1}, "seed": 0, "rounds": 1}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        ("{", "Expecting property name"),
        ({}, "not a list of records"),
        ([RECORD, 3], 'record 2 has no "column"'),
        ([{**RECORD, "row": 7}], 'record 1 has no "row"'),
        ([{**RECORD, "options": [0.1]}], 'record 1 has no "options"'),
        ([{**RECORD, "rounds": None}], 'record 1 has no "rounds"'),
        ([{**RECORD, "changed": [7]}], '"changed" of record 1 is no list of overrides'),
        ([{**RECORD, "options": {"alpha": "x"}}], "FedRS: alpha = 'x' is no number"),
        ([{**RECORD, "options": {"alpa": 0.1}}], "FedRS: alpa in place of alpha"),
        ([{**RECORD, "options": {"alpha": 7}}], r"alpha must be in \[0, 1\), got 7"),
    ],
)
def test_tuned_values_are_checked(tuned: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(tuned if isinstance(tuned, str) else json.dumps(tuned))
    with pytest.raises(DataError, match=f"{message}.*Delete it to tune again") as caught:
        reproduce(replace(MINI, out=tmp_path))
    assert str(caught.value).startswith(str(path))
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_tuned_values_of_other_tables_do_no_harm(tmp_path: Path) -> None:
    path, other = tmp_path / "tuned.json", {**RECORD, "column": "gone", "options": {"x": "y"}}
    path.write_text(json.dumps([RECORD, other]))
    done = reproduce(replace(MINI, out=tmp_path, train=False))
    assert dict(done.outcome.cells[0].options) == {"alpha": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "ending"),
    [
        (list(MINI.overrides), "(seed 0, 1 round)."),
        (["training.lr=0.5"], "(seed 0, 1 round, with training.lr=0.5)."),
        ([], "(seed 0, 1 round, with nothing changed from the protocol)."),
    ],
)
def test_a_value_tuned_under_other_changes_is_reported(
    changed: list[str], ending: str, tmp_path: Path
) -> None:
    (tmp_path / "tuned.json").write_text(json.dumps([{**RECORD, "changed": changed}]))
    notes = reproduce(replace(MINI, out=tmp_path, train=False)).outcome.notes
    assert next(n for n in notes if n.startswith("Tuned")).endswith(f"alpha = 0.1 {ending}")
    record = {**RECORD, "changed": changed, "undecided": True}
    (tmp_path / "tuned.json").write_text(json.dumps([record]))
    notes = reproduce(replace(MINI, out=tmp_path, train=False)).outcome.notes
    assert not any(n.startswith("Tuned") for n in notes)
    note = next(n for n in notes if n.startswith("Kept, as all of the grid have one validation"))
    assert note.endswith(f"alpha = 0.1, the default {ending}")


@pytest.mark.slow
def test_records_of_another_invocation_stay(tmp_path: Path) -> None:
    """Of one that tuned another column while this one trained its grids."""
    path, other = tmp_path / "tuned.json", {**RECORD, "column": "fashion-mnist-mini C=2"}

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "over":
            path.write_text(json.dumps([other]))

    done = reproduce(replace(MINI, out=tmp_path, seeds=(0,), tune=True), listen)
    assert len(done.report.trained) == 3
    mine, foreign = json.loads(path.read_text())[::-1]
    assert (foreign, mine["column"]) == (other, COLUMN)
    assert dict(done.outcome.cells[0].options) == mine["options"]


@pytest.mark.slow
def test_two_that_write_tuned_values_at_once(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; "
        "from fedshift_papers.reproduce.tuning import add_tuned; "
        "[add_tuned(Path('tuned.json'), {(str(i), sys.argv[1]): {'column': str(i), "
        "'row': sys.argv[1], 'options': {}, 'seed': 0, 'rounds': 1}}) for i in range(40)]"
    )
    both = [subprocess.Popen([sys.executable, "-c", script, name], cwd=tmp_path) for name in "ab"]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len(json.loads((tmp_path / "tuned.json").read_text())) == 80


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The error of `fedshift reproduce ARGS`, with exit code 2 and no files."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fedshift", "reproduce", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert not list(tmp_path.iterdir())
        return " ".join(capsys.readouterr().err.split())

    return run


@pytest.mark.parametrize("methods", ["fedavg,", " "])
def test_no_method_is_not_all_methods(methods: str, refused: Callable[..., str]) -> None:
    assert 'unknown method of fedpals/table1 ""; allowed' in refused(
        "fedpals/table1", "--methods", methods
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--seeds 0", "--seeds"),
        ("--tune", "--tune"),
        ("-c a.b=1 --format json", "--config"),
        ("--split x", "--split"),
        ("--jobs 1 --no-train", "--jobs, --no-train"),
        ("--out x --backend loop", "--backend, --out"),
    ],
)
def test_options_without_a_table(options: str, named: str, refused: Callable[..., str]) -> None:
    message = refused(*options.split())
    assert (
        f"reproduce: {named} given, but no table is named; fedshift reproduce alone lists"
        in message
    )


@pytest.mark.slow
def test_the_list_names_what_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    list_tables((), as_json=False)
    output = capsys.readouterr().out
    table4 = "fedpals/table4: The trade-off of lambda on PACS\n"
    sets = "  pacs: C=6\n  pacs-96, not in the paper: C=6\n"
    assert re.search(f"{table4}  (measured|runs) .*\n{sets}", output)
    list_tables((), as_json=True)
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    first, *_, last = listed["fedpals/table1"]["columns"]
    assert first == {
        "dataset": "fashion-mnist", "split": "C=3", "seeds": 8, "rounds": 150, "extra": False,
        "measured": True,
    }  # fmt: skip
    assert last["extra"]
    assert {"fedpals", "fedavg"} <= set(listed["fedpals/table4"]["methods"])


def test_names_that_several_papers_have() -> None:
    with pytest.raises(InputError, match=r"table1 is in several papers: fedpals/table1, .*made/"):
        study("table1")
    with pytest.raises(InputError, match=r"fig9 is in several papers: fedpals/fig9, feddrm/fig9"):
        study("fig9")
    with pytest.raises(InputError, match='Did you mean "labelsets/overlap"'):
        study("overlap")


def test_how_many_seeds_a_range_may_have() -> None:
    assert len(parse_seeds("0-999")) == 1000
    with pytest.raises(InputError, match="ranges of at most 1,000"):
        parse_seeds("0-1000")
