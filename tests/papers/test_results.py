"""Every table in results/ is what its records say."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from fedshift.sweeps.records import RECORDS
from fedshift_papers.pictures.figures import figures
from fedshift_papers.protocols.study import Column, missing_data
from fedshift_papers.reproduce.figure_pages import draw
from fedshift_papers.reproduce.reproduce import Request
from support.command_line import code_of

RESULTS = Path(__file__).parents[2] / "results"
TABLES = [str(p.parent.relative_to(RESULTS)) for p in sorted(RESULTS.rglob(RECORDS))]
QUICK = ("fedpals-scaffold/table1", "feddrm/lenet", "labelsets/scaling", "made/fig2", "made/table1")


def cells(page: str) -> list[list[str]]:
    """The table of all cells, without the column of notes: later versions may say more there."""
    header, _, *lines = (
        page[page.index("| Data | Split | Method |") :].split("\n\n")[0].splitlines()
    )
    at = header.split(" | ").index("Differs from the paper")
    rows = [line.split(" | ") for line in (header, *lines)]
    return [row[:at] + row[at + 1 :] for row in rows]


def drawn(table: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Draw a table again by the command on its page, from its records alone, and publish it."""
    place = folder / "out" / Path(table).name
    place.mkdir(parents=True)
    shutil.copy(RESULTS / table / RECORDS, place)
    (command,) = re.findall(
        r"^`(fedshift reproduce .*)`$", (RESULTS / table / "table.md").read_text(), re.M
    )
    options = ["--no-train", "--out", str(folder / "out"), "--publish", str(folder)]
    monkeypatch.setattr(Column, "missing", lambda column: None)  # the data need not be here
    # A table whose records hold failed runs ends as it did when they failed: with code 4.
    failed = " failed)" in (RESULTS / table / "table.md").read_text()
    assert code_of(monkeypatch, *shlex.split(command)[1:], *options) == (4 if failed else 0)
    return folder / Path(table).name


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "table", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in TABLES]
)
def test_a_table_is_what_its_records_say(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = drawn(table, tmp_path, monkeypatch)
    assert "0 runs trained now" in capsys.readouterr().out
    before = (RESULTS / table / "table.md").read_text()
    assert cells((place / "table.md").read_text()) == cells(before)
    assert any("`" in row[-1] for row in cells(before))
    drawings = sorted(p.name for p in (RESULTS / table).glob("*.svg"))
    assert drawings == sorted(p.name for p in place.glob("*.svg"))
    for name in drawings:
        assert (place / name).read_bytes() == (RESULTS / table / name).read_bytes()


def test_results_are_few_files() -> None:
    assert sum(p.is_file() for p in RESULTS.rglob("*")) <= 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig3", "fig11"])
def test_a_figure_is_drawn_again_as_it_lies_there(name: str, tmp_path: Path) -> None:
    if (absent := missing_data("cifar-10")) is not None:
        pytest.skip(absent)
    request = Request(f"feddrm/{name}", tmp_path / "out", publish=tmp_path)
    draw(figures()[f"feddrm/{name}"], request)
    place = RESULTS / "feddrm" / name
    assert (tmp_path / name / "table.md").read_text() == (place / "table.md").read_text()
    # Images within are encoded by libraries whose bytes may differ.
    (before, now) = ((at / name / "plots.svg").read_text() for at in (place.parent, tmp_path))
    assert re.findall("<title>.*?</title>", now) == re.findall("<title>.*?</title>", before)
