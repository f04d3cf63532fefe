"""Checks of the rows of docs/papers against the results' pages that they link to.

A row is `claim | printed | seen here | by | verdict`. The cell "seen here" has phrases, parted by
"; " or "<br>". A phrase is a method and its cell of a results' table, under a place that stays
until the next one:

    Fashion-MNIST C=3: FedPALS 93.4 ± 7.8 (paper 92.4 ± 2.1, 8 seeds); FedPALS minus FedAvg +9.3 ...

In tables without methods it is a column's head and its cell, under the row's first cell, or its
first two. A phrase in quotation marks stands on the page as it is. Others have no digits. The cell
"printed" says where, then ".<br>" and such phrases of the printed tables (`protocols/*.csv`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedshift_papers.protocols.study import printed_rows

ROOT = Path(__file__).parents[2]
HEAD = "| claim | printed | seen here | by | verdict |"
VERDICTS = ("seen", "not seen", "in part", "not measured here")
# Names with digits: data sets, networks, splits and parts of papers. Other digits are numbers.
NAMES = re.compile(
    r"CIFAR-(100|20|10)\b|ResNet-(18|50)\b|\b(C|beta|lambda) = [\d.]+|Dir\([\d.]+\)|"
    r"(Table|Figure|Section|Theorem|Proposition|Equation) [\d.]*[IV]*(-[A-Z])?[ab]?\b"
)
WHERE = re.compile(r"(ours|abstract|text|summary|(Table|Figure|Theorem|Proposition|Section) \S+)")

Table = list[dict[str, str]]


@dataclass(frozen=True)
class Claim:
    """A row of a page, and the page."""

    page: Path
    claim: str
    printed: str
    seen: str
    by: str
    verdict: str

    @property
    def links(self) -> list[Path]:
        """The pages of results that the row links to."""
        return [self.page.parent / to for to in re.findall(r"\]\(([^)#]+)[^)]*\)", self.by)]

    @property
    def command(self) -> str:
        """The command or the test named in the row."""
        (command,) = re.findall(r"`([^`]+)`", self.by)
        return str(command)

    @property
    def measured(self) -> bool:
        return not self.verdict.startswith("not measured here")


def split_cells(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def claims(page: Path, text: str | None = None) -> list[Claim]:
    """All rows of a page's tables of claims."""
    lines = (page.read_text() if text is None else text).splitlines()
    rows, inside = [], False
    for line in lines:
        inside = line == HEAD or (inside and line.startswith("|"))
        if inside and line != HEAD and not line.startswith("| ---"):
            rows.append(Claim(page, *split_cells(line)))
    return rows


@cache
def tables(text: str) -> list[Table]:
    """The tables of a results' page, a dictionary per row."""
    blocks = []
    for block in re.split(r"\n(?!\|)", text):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if len(lines) > 2:
            head = split_cells(lines[0])
            rows = [dict(zip(head, split_cells(line), strict=False)) for line in lines[2:]]
            blocks.append(rows)
    return blocks


def numbers_in(text: str) -> bool:
    """Whether a text has digits that are no part of a name."""
    return re.search(r"\d", NAMES.sub("", text)) is not None


def phrases(cell: str) -> Iterator[tuple[str, str]]:
    """(place, phrase) of each phrase of a cell."""
    place = ""
    for piece in filter(None, re.split("; |<br>", cell)):
        both = re.fullmatch(r'([^:"]+): (.+)', piece)
        place, phrase = (both[1], both[2]) if both else (place, piece)
        yield place, phrase


def remarks(row: Mapping[str, str]) -> set[str]:
    """Texts allowed in brackets after a value: the paper's value, the seeds, the table's notes."""
    seeds = len(re.findall(r"`\w+`", row.get("Runs by seed", "")))
    usual = {f"paper {row['Paper']}", f"{seeds} seeds" if seeds > 1 else "1 seed"}
    return usual | set(row.get("Differs from the paper", "").split(", "))


def is_cell(phrase: str, row: Mapping[str, str]) -> bool:
    """Whether a phrase is this row's: "METHOD VALUE", or "METHOD minus BASELINE VALUE"."""
    values = [row["Here"]]
    for head, cell in row.items():
        if head.startswith("Minus "):
            values.append(f"{head.removesuffix(', paired').replace('Minus', 'minus', 1)} {cell}")
    for value in values:
        begun = f"{row['Method']} {value}"
        if phrase == begun:
            return True
        rest = phrase.removeprefix(begun)
        if rest != phrase and rest.startswith(" (") and rest.endswith(")"):
            return set(rest[2:-1].split(", ")) <= remarks(row)
    return False


def stands(place: str, phrase: str, text: str) -> bool:
    """Whether a page of results contains this phrase."""
    if phrase.startswith('"') and phrase.endswith('"'):
        return phrase.strip('"') in " ".join(text.split())
    for table in tables(text):
        for row in table:
            cells = list(row.items())
            if "Method" in row and "Here" in row:
                if place == f"{row['Data']} {row['Split']}" and is_cell(phrase, row):
                    return True
            elif place in _places(cells) and phrase in {f"{h.lower()} {c}" for h, c in cells[1:]}:
                return True
    return False


def _places(cells: Sequence[tuple[str, str]]) -> set[str]:
    """The names allowed for a row of a table without methods."""
    (_, first), (head, second), *_ = cells
    return {first, f"{first}, {second}", f"{first}, {head.lower()} {second}"}


def is_printed(place: str, phrase: str, paper: str) -> bool:
    """Whether a printed table of the paper has this phrase, with the place's words as cells."""
    folder = ROOT / "fedshift_papers/protocols"
    for path in sorted(folder.glob(f"{paper}_*.csv")):
        for row in printed_rows(path.stem):
            words = {w for item in row.items() for c in item if c for w in re.split(r"[ _]", c)}
            if set(place.split()) <= words and phrase in _printed_phrases(row):
                return True
    return False


def _printed_phrases(row: Mapping[str, str]) -> set[str]:
    value = row.get("mean") or row["value"]
    value += f" ± {row['std']}" if row.get("std") else ""
    label = row.get("method") or f"delta {row['delta']}"
    label += f", lambda {row['lambda']}" if row.get("lambda") else ""
    return {f"{label} {value}"}


def wrong(row: Claim, paper: str) -> list[str]:
    """The phrases of a row that no page or printed table has; empty if the row is right."""
    verdict = row.verdict.partition("forecast: ")[0]
    faults = [f"a number in: {cell}" for cell in (row.claim, verdict) if numbers_in(cell)]
    where, _, numbers = row.printed.partition(".<br>")
    if not all(WHERE.fullmatch(part) for part in where.split(", ")):
        faults.append(f"where is this printed: {where}")
    for place, phrase in phrases(numbers):
        if not is_printed(place, phrase, paper):
            faults.append(f"not printed: {place}: {phrase}")
    texts = [path.read_text() for path in row.links]
    for place, phrase in phrases(row.seen):
        if not numbers_in(phrase) and '"' not in phrase:
            continue
        if not any(stands(place, phrase, text) for text in texts):
            faults.append(f"not in the results: {place}: {phrase}")
    return faults
