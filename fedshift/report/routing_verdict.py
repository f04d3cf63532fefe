"""Whether routing beats one model for all, in plain words, if both are on a page."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import Last


def verdict(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """One sentence per run with a router against the best global model; "" without both.

    The difference is between single runs and says nothing about other seeds.
    """
    lasts = [(r.summary.last or {}, label) for r, label in zip(runs, labels, strict=True)]
    shared = _measured(lasts, "global_accuracy")
    if len(runs) < 2 or not shared:
        return ""
    best, name = max(shared)
    parts = []
    for share, label in _measured(lasts, "routed_posterior"):
        word = "beats" if share > best else "does not beat"
        parts.append(
            f"Routing ({label}) {word} one global model ({name}) here: {share:.1%} against "
            f"{best:.1%}, {100 * (share - best):+.1f} points."
        )
    return " ".join(parts)


def _measured(lasts: Sequence[tuple[Last, str]], key: str) -> list[tuple[float, str]]:
    return [(float(v), label) for last, label in lasts if (v := last.get(key)) is not None]
