"""The documentation site: build it, and try its links, its reference and its search."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fedshift

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^from (fedshift[\w.]*) import (\w+(?:, \w+)*)$", re.M)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("mkdocs", path=str(Path(sys.executable).parent)),
        reason="MkDocs is not installed (extra docs)",
    ),
]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """`make docs` of a checkout, into the folder `site`."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


@dataclass
class Html(HTMLParser):
    """Ids, links and assets of a page."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    assets: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        if tag == "link" or "src" in values:
            self.assets.add(values.get("src", values.get("href", "")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {path: Html(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert to.is_file(), (path.name, link)
            if parts.fragment and to.suffix == ".html":
                assert unquote(parts.fragment) in pages[to].ids, (path.name, link)


def test_a_page_opens_without_a_network(site: Path, pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        for asset in page.assets:
            parts = urlsplit(asset)
            assert not parts.netloc, (path.name, asset)
            there = (path.parent / unquote(parts.path)).is_file()
            assert there or parts.scheme == "data", (path.name, asset)
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text()
        assert "@import" not in sheet.read_text()


def test_every_name_that_pages_use_is_in_the_reference(pages: dict[Path, Html]) -> None:
    """The names of `fedshift`, and the functions and classes that Python of docs/ imports."""
    ids = {
        one for path, page in pages.items() if path.parent.name == "reference" for one in page.ids
    }
    assert not {name for name in fedshift.__all__ if f"fedshift.{name}" not in ids}
    last = {one.rpartition(".")[2] for one in ids}
    for page in (ROOT / "docs").rglob("*.md"):
        for module, names in IMPORT.findall(page.read_text(encoding="utf-8")):
            for name in names.split(", "):
                of = getattr(importlib.import_module(module), name)
                documented = inspect.isclass(of) or inspect.isfunction(of)
                assert name in last or not documented, (page.name, module, name)


def test_the_search_has_every_page(site: Path, pages: dict[Path, Html]) -> None:
    """Also when opened from a folder: browsers read no JSON there, so the index is a script."""
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {str(path.relative_to(site)) for path in pages} <= places
    entries = [e for e in index["docs"] if "FedPALS" in e["title"] + e["text"]]
    about = {entry["location"].partition("#")[0] for entry in entries}
    assert {"methods/fedpals.html", "reference/label-shift.html"} <= about


FAULTS = {
    "[a page](gone.md)": "gone.md",
    "[a heading](fit.md#gone)": "does not contain an anchor",
    "[a file](../examples/gone.py)": "gone.py",
    "[a folder](../examples)": "unrecognized relative link",
}


def test_broken_links_and_lost_pages_fail_the_build(tmp_path: Path) -> None:
    for path in ROOT.iterdir():
        if path.name in {"fedshift", "results", "examples"} or path.suffix == ".md":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "compare.md").open("a", encoding="utf-8") as page:
        page.write("\n\n".join(["", *FAULTS]))
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = done.stderr.split("WARNING")[1:]
    assert len(warnings) == len(FAULTS) + 1
    for message in (*FAULTS.values(), "lost.md"):
        assert any(message in warning for warning in warnings), message
