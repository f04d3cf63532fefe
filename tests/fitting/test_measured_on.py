"""Results and reports name the rows on which an accuracy was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedshift as fs
from support.custom_tasks import Net, hospitals

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "evaluate_every": 2, "progress": False}
DRAWN = "the clients' test rows, drawn"


@pytest.mark.parametrize("target", [{"ill": 0.7, "well": 0.3}, {"ill": 70, "well": 30}, "pooled"])
def test_rows_of_the_clients_are_not_called_the_targets(target: Any, tmp_path: Path) -> None:
    result = fs.fit(hospitals(target=target), Net, **QUICK)
    assert DRAWN in str(result)
    page = result.report(tmp_path / "page.html").read_text()
    assert "on the clients&#x27; test rows, drawn again" in page
    assert "own labelled test data" not in page
    assert "target&#x27;s test data" not in page


def test_rows_of_a_target_are(tmp_path: Path) -> None:
    result = fs.fit(hospitals(), Net, **QUICK)
    assert DRAWN not in str(result)
    page = result.report(tmp_path / "page.html").read_text()
    assert "on the target&#x27;s own labelled test data, and" in page
