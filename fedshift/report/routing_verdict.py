"""Whether routing beats one model for all, said plainly where both are on a page."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.folder import RunResult
from fedshift.record.summary import Last


def verdict(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """One sentence per run with a router, beside the best global model; "" where there is none.

    The difference is of single runs: it says nothing about other seeds.
    """
    lasts = [(r.summary.last or {}, label) for r, label in zip(runs, labels, strict=True)]
    shared = _known(lasts, "global_accuracy")
    if len(runs) < 2 or not shared:
        return ""
    best, name = max(shared)
    said = []
    for share, label in _known(lasts, "routed_posterior"):
        word = "beats" if share > best else "does not beat"
        said.append(
            f"Routing ({label}) {word} one global model ({name}) here: {share:.1%} against "
            f"{best:.1%}, {100 * (share - best):+.1f} points."
        )
    return " ".join(said)


def _known(lasts: Sequence[tuple[Last, str]], key: str) -> list[tuple[float, str]]:
    return [(float(v), label) for last, label in lasts if (v := last.get(key)) is not None]
