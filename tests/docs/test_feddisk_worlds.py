"""FedDisk's page has the numbers of made/participation and made/slope."""

from __future__ import annotations

import re
from pathlib import Path

from fedshift_papers.protocols.participation import DRAWN

ROOT = Path(__file__).parents[2]
PAGE, MADE = ROOT / "docs/methods/feddisk.md", ROOT / "results/made"
# By the default of 1 most clients of a cohort have no weights.
ROUNDS = f"the default with {DRAWN} weighing rounds"
PLACES = {"bits": "Tilted bits", "Gaussians": "Gaussians", "looks": "Looks"}


def cells(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first column has this name, the head first."""
    lines = text[text.index(f"| {first} |") :].partition("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if not line.startswith(("|--", "| --"))]


def differences() -> dict[tuple[str, str, str], str]:
    """(data, split, row) -> difference from FedAvg in the results."""
    head, *rows = cells((MADE / "participation/table.md").read_text(encoding="utf-8"), "Data")
    at = head.index("Minus FedAvg, paired")
    return {(row[0], row[1], row[2]): row[at] for row in rows}


def odd(page: str) -> list[str]:
    """Numbers of the page that are not those of the results."""
    differing, faults = differences(), []
    (_, *columns), *rows = cells(page, "clients a round")
    for name, *values in rows:
        row = name.replace(", worst", ", accuracy of the worst round, %")
        for column, value in zip(columns, values, strict=True):
            data, drawn = column.split(", ")
            split = {"1 of 3": "cohort=1", "all": "cohort=3"}[drawn]
            if differing.get((PLACES[data], split, row)) != value:
                faults.append(f"{name}, {column}: {value}")

    def gain(data: str, split: str, row: str = "default") -> str:
        return differing[data, split, row].split()[0]

    looks = sorted(abs(float(gain("Looks", f"cohort={m}", "true weights"))) for m in (1, 3))
    slopes = {row[0]: row[1] for row in cells((MADE / "slope/table.md").read_text(), "Estimate")}
    text = " ".join(page.split())
    required = (
        f"{ROUNDS} has {gain('Tilted bits', 'cohort=1')} nats on bits, "
        f"{gain('Gaussians', 'cohort=1')} on Gaussians",
        f'so "default" is there {ROUNDS}:',
        f"reached by {ROUNDS}, on bits",
        f"it pays little: {gain('Tilted bits', 'cohort=3')}.",
        f"even true weights add {looks[0]:.2f} to {looks[1]:.2f}",
        f"direct with mixtures has a slope of {slopes['direct, mixtures']} (goal",
        f"are no density and have {slopes['direct, Bernoulli']};",
        f"({slopes['classifier, mixtures']} and {slopes['classifier, Bernoulli']})",
    )
    return faults + [words for words in required if words not in text]


def test_the_page_has_the_results_numbers() -> None:
    assert odd(PAGE.read_text(encoding="utf-8")) == []


def test_any_other_number_would_be_seen() -> None:
    """Each number of the table, and of the sentences, in turn with another last digit."""
    page, tried = PAGE.read_text(encoding="utf-8"), 0
    worlds = page.index("| clients a round |")
    ends = page.index("\n\n", worlds)
    first = page.index("## When it pays")
    spots = [(first, page.index("## Rounds")), (worlds, ends)]
    for start, end in spots:
        for number in re.finditer(r"\d\.\d+", page[start:end]):
            at = start + number.end() - 1
            assert odd(page[:at] + str((int(page[at]) + 1) % 10) + page[at + 1 :]), number[0]
            tried += 1
    assert tried > 90


def test_the_default_is_credited_with_its_weighing_rounds_alone() -> None:
    """On both pages; a page that leaves them out in one place is noticed."""
    page = PAGE.read_text(encoding="utf-8")
    places = list(re.finditer(r"with\s+12\s+weighing\s+rounds", page))
    assert len(places) == 3
    for at in places:
        assert len(odd(page[: at.start()] + page[at.end() :])) == 1
    claims = (ROOT / "docs/papers/feddisk.md").read_text(encoding="utf-8")
    drawn = [line for line in claims.splitlines() if "cohort=1: true" in line]
    assert [ROUNDS in line for line in drawn] == [True]
