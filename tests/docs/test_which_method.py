"""The page "Which method?": its quotations and counts."""

from __future__ import annotations

import re
from pathlib import Path

from fedshift.diagnose import diagnose

DOCS = Path(__file__).parents[2] / "docs"


def sentences() -> str:
    """What `diagnose` says in five situations."""
    pair = [[90, 10], [20, 80]]
    cases = (
        (pair, [0.55, 0.45]),
        (pair, [0.9, 0.1]),
        (pair, [0.05, 0.95]),
        ([[9, 1, 0], [2, 8, 0]], [0.3, 0.3, 0.4]),
        ([[500, 0], [500, 0], [500, 0], [1, 9]], [0.1, 0.9]),
    )
    return " ".join(s for counts, target in cases for s in diagnose(counts, target).verdict)


def test_quotes_of_the_diagnosis_are_what_it_says() -> None:
    rows = re.findall(r'^\| "([^"]+)"', (DOCS / "which-method.md").read_text(), re.M)
    text = sentences()
    assert len(rows) == 7
    for quote in rows:
        assert quote.removesuffix("...").strip() in text


def test_measured_numbers_stand_in_the_results() -> None:
    """Each row names the table that has its number; "the same" is that of the row above."""
    text = (DOCS / "which-method.md").read_text().split("## What was measured")[1]
    page = ""
    for row in re.findall(r"^\| (.*) \|$", text, re.M)[2:]:
        _, number, source = row.split(" | ")
        link = re.search(r"\]\(([^)#]+)", source)
        page = (DOCS / link[1]).read_text() if link else page
        if number[0] in "+-":
            assert f" {number} " in page
