"""Every recipe of docs/how-to runs as it is printed, and the list leads to each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.following_pages import follow

DOCS = Path(__file__).parents[2] / "docs"
INDEX = DOCS / "how-to" / "README.md"
PAGES = sorted(set(INDEX.parent.glob("*.md")) - {INDEX})
TASKS = 37
# Pages that take less than half a second, and the one of data at sites; all others are slow.
QUICK = {
    "deploy-own-data",
    "diagnose-from-counts",
    "network",
    "resume",
    "trackers",
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem in QUICK else [pytest.mark.slow])
        for p in PAGES
    ],
)
def test_recipes_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")  # as in a checkout
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))  # where HuggingFace keeps what it reads
    follow(page.read_text(), monkeypatch)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_list_leads_to_every_recipe() -> None:
    links = re.findall(r"^- \[[^\]]+\]\(([^)#]+)#?([^)]*)\)$", INDEX.read_text(), re.M)
    assert len(links) == TASKS
    for page in (DOCS / "tutorial.md", DOCS / "README.md", DOCS.parent / "README.md"):
        assert f"{TASKS} tasks" in page.read_text(), page
    here = [link for link in links if not link[0].startswith("../")]
    assert len(here) == len(set(here))
    for page, anchor in links:
        assert not anchor or anchor in anchors(INDEX.parent / page), f"{page}#{anchor}"
    assert {page for page, _ in links} >= {p.name for p in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_recipe_names_the_page_that_says_all(page: Path) -> None:
    assert "](../" in page.read_text()


SAVED = "```python\n# one.py\nONE = 1\n```\n"


def test_a_page_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    page = "```python\nfrom one import ONE\n\nprint(ONE, 99.7)\n```\n\nThis prints:\n\n"
    follow(SAVED + page + "```console\n1 99.8\n```\n", monkeypatch)
    for wrong in ("text\n1 99.8", "console\n1 70.1", "console\none 99.7"):
        with pytest.raises(AssertionError):
            follow(f"{SAVED}{page}```{wrong}\n```\n", monkeypatch)


def test_a_section_sees_the_top_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    top, first = "```python\na = 1\n```\n", "## B\n\n```python\nb = a\n```\n"
    follow(f"{top}{first}## C\n\n```python\nassert a == 1\n```\n", monkeypatch)
    with pytest.raises(NameError):
        follow(f"{top}{first}## C\n\n```python\nprint(b)\n```\n", monkeypatch)


@pytest.mark.parametrize(
    "block",
    [
        "sh\nfedshift run absent.toml\n",
        "sh\nls\n",
        "toml\nname = 'x'\n",
        "python\nraise KeyError\n",
    ],
)
def test_what_fails_on_a_page_is_seen(
    block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, KeyError)):
        follow(f"```{block}```\n", monkeypatch)
