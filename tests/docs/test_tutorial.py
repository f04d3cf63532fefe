"""The tutorial's table and its notebook."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from support.shown import alike

DOCS = Path(__file__).parents[2] / "docs"
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"


def test_the_table_is_that_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's numbers and the tutorial's are of the same patients."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra dev)")
    monkeypatch.chdir(tmp_path)
    first = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert first
    exec(first[1], {})
    runpy.run_path(str(DOCS.parent / "examples/breast_cancer.py"))["write"]("example.csv")
    assert Path("patients.csv").read_bytes() == Path("example.csv").read_bytes()


def sources(notebook: Any) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def printed(notebook: Any) -> list[str]:
    """What each cell of code prints."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    outputs = ([o for o in cell["outputs"] if o["output_type"] == "stream"] for cell in cells)
    return ["".join("".join(o["text"]) for o in some) for some in outputs]


def test_the_notebook_says_what_the_page_says(site: Any) -> None:
    pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
    made, stored = site("notebook").notebook_of(PAGE.read_text()), json.loads(NOTEBOOK.read_text())
    assert sources(made) == sources(stored)
    other = site("notebook").notebook_of(PAGE.read_text().replace("rounds=30", "rounds=31"))
    assert sources(other) != sources(stored)


@pytest.mark.slow
def test_the_notebook_runs(site: Any) -> None:
    """It prints the stored output; its bars are complete; there are no errors or warnings."""
    pytest.importorskip("nbclient", reason="nbclient is not installed (extra dev)")
    stored = json.loads(NOTEBOOK.read_text())
    made = site("notebook").notebook_of(PAGE.read_text())
    site("notebook").execute(made)
    assert all(map(alike, printed(stored), printed(made)))
    for notebook in (stored, made):
        outputs = [o for cell in notebook["cells"] for o in cell.get("outputs", ())]
        assert all(o.get("name", "stdout") == "stdout" for o in outputs)
        bars = [o["data"]["text/html"] for o in outputs if o["output_type"] == "display_data"]
        assert [re.findall(r'value="(\d+)" max="\1"', "".join(bar)) for bar in bars] == [
            ["30"],
            ["30"] * 4,
            ["15"],
        ]
