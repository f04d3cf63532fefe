"""What the documents say is executed or compared with the code."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedshift import recipes
from fedshift.experiments.config import Config, Section

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "results").rglob("*.md"))
PYTHON = re.compile(r"```python\n(.*?)```", re.S)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if PYTHON.search(p.read_text())], ids=lambda p: p.name
)
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python of a page, in order, in one namespace; output blocks that follow must match."""
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their module up
    text = page.read_text()
    if "fedshift.flower" in "".join(PYTHON.findall(text)):
        pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    for match in PYTHON.finditer(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(match.group(1), vars(module))
        told = re.match(r"\s*```text\n(.*?)```", text[match.end() :], re.S)
        if told:
            assert out.getvalue() == told.group(1)


def keys(section: type[Section], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found |= keys(inner, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    for key in keys(Config):
        section, _, name = key.rpartition(".")
        told = [row for row in rows if f"`{key}`" in row]
        told += [row for row in rows if f"`{section}." in row and f"`{name}`" in row]
        assert told, key


def test_every_method_has_a_page_or_a_section() -> None:
    pages = " ".join(p.read_text() for p in (ROOT / "docs" / "methods").glob("*.md")).lower()
    for name in recipes.__all__:
        assert name in pages.replace("-", ""), name


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
