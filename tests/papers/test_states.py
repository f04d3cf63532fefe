"""What `fedshift reproduce` says of each table and figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedshift_papers.protocols.study import Study, printed_rows
from fedshift_papers.reproduce.catalogue import absent, measured_columns, state_of, targets

ROOT = Path(__file__).parents[2]


def test_measured_tables_are_those_of_the_results() -> None:
    pages = sorted((ROOT / "results").rglob("table.md"))
    titles = [re.match(r"# (\S+): ", p.read_text()) for p in pages]
    here = {
        (t[1], str(p.parent.relative_to(ROOT))) for t, p in zip(titles, pages, strict=True) if t
    }
    assert {(row["target"], row["folder"]) for row in printed_rows("measured")} == here
    assert {name for name, _ in here} <= set(targets())


@pytest.mark.parametrize("row", printed_rows("measured"), ids=lambda row: row["folder"])
def test_measured_columns_are_those_of_the_page(row: dict[str, str]) -> None:
    page = (ROOT / row["folder"] / "table.md").read_text()
    cells = re.findall(r"^\| ([^|]+) \| (\S+=\S+) \| [^|]+ \| [^|]+ \| [^|]+ \| .* `", page, re.M)
    pairs = dict.fromkeys(f"{data} {split}" for data, split in cells)
    assert row["columns"] == "; ".join(pairs)
    one = targets()[row["target"]]
    if isinstance(one, Study):
        assert set(pairs) <= {column.heading for column in one.columns}


def test_a_column_that_is_measured_says_so() -> None:
    assert measured_columns(targets()["fedpals/fig3b"]) == ()
    assert "CIFAR-10 C=3-E=1" in measured_columns(targets()["labelsets/tuning"])


@pytest.mark.slow
def test_every_target_has_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    states = {name: state_of(one) for name, one in targets().items()}
    assert states["fedpals/fig9"] == "measured here: results/fedpals/fig9"
    assert states["feddrm/fig7"] == "runs where data are given: retina"
    assert states["feddrm/fig8"] == "is drawn where data are given: cifar-10"
    assert states["made/table1"] == (
        "measured here: results/made/table1; runs where data are given: "
        "emnist-digits, mnist-writers"
    )
    words = ("measured here", "runs here", "runs where data", "is drawn where data")
    assert all(state.startswith(words) for state in states.values())


def test_a_set_that_is_there_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert absent(targets()["feddrm/fig14"]) == ("retina",)
    for site in ("ACRIMA", "RIM", "REFUGE"):
        (tmp_path / "retina" / site).mkdir(parents=True)
    assert absent(targets()["feddrm/fig14"]) == ()
    assert state_of(targets()["feddrm/fig14"]) == "is drawn here"
