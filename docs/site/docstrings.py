"""How docstrings become Markdown: lists of arguments, examples, and links to other names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

# "name    what it is" or "one, other (both)  what they are"; lines that go on are indented.
ENTRY = re.compile(r"(?P<names>[\w\"'][\w\"',.*=()\[\] ]*?)(?: {2,})(?P<text>\S.*)")
NUMBERED = re.compile(r"\d+\. ")
LABEL = re.compile(r"(Reference|Note|Source):")
# What is shown as it is written: code in backticks, on one line or two.
CODE = re.compile(r"(`[^`]+`)")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
PAGE = re.compile(r"\bdocs/([\w-]+)\.md")
ERROR = re.compile(r"\b(?:Input|Data|Network|Training|Fedshift)Error\b")


class Markdown(griffe.Extension):
    """Rewrites every docstring; the text in the code stays plain."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown_of(obj.docstring.value, obj)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _without_notes(pkg)


def markdown_of(text: str, of: griffe.Object) -> str:
    """A docstring as Markdown; names in backticks are linked where the reference has them."""
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join("\n".join(_lines(block.split("\n"), of)) for block in blocks)


def _lines(block: list[str], of: griffe.Object) -> Iterator[str]:
    if block[0].startswith(">>> "):
        yield from ["```pycon", *block, "```"]
        return
    if all(line.startswith(("    ", "|")) for line in block):  # formulas, tables
        yield from block
        return
    inside = False  # of a list
    for line in _shown(block, of):
        if label := LABEL.match(line):
            yield f"\n**{label[1]}**:{line[label.end() :]}"
            continue
        if line.startswith("Raises "):
            yield ""
        entry, numbered = ENTRY.fullmatch(line), NUMBERED.match(line)
        starts = bool(entry or numbered)
        if starts != inside and not line.startswith(" "):
            yield ""  # a list begins or ends
            inside = starts
        if entry:
            yield f"- **{entry['names']}**: {entry['text']}"
        else:
            yield f"    {line.strip()}" if inside and not starts else line


def _shown(block: list[str], of: griffe.Object) -> list[str]:
    """Lines whose marks (*, <, [a][b]) are no Markdown, with links from names."""
    parts = CODE.split("\n".join(block))
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = NAME.sub(lambda match: _link(match[1], match[0], of), part)
        else:
            part = part.replace("<", "&lt;").replace("*", r"\*").replace("][", r"]\[")
            part = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", part)
            part = PAGE.sub(r"[\g<0>](../\1.md)", part)
            parts[i] = ERROR.sub(lambda match: _link(match[0], match[0], of), part)
    return "".join(parts).split("\n")


def _link(name: str, shown: str, of: griffe.Object) -> str:
    """A link that becomes plain text where no page has the name."""
    try:
        path = of.resolve(name)
    except griffe.NameResolutionError:
        path = f"fedshift.errors.{name}" if ERROR.fullmatch(name) else ""
    if not path or path == of.path:
        return shown
    return f'<autoref identifier="{path}" optional>{shown}</autoref>'


def _without_notes(package: griffe.Module) -> None:
    """Options of recipes: `Annotated[float, "the pull"]` becomes float, and the text an entry."""
    if "recipes" not in package.members:  # a package beside the core
        return
    members = package["recipes.traits"].members.items()
    notes = {name: m.value for name, m in members if not m.is_alias and m.is_attribute}
    for module in package["recipes"].modules.values():
        for function in module.functions.values():
            entries = []
            for option in function.parameters:
                noted = option.annotation
                if isinstance(noted, griffe.ExprName) and noted.name in notes:
                    noted = notes[noted.name]
                if isinstance(noted, griffe.ExprSubscript) and str(noted.left) == "Annotated":
                    option.annotation, *others = noted.slice.elements
                    texts = [str(v)[1:-1] for v in others if str(v)[:1] in "'\""]
                    entries += [f"{option.name}  {text}" for text in texts]  # others are checks
            if entries:
                first, _, rest = function.docstring.value.partition("\n\n")
                function.docstring.value = "\n\n".join([first, "\n".join(entries), rest])
