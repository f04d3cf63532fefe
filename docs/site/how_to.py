"""The how-tos stand in the navigation in the order of the list in docs/how-to/README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

GROUP = re.compile(r"## (.+)")
PAGE = re.compile(r"\]\(([\w-]+\.md)[)#]")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the other pages of its folder behind the page that is `How-to` in mkdocs.yml."""
    for section in config.nav or []:
        if "How-to" in section:
            first = Path(config.docs_dir) / section["How-to"]
            section["How-to"] = [section["How-to"], *pages_of(first)]
    return config


def pages_of(first: Path) -> list[Any]:
    """The list's groups with their pages, then pages that the list does not name."""
    groups: dict[str, list[str]] = {}
    others = {page.name for page in first.parent.glob("*.md")} - {first.name}
    title = ""
    for line in first.read_text(encoding="utf-8").splitlines():
        if group := GROUP.fullmatch(line):
            title = group[1]
        for name in PAGE.findall(line) if line.startswith("- ") else ():
            if name in others:  # a page of several tasks stands with the first of them
                others.remove(name)
                groups.setdefault(title, []).append(f"{first.parent.name}/{name}")
    return [
        *({name: pages} for name, pages in groups.items()),
        *(f"{first.parent.name}/{name}" for name in sorted(others)),
    ]
