"""Pages of papers: every number is one of the results, every target has its row."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedshift.sweeps.store import Store
from fedshift_papers.protocols.study import Column, Study, narrowed
from fedshift_papers.reproduce.catalogue import folders_with, target, targets
from fedshift_papers.reproduce.plan import forecast
from fedshift_papers.reproduce.reproduce import Request, make_plan
from support.paper_claims import HEAD, ROOT, VERDICTS, Claim, claims, numbers_in, tables, wrong

# Pages, and the papers' names in `fedshift reproduce` and in protocols/*.csv.
PAPERS = {"fedpals": "fedpals", "feddrm": "feddrm", "feddisk": "made", "labelsets": "labelsets"}
PAGES = {name: ROOT / "docs/papers" / f"{name}.md" for name in PAPERS}
ROWS = [(PAPERS[name], row) for name, page in PAGES.items() for row in claims(page)]
UNMEASURED = [(paper, row) for paper, row in ROWS if not row.measured]


def named(rows: Iterable[tuple[str, Claim]]) -> list[object]:
    """Parameters of a test, one a row."""
    return [pytest.param(p, r, id=f"{r.page.stem}: {r.claim[:50]}") for p, r in rows]


@pytest.mark.parametrize(("paper", "row"), named(ROWS))
def test_a_row_is_what_the_results_say(paper: str, row: Claim) -> None:
    assert wrong(row, paper) == []
    assert re.match(r"(" + "|".join(VERDICTS) + r")(:|$)", row.verdict)
    if row.measured:
        assert made_by(row)
    else:
        assert (row.seen, row.links) == ("–", [])
        assert columns(row.command) is not None


@pytest.mark.parametrize("cell", ["seen", "printed"])
def test_any_other_number_would_be_seen(cell: str) -> None:
    """Each number of each row in turn with another last digit."""
    tried = 0
    for paper, row in ROWS:
        text = getattr(row, cell)
        for number in re.finditer(r"\d+\.\d+", text):
            if cell == "printed" and "<br>" not in text[: number.start()]:
                continue  # the number of a theorem
            other = f"{number[0][:-1]}{(int(number[0][-1]) + 1) % 10}"
            changed = text[: number.start()] + other + text[number.end() :]
            assert wrong(replace(row, **{cell: changed}), paper), (row.claim, number[0])
            tried += 1
    assert tried > 50


def test_other_places_methods_and_words_would_be_seen() -> None:
    paper, row = ROWS[0]
    for old, new in (
        ("C=3", "C=2"),
        ("FedAvg", "FedProx"),
        ("8 seeds", "3 seeds"),
        ("FedPALS minus", "FedAvg minus"),
    ):
        assert wrong(replace(row, seen=row.seen.replace(old, new)), paper)
    assert wrong(replace(row, verdict="seen: by 9 points"), paper)
    assert wrong(replace(row, claim="FedPALS has 93 %"), paper)
    assert wrong(replace(row, seen="ahead on 8 seeds"), paper)
    assert wrong(replace(row, printed="Table 1.<br>PACS C=6: FedAvg 73.5 ± 1.6"), paper)
    assert wrong(replace(row, printed="somewhere"), paper)
    assert not made_by(replace(row, by=row.by.replace("table1`", "table2`")))
    assert not made_by(replace(row, by="`tests/docs/test_paper_pages.py::test_nothing`"))


def made_by(row: Claim) -> bool:
    """Whether the first page has the command, or the shown parts of it; or the test."""
    name, _, function = row.command.partition("::")
    if function:
        tree = ast.parse((ROOT / name).read_text())
        return function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    page = row.links[0].read_text()
    return all(part in page for part in row.command.split(" ... "))


def columns(command: str) -> Sequence[Column] | None:
    """The columns of a `fedshift reproduce` command; none for a picture. May raise InputError."""
    words = shlex.split(command)
    assert words[:2] == ["fedshift", "reproduce"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    one = target(words[2])
    if not isinstance(one, Study):
        return ()
    datasets, splits = ([given[o]] if o in given else [] for o in ("--dataset", "--split"))
    return narrowed(one, datasets, splits, ()).columns


@pytest.mark.parametrize(("paper", "row"), named(UNMEASURED))
def test_what_is_measured_is_not_listed_as_missing(paper: str, row: Claim) -> None:
    """A row whose cells are in results/ by now needs its numbers."""
    assert there(row.command) == set()


def there(command: str) -> set[str]:
    """The columns of a command that are in a table of results/."""
    wanted = {f"{c.title} {c.split}" for c in columns(command) or ()}
    pages = [
        (ROOT / folder / "table.md").read_text() for folder in folders_with(command.split()[2])
    ]
    rows = (row for page in pages for table in tables(page) for row in table if "Here" in row)
    return wanted & {f"{row['Data']} {row['Split']}" for row in rows}


def test_measured_columns_are_found() -> None:
    assert there("fedshift reproduce fedpals/table1 --dataset cifar-10") == {
        "CIFAR-10 C=3", "CIFAR-10 C=2", "CIFAR-10 beta=0.1",
    }  # fmt: skip
    command = "fedshift reproduce fedpals/corrected --dataset fashion-mnist --split"
    assert there(f"{command} C=3") == {"Fashion-MNIST C=3"}


@pytest.mark.parametrize("name", PAPERS)
def test_every_target_and_every_folder_has_a_row(name: str) -> None:
    rows = claims(PAGES[name])
    ours = {t for t in targets() if t.partition("/")[0] == PAPERS[name]}
    commands = [r.command.split() for r in rows]
    assert {c[2] for c in commands if c[:2] == ["fedshift", "reproduce"]} == ours
    folders = {ROOT / folder for one in ours for folder in folders_with(one)}
    linked = {path.resolve().parent for row in rows for path in row.links}
    assert folders <= linked


@pytest.mark.slow
def test_a_forecast_is_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Column, "missing", lambda column: None)  # the data need not be here
    for _, row in UNMEASURED:
        one = target(row.command.split()[2])
        if not isinstance(one, Study):
            continue
        named = row.verdict.partition("forecast: ")[2]
        assert bool(named) == bool(one.seconds), row.claim
        if named:
            text = forecast(make_plan(Request(one.name, tmp_path)), Store(tmp_path), 1)
            assert text is not None
            assert text.startswith(f"forecast: {named}, ")


@pytest.mark.parametrize("name", PAPERS)
def test_all_numbers_of_a_page_are_in_its_rows(name: str) -> None:
    """Beside its tables of claims a page has neither numbers, but for arXiv's, nor tables."""
    text = PAGES[name].read_text()
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert not numbers_in(re.sub(r"\]\([^)]+\)|arXiv\s+\d+\.\d+", "", prose))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == len(claims(PAGES[name])) + 2 * lines.count(HEAD)
