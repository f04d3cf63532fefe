"""Colours, dashes and markers of charts: a method looks the same on every page and figure.

The colour depends on the method's name alone, and not on what else is drawn. There are seven hues.
Methods that share one differ by dash, marker and the edge of their bars.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Grey, which belongs to no method, and seven hues: blue, orange, green, purple, red, sky and tan.
# Any two of them differ by at least 11 in CIEDE2000, where 2 can be told apart. This also holds as
# seen with each kind of colour blindness (Machado et al. 2009). Each has a contrast of 3 to 1 with
# white paper or a dark page (WCAG 2.1, criterion 1.4.11).
LIGHT = ("#4a4f55", "#0b45d9", "#cf7a12", "#1f8a78", "#662f75", "#7a2a08", "#4a94f5", "#9a6640")
DARK = ("#c3c9d0", "#6977ff", "#f79d1e", "#4fb38c", "#b56a9a", "#e0553f", "#2fd0ff", "#fff0b8")
GREY = 0
# Variable of the style sheet -> (colour on white paper, on a dark page). "weak" and "strong" are
# the inks for numbers on weak and strong shades of "heat".
THEME = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1f2933", "#e4e9ee"),
    "soft": ("#52606d", "#a9b4bf"),
    "grid": ("#e3e8ed", "#333c45"),
    "rule": ("#9aa5b1", "#66717c"),
    "box": ("#f3f7fb", "#1d242b"),
    "link": ("#005a8d", "#7cc4f4"),
    "heat": ("#08306b", "#86b6e6"),
    "weak": ("#000000", "#ffffff"),
    "strong": ("#ffffff", "#000000"),
    **{f"c{i}": pair for i, pair in enumerate(zip(LIGHT, DARK, strict=True))},
}
# Lengths of dashes and gaps in pixels, as in SVG's stroke-dasharray; "" for a solid line.
DASHES = ("", "7 3", "2 3", "9 3 2 3", "13 4", "5 2 1 2 1 2", "11 3 5 3")
# The opacity of a bar's fill, by style.
FILLS = (1.0, 0.4, 0.7, 0.2, 0.55, 0.85, 0.3)
# Corners of the markers in units of their radius; the first, without corners, is a disc.
MARKERS: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
    ((-1.3, -0.4), (1.3, -0.4), (1.3, 0.4), (-1.3, 0.4)),
    ((-0.4, -1.3), (0.4, -1.3), (0.4, 1.3), (-0.4, 1.3)),
)
# A method's place in this list gives its hue and style, seven methods to a style. The order must
# not change, or methods would change colour. Methods that are not listed get a look from the
# checksum of their name, so that a new recipe needs no line here.
METHODS = (
    "fedavg", "fedpals", "fedprox", "scaffold", "afl", "fedrs", "oracle",
    "local_only", "feddrm", "ditto", "fedrep", "fedper", "fedbabu", "fedala",
    "fedas", "fedpac", "confree", "fedavgft", "fedproxft", "fedsamft", "fedsam",
    "feddisk", "made", "moon", "feddyn", "fednova", "fedprox+fedpals", "feddrm_shared_head",
    "fedadam", "fedyogi", "fedavgm", "krum", "multikrum", "rfa", "fedmedian", "fedtrimmed",
    "fedntd", "feddecorr", "fedgela", "fedetf", "fedvls",
    "iwerm", "fedpals_joint", "feddisco", "fedlc",
    "balanced_softmax", "feddisco_target", "ccvr", "ccvr_target",
)  # fmt: skip
_HUES = len(LIGHT) - 1
# The number of looks for names that are not listed. It is fixed, so that adding a dash does not
# change the look of any name.
_OTHERS = 36
# Parts of names that mark variants of a method, which get the method's colour.
_VARIANT = re.compile(r"^(?:labelset_|chosen_)+|_(?:drm_repo|uniform)(?=_|$)")


@dataclass(frozen=True)
class Look:
    """colour: an index of LIGHT and DARK; style: an index of DASHES, FILLS and MARKERS."""

    colour: int
    style: int = 0

    @property
    def ink(self) -> str:
        """The colour, as a variable of a page's style sheet."""
        return f"var(--c{self.colour})"


def look_of(name: str) -> Look:
    """The look of the method with whose name a label begins: "FedPALS, ess=25%" has fedpals' look.

    >>> from fedshift.report.looks import look_of
    >>> look_of("FedAvg (second trial)") == look_of("fedavg")
    True
    """
    words = _VARIANT.sub("", _slug(name))
    # Of several matches the longest is meant: fedprox+fedpals also begins with fedprox.
    begun = [m for m in METHODS if words == m or words.startswith(f"{m}_")]
    if begun:
        place = METHODS.index(max(begun, key=len))
    else:
        # A method that is not listed: the same look for the same name in every process.
        first = _VARIANT.sub("", _slug(re.split(r"[(,]", name)[0]))
        place = zlib.crc32(first.encode()) % _OTHERS
    return Look(1 + place % _HUES, place // _HUES)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9+]+", "_", name.lower()).strip("_")


def band_opacity(bands: int) -> float:
    """The opacity of each of a chart's bands: the more overlap, the paler each is.

    >>> from fedshift.report.looks import band_opacity
    >>> band_opacity(2), band_opacity(9)
    (0.16, 0.05)
    """
    return min(0.16, 0.45 / max(1, bands))


def looks(
    names: Sequence[str], given: Sequence[Look | None], thin: Sequence[bool] = ()
) -> list[Look]:
    """The looks of all that one chart shows: as given, or else by name.

    If two would look alike, such as two settings of a method, the later one gets another dash. A
    thin line looks like the main line of its method, and is told from it by being thin.
    """
    drawn: list[Look] = []
    taken: set[tuple[Look, bool]] = set()
    for i, (name, one) in enumerate(zip(names, given, strict=True)):
        look, pale = one or look_of(name), bool(thin) and thin[i]
        others = (replace(look, style=(look.style + k) % len(DASHES)) for k in range(len(DASHES)))
        drawn.append(next((other for other in others if (other, pale) not in taken), look))
        taken.add((drawn[-1], pale))
    return drawn
