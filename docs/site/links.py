"""Files that the documentation links to outside docs/ become part of the site.

A link is written as GitHub reads it: `../ARCHITECTURE.md`, `../examples/loopback/README.md`. A
Markdown file becomes a page, together with the files that it links to; any other file is copied.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
PLACE = "repository/"  # the folder of the site for what lies outside docs/


def links_out(text: str, source: str) -> set[str]:
    """Paths from docs/ ("../results/kills.md") of the files outside that a page links to."""
    targets = {match["to"].partition("#")[0] for match in LINK.finditer(CODE.sub("", text))}
    paths = {normpath(join(dirname(source), target)) for target in targets if ":" not in target}
    return {path for path in paths if path.startswith("../") and not path.startswith("../docs/")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    docs = Path(config.docs_dir)
    waiting = {file.src_uri for file in files.documentation_pages()}
    while waiting:
        source = waiting.pop()
        for path in links_out((docs / source).read_text(encoding="utf-8"), source):
            if files.get_file_from_path(path) or not (docs / path).is_file():
                continue  # a file that is not there is a broken link, which MkDocs reports
            added = outside(path, docs, config)
            files.append(added)
            if added.is_documentation_page():
                waiting.add(path)
    return files


def outside(path: str, docs: Path, config: MkDocsConfig) -> File:
    """A file from outside docs/; the navigation may name it, but need not."""
    file = File.generated(
        config, path, abs_src_path=str((docs / path).resolve()), inclusion=InclusionLevel.NOT_IN_NAV
    )
    name = PLACE + path.removeprefix("../")
    file.dest_uri = re.sub(r"\.md$", ".html", name) if file.is_documentation_page() else name
    return file


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """In pages from outside, links to docs/ start at the site's root; folders are no pages."""
    source = page.file.src_uri
    if not source.startswith("../"):
        return markdown
    page.meta["search"] = {"boost": 0.1}  # below the pages that explain

    def linked(match: re.Match[str]) -> str:
        if ":" in match["to"]:
            return match[0]
        path = normpath(join(dirname(source), match["to"]))
        if (Path(config.docs_dir) / path).is_dir():
            return match["text"]
        if path.startswith("../docs/"):
            return f"[{match['text']}](/{path.removeprefix('../docs/')})"
        return match[0]

    return LINK.sub(linked, markdown)
