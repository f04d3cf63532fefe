"""The documents' examples are executed, and their statements compared with the code."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedshift import recipes
from fedshift.experiments.config.schema import Config, Section
from fedshift.recipes import Setting
from fedshift.record.summary import Final, Summary
from fedshift.sweeps.table import NUMBERS, RUNS
from support.shown import alike

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "results").rglob("*.md"))
PYTHON = re.compile(r"```python\n(.*?)```", re.S)
OUTPUT = re.compile(r"\s*```(text|console)\n(.*?)```", re.S)


LONG = {"README.md", "central_tuning.md", "compare.md", "fit.md", "routing.md", "tutorial.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.name in LONG else [])
        for p in PAGES
        if PYTHON.search(p.read_text()) and p.parent.name != "how-to"  # tests/docs/test_how_to.py
    ],
)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All Python of a page, in order, in one namespace; output blocks that follow must match.

    Blocks of `text` match exactly, those of `console` but for the last digits of numbers.
    """
    monkeypatch.chdir(tmp_path)
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    text = page.read_text()
    if "fedshift.flower" in "".join(PYTHON.findall(text)):
        pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    if '"patients.csv"' in "".join(PYTHON.findall(text)):
        pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra dev)")
        runpy.run_path(str(ROOT / "examples/breast_cancer.py"))["write"]("patients.csv")
    for match in PYTHON.finditer(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(match.group(1), vars(module))
        printed, shown = out.getvalue(), OUTPUT.match(text[match.end() :])
        if shown and shown[1] == "text":
            assert printed == shown[2]
        elif shown and not alike(shown[2], printed):
            assert printed == shown[2], "other words, or numbers that are far apart"


def test_numbers_far_apart_and_other_words_are_seen() -> None:
    shown = "accuracy  91.7 %\n...\ngap 0.426\n"
    assert alike(shown, "accuracy 92.5 %\none line\nand another\ngap 0.430\n")
    for other in ("accuracy 94 %\ngap 0.426\n", "accuracy 91.7 %\ngap 0.526\n"):
        assert not alike(shown, other)
    assert not alike(shown, "recall 91.7 %\ngap 0.426\n")
    assert not alike(shown, "accuracy 91.7 %\ngap 0.426\nmore\n")


def keys(section: type[Section], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            names |= keys(inner, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    for key in keys(Config):
        section, _, name = key.rpartition(".")
        mentions = [row for row in rows if f"`{key}`" in row]
        mentions += [row for row in rows if f"`{section}." in row and f"`{name}`" in row]
        assert mentions, key


def test_every_method_has_a_page_or_a_section() -> None:
    pages = " ".join(p.read_text() for p in (ROOT / "docs" / "methods").glob("*.md")).lower()
    for one in recipes.recipes():
        assert one.name in pages.replace("-", ""), f"name {one.name} on a page, as {one.page}"


def test_every_option_of_a_method_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    table = text.partition("## Options of the methods")[2].partition("\n## ")[0]
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    rows = {name: row[2] for row in cells for name in re.findall(r"`(\w+)`", row[1])}
    for one in recipes.recipes():
        assert one.name in rows, f"{one.name} needs a row in the table of docs/configuration.md"
        for option in one.options:
            assert f"`{option}`" in rows[one.name], f"{one.name}: its row lacks {option}"


def listed(page: str, text: str) -> list[str]:
    """The names in the first cells of the tables that follow `text` on a page, of its section."""
    after = (ROOT / "docs" / page).read_text().split(text, 1)[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in after.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]


def test_every_page_is_listed() -> None:
    """Those of how-to in the table of their folder, which tests/docs/test_how_to.py reads."""
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\) \|", index.read_text(), flags=re.M)
    pages = {str(p.relative_to(index.parent)) for p in index.parent.rglob("*.md")}
    recipes = {f"how-to/{p.name}" for p in (index.parent / "how-to").glob("*.md")}
    assert sorted(links) == sorted(pages - recipes - {"README.md"} | {"how-to/README.md"})
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


def test_every_field_of_a_setting_is_listed() -> None:
    section = listed("extending.md", "## A method of your own")
    assert [f.name for f in fields(Setting)] == section[: len(fields(Setting))]


def test_every_column_of_a_comparison_is_listed() -> None:
    both = listed("compare.md", "have a row per method")
    assert {*NUMBERS, *RUNS} <= set(both)


def test_attributes_of_a_summary_are_there() -> None:
    names = listed("fit.md", "`result.summary` has attributes")
    assert "final.target_accuracy" in names
    for name in names:
        kind: Any = Summary
        for part in name.split("."):
            assert hasattr(kind, part) or part in {f.name for f in fields(kind)}, name
            kind = Final if part == "final" else kind


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
