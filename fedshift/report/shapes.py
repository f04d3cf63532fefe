"""The shapes of the charts as SVG text; all names are escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from fedshift.errors import visible

DASHES = ("", "7 3", "2 3", "9 3 2 3")
INK = "#1f2933"


def escape(text: str) -> str:
    """Text for an XML or HTML element or attribute, without characters that XML forbids."""
    return html.escape(visible(text, keep="\n\t"))


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    # Hundredths of a pixel: short files, and the same bytes on every machine.
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
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str = "none",
    stroke_width: float = 0.0,
    note: str = "",
) -> str:
    """A rectangle; `note` is its text alternative."""
    edge = f' stroke="{stroke}" stroke-width="{number(stroke_width)}"' if stroke_width else ""
    # Rounding may leave a height just below 0, which SVG refuses.
    size = f'width="{number(width)}" height="{number(max(0.0, height))}"'
    start = f'<rect x="{number(x)}" y="{number(y)}" {size} fill="{fill}"{edge}'
    return f"{start}><title>{escape(note)}</title></rect>" if note else f"{start}/>"


def line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    """A thin straight line."""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} stroke="{stroke}" stroke-width="1"/>'


def polyline(points: Sequence[tuple[float, float]], stroke: str, dash: int) -> str:
    """A line through points, dashed as DASHES says."""
    pattern = DASHES[dash % len(DASHES)]
    dashes = f' stroke-dasharray="{pattern}"' if pattern else ""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="2"{dashes}/>'


def dot(
    centre: tuple[float, float], radius: float, colour: str, *, hollow: bool, note: str = ""
) -> str:
    """A disc, or a ring where `hollow`."""
    style = f'fill="none" stroke="{colour}" stroke-width="2.5"' if hollow else f'fill="{colour}"'
    start = (
        f'<circle cx="{number(centre[0])}" cy="{number(centre[1])}" r="{number(radius)}" {style}'
    )
    return f"{start}><title>{escape(note)}</title></circle>" if note else f"{start}/>"
