"""The simplex of three labels as SVG: clients, their hull, the target, and mixtures of clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshift.report.looks import GREY, Look, look_of
from fedshift.report.shapes import INK, Point, document, dot, line, path, polyline, text

SIDE, LEFT, TOP = 430.0, 80.0, 62.0
CLIENT, TARGET = Look(GREY), Look(GREY, 3)


@dataclass(frozen=True, eq=False)
class Simplex:
    """The points that are drawn in the triangle.

    clients  the clients' label marginals [M, 3]; `sizes` [M] are their numbers of examples
    target   T [3]
    fedavg   the mixture of clients by FedAvg's weights [3]
    path     mixtures by FedPALS' weights as lambda grows from 0, [L, 3]
    marks    some points of the path, with labels
    """

    title: str
    classes: tuple[str, ...]
    names: tuple[str, ...]
    clients: NDArray[np.float64]
    sizes: NDArray[np.float64]
    target: NDArray[np.float64]
    fedavg: NDArray[np.float64]
    path: NDArray[np.float64]
    marks: tuple[tuple[str, NDArray[np.float64]], ...]


def place(marginal: ArrayLike) -> Point:
    """The place of a marginal s: s_1 lower left + s_2 lower right + s_3 upper corner."""
    _, second, third = np.asarray(marginal, dtype=np.float64).tolist()
    height = SIDE * 3**0.5 / 2
    return LEFT + SIDE * (second + third / 2), TOP + height * (1 - third)


def hull(points: Sequence[Point]) -> list[Point]:
    """The corners of the convex hull in order; the two ends if all points are on a line."""
    ordered = sorted(set(points))
    if len(ordered) < 3:
        return ordered
    half: list[list[Point]] = []
    for way in (ordered, ordered[::-1]):
        chain: list[Point] = []
        for point in way:
            while len(chain) > 1 and _turn(chain[-2], chain[-1], point) <= 1e-9:
                chain.pop()
            chain.append(point)
        half.append(chain[:-1])
    return half[0] + half[1]


def _turn(a: Point, b: Point, c: Point) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def simplex_svg(chart: Simplex) -> str:
    """The drawing as SVG text."""
    pals, fedavg = look_of("fedpals"), look_of("fedavg")
    corners = [place(row) for row in np.eye(3)]
    around = path(hull([place(row) for row in chart.clients]))
    body = [
        f'<polygon points="{path(corners)}" fill="none" stroke="{INK}"/>',
        f'<polygon points="{around}" fill="{CLIENT.ink}" fill-opacity="0.14" '
        f'stroke="{CLIENT.ink}"/>',
        *_corner_names(chart.classes, corners),
        line(*place(chart.target), *place(chart.path[0]), INK),
        polyline([place(row) for row in chart.path], pals),
        *_clients(chart),
        dot(place(chart.fedavg), 7, fedavg, hollow=False, note=_note("FedAvg", chart.fedavg)),
        *(
            dot(place(mixture), 5, pals, hollow=False, note=_note(label, mixture))
            for label, mixture in chart.marks
        ),
        dot(place(chart.target), 8, TARGET, hollow=False, note=_note("target", chart.target)),
        *_legend(pals, fedavg),
    ]
    return document(chart.title, 760, TOP + SIDE * 3**0.5 / 2 + 44, body)


def _clients(chart: Simplex) -> list[str]:
    """A disc per client, with an area in proportion to its number of examples."""
    radii = 4 + 8 * np.sqrt(chart.sizes / chart.sizes.max())
    rows = zip(chart.clients, radii.tolist(), chart.names, chart.sizes, strict=True)
    return [
        dot(place(row), radius, CLIENT, hollow=True, note=_note(f"{name}, n = {n:g}", row))
        for row, radius, name, n in rows
    ]


def _corner_names(classes: Sequence[str], corners: Sequence[Point]) -> list[str]:
    anchors = (("middle", 22), ("middle", 22), ("middle", -12))
    return [
        text(x, y + down, name, anchor, 12)
        for name, (x, y), (anchor, down) in zip(classes, corners, anchors, strict=True)
    ]


def _legend(pals: Look, fedavg: Look) -> list[str]:
    entries = (
        (dot((560, 20), 7, CLIENT, hollow=True), "client, area: its examples"),
        (dot((560, 40), 8, TARGET, hollow=False), "target, T"),
        (dot((560, 60), 7, fedavg, hollow=False), "FedAvg's mixture"),
        (polyline([(548, 80), (572, 80)], pals) + dot((560, 80), 5, pals, hollow=False),
         "FedPALS from lambda = 0 on"),
        (f'<rect x="549" y="94" width="22" height="12" fill="{CLIENT.ink}" fill-opacity="0.14" '
         f'stroke="{CLIENT.ink}"/>', "what clients can mix"),
    )  # fmt: skip
    return [
        mark + text(582, 24 + 20 * k, words, "start", 11) for k, (mark, words) in enumerate(entries)
    ]


def _note(name: str, marginal: ArrayLike) -> str:
    return f"{name}: " + ", ".join(f"{v:.3f}" for v in np.asarray(marginal).tolist())
