"""The shapes that charts are made of, as SVG text. All names are escaped.

Colours are variables of the page's style sheet (`looks.THEME`), which change on a dark page.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence

from fedshift.errors import visible
from fedshift.report.looks import DASHES, FILLS, MARKERS, THEME, Look

INK = "var(--ink)"
# Height of a line above a drawing of a sheet, and about the width of its letters, in pixels.
CAPTION, LETTER = 20.0, 8.0
Point = tuple[float, float]


def escape(text: str) -> str:
    """Text for an XML or HTML element or attribute, without characters that XML forbids."""
    return html.escape(visible(text, keep="\n\t"))


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    # Hundredths of a pixel are enough. Rounding also hides differences in last digits between
    # machines, so that files are the same bytes.
    return f"{value:.2f}".rstrip("0").rstrip(".")


def document(title: str, width: float, height: float, body: Sequence[str]) -> str:
    """The whole drawing, with its title as the text alternative."""
    box = f"{number(width)} {number(height)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {box}" width="{number(width)}" height="{number(height)}" '
        f'font-family="system-ui, sans-serif"><title>{escape(title)}</title>'
        + "".join(body)
        + "</svg>"
    )


def alone(drawing: str) -> str:
    """The drawing as a file of its own, on white paper."""
    # There is no style sheet that would set the variables of colours, so they are filled in here.
    plain = re.sub(r"var\(--(\w+)\)", lambda m: THEME[m[1]][0], drawing)
    return plain.replace("</title>", '</title><rect width="100%" height="100%" fill="#fff"/>', 1)


def sheet(title: str, drawings: Sequence[tuple[str, str]]) -> str:
    """(drawing, caption) below one another, as one drawing; each keeps its size and its title."""
    sizes = [re.search(r'viewBox="0 0 (\S+) (\S+)"', drawing) for drawing, _ in drawings]
    widths, heights = ([float(size[i]) for size in sizes if size] for i in (1, 2))
    body, top = [], 0.0
    for (drawing, caption), width, height in zip(drawings, widths, heights, strict=True):
        for line in textwrap.wrap(caption, int(width / LETTER)):
            body.append(text(4, top + 16, line, "start", 12, bold=True))
            top += CAPTION
        body.append(drawing.replace("<svg ", f'<svg y="{number(top)}" ', 1))
        top += height
    return alone(document(title, max(widths), top, body))


def text(
    x: float,
    y: float,
    words: str,
    anchor: str,
    size: float,
    bold: bool = False,
    *,
    ink: str = INK,
    turn: float = 0,
) -> str:
    """Text at a point; `turn` in degrees about that point."""
    weight = ' font-weight="700"' if bold else ""
    rotate = f' transform="rotate({number(turn)} {number(x)} {number(y)})"' if turn else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{number(size)}" '
        f'fill="{ink}"{weight}{rotate}>{escape(words)}</text>'
    )


def rect(
    x: float, y: float, width: float, height: float, fill: str, note: str = "", style: str = ""
) -> str:
    """A rectangle; note: its title, for a mouse and for screen readers; style: more attributes."""
    # Rounding may leave a height just below 0, which SVG refuses.
    size = f'width="{number(max(0.0, width))}" height="{number(max(0.0, height))}"'
    start = f'<rect x="{number(x)}" y="{number(y)}" {size} fill="{fill}"{style and " " + style}'
    return f"{start}><title>{escape(note)}</title></rect>" if note else f"{start}/>"


def bar(x: float, y: float, width: float, height: float, look: Look, note: str = "") -> str:
    """A bar; if another method has its colour, it is pale, with an edge dashed as its line."""
    fill, dash = FILLS[look.style], DASHES[look.style]
    edge = f'fill-opacity="{fill}" stroke="{look.ink}" stroke-dasharray="{dash}"'
    return rect(x, y, width, height, look.ink, note, edge if look.style else "")


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1) -> str:
    """A straight line."""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} stroke="{stroke}" stroke-width="{number(width)}"/>'


def whisker(x1: float, y1: float, x2: float, y2: float) -> str:
    """An error bar: dark with a light rim, to be seen on bars of any colour."""
    return line(x1, y1, x2, y2, "var(--paper)", 5) + line(x1, y1, x2, y2, INK, 2)


def path(points: Sequence[Point]) -> str:
    """Points in the form of SVG's attribute `points`."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


def polyline(points: Sequence[Point], look: Look, *, thin: bool = False) -> str:
    """A line through points; a thin one is dotted."""
    pattern = "1.5 2.5" if thin else DASHES[look.style]
    dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
    width = 1.3 if thin else 2
    return (
        f'<polyline points="{path(points)}" fill="none" stroke="{look.ink}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def band(upper: Sequence[Point], lower: Sequence[Point], look: Look, opacity: float) -> str:
    """The area between two lines with the same x."""
    around = path([*upper, *reversed(lower)])
    return f'<polygon points="{around}" fill="{look.ink}" fill-opacity="{number(opacity)}"/>'


def dot(centre: Point, radius: float, look: Look, *, hollow: bool, note: str = "") -> str:
    """The marker of a look, or only its outline if `hollow`."""
    (x, y), shape = centre, MARKERS[look.style]
    style = (
        f'fill="none" stroke="{look.ink}" stroke-width="2.5"' if hollow else f'fill="{look.ink}"'
    )
    if shape:
        name = "polygon"
        start = f'<polygon points="{path([(x + radius * a, y + radius * b) for a, b in shape])}"'
    else:
        name, start = "circle", f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
    return (
        f"{start} {style}><title>{escape(note)}</title></{name}>" if note else f"{start} {style}/>"
    )
