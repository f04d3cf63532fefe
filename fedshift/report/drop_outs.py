"""The report's part on clients that dropped out of rounds: which ones, how often, and why."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.record.drops import KINDS, UNSCORED, Drop
from fedshift.record.folder import EVENTS, RunResult
from fedshift.report.charts import shortened
from fedshift.report.folding import sampled
from fedshift.report.layout import note, section, table
from fedshift.report.pools import Pool, Run
from fedshift.report.splits import client_names
from fedshift.report.tables import Cell, Table


def drop_outs(lines: Sequence[Pool]) -> str:
    """A row for each client and kind of reason; "" if all clients answered in all rounds."""
    runs = (pair for line in lines for pair in zip(line.names, line.all, strict=True))
    rows = [row for name, run in runs for row in _rows(name, run)]
    if not rows:
        return ""
    text = (
        "Clients that were drawn for a round and gave nothing to it. In each such round the others "
        "were weighed anew; weights and sample sizes above are means over the rounds that were "
        "played. Where scores are missing, the client trained, and the round's estimate is of the "
        "others. events.jsonl has every case with its reason."
    )
    header = ("Run", "Client", "Why", "Rounds", "First", "Last", "Reason in the last")
    numbers = Table(header, tuple(rows), ("", "", "", "d", "d", "d", ""))
    return section("drop-outs", "Who dropped out", table(sampled(numbers, EVENTS)), note(text))


def _rows(label: str, run: Run) -> list[tuple[Cell, ...]]:
    names = client_names(run) if isinstance(run, RunResult) else ()
    cases: dict[tuple[int, str], dict[int, Drop]] = {}
    for t, lost in sorted(run.dropped.items()):
        for one in lost:
            cases.setdefault((one.client, one.kind), {})[t] = one
    return [
        (
            label,
            names[i] if i < len(names) else f"client {i}",
            UNSCORED * kind.startswith(UNSCORED) + KINDS.get(kind.removeprefix(UNSCORED), kind),
            len(rounds),
            min(rounds),
            max(rounds),
            shortened(rounds[max(rounds)].reason, 200),
        )
        for (i, kind), rounds in sorted(cases.items())
    ]
