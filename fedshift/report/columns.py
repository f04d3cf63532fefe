"""Names under bars and over the columns of heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedshift.report.charts import letters, shortened
from fedshift.report.shapes import text


def column_names(
    names: Sequence[str], left: float, step: float, y: float, *, down: bool
) -> tuple[str, float]:
    """Names under (`down`) or over columns, upright, and turned when they would overlap."""
    short = [shortened(n, 20) for n in names]
    longest = max(map(letters, short))
    if longest * 5.6 <= step:
        depth = 18.0
        baseline = y + 12 if down else y + depth - 6
        labels = [
            text(left + (i + 0.5) * step, baseline, n, "middle", 10) for i, n in enumerate(short)
        ]
        return "".join(labels), depth
    # Turned names need a line's height each; if there is too little room, write every k-th.
    every = max(1, math.ceil(10.0 / step))
    depth, anchor = longest * 5.8 + 10, "end" if down else "start"
    baseline = y + 2 if down else y + depth - 5
    labels = [
        text(left + (i + 0.5) * step + 3, baseline, n, anchor, min(10.0, max(9.5, step)), turn=-90)
        for i, n in enumerate(short)
        if i % every == 0
    ]
    return "".join(labels), depth
