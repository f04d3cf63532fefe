"""Figures to reach, beside what was measured: a table drawn from what the benchmarks left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fedshift.engine.backend_names import GONE

# Times the plain loop's speed. W5 asks for 1 over the share of clients that have weight of what is
# asked of the same network with all of them: W2's, and W1's for the CNN.
LOOP = {"W1": 0.97, "W2": 1.0, "W3": 1.0, "W4": 0.97}
BEST = {"W1": 2.8, "W2": 3.5, "W3": 5.0, "W4": 2.5}
SPARSE = {"W5": "W2", "W5c": "W1"}
MIB = 2**20


class Goal(NamedTuple):
    """What is required and what was measured; more: whether more is better."""

    what: str
    required: float
    measured: float
    unit: str
    more: bool

    @property
    def reached(self) -> bool:
        """Whether it is as good as required, or better."""
        return self.measured >= self.required if self.more else self.measured <= self.required

    def cells(self) -> list[str]:
        """A row of the table."""
        least = "at least" if self.more else "at most"
        required, measured = (
            f"{v:,.0f}{self.unit}" if v >= 100 else f"{v:.3g}{self.unit}"
            for v in (self.required, self.measured)
        )
        return [self.what, f"{least} {required}", measured, "yes" if self.reached else "**no**"]


def goals(left: Mapping[str, Any]) -> Iterator[Goal]:
    """Those whose benchmarks have figures."""
    figures = {name: one["figures"] for name, one in left.items()}
    parts = [figures[name]["rows"] for name in ("engine", "sparse", "deep") if name in figures]
    rows = [row for part in parts for row in part]  # a workload as often as it was played
    yield from _speeds(rows)
    yield from _peers({row["workload"]: row for row in rows}, figures)
    yield from _sizes(figures)
    yield from _starts(figures)


def _speeds(rows: Sequence[Mapping[str, Any]]) -> Iterator[Goal]:
    for row in rows:
        name = row["workload"]
        if name in LOOP:
            yield Goal(f"{name}, loop", LOOP[name], _ratio(row, "loop"), "x", True)
    for row in rows:
        name = row["workload"]
        required = BEST.get(name)
        if name in SPARSE:
            # All clients are as large, and the plain loop trains all.
            required = BEST[SPARSE[name]] * row["clients"] / row["weighing"]
        if required is not None:
            contender = _best(row)
            rounds = f"{row['rounds']} round{'s' if row['rounds'] > 1 else ''}"
            what = f"{name}, {contender}, {rounds}"
            yield Goal(what, required, _ratio(row, contender), "x", True)


def _ratio(row: Mapping[str, Any], contender: str) -> float:
    return float(row["seconds"]["plain"] / row["seconds"][contender])


def _best(row: Mapping[str, Any]) -> str:
    """The fastest contender that is still there: pages keep figures of backends that are gone."""
    there = (k for k in row["seconds"] if k != "plain" and k.partition(",")[0] not in GONE)
    return min(there, key=row["seconds"].__getitem__)


def _peers(rows: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[Goal]:
    """Against the fastest other library on each workload; each beside a plain loop of its own."""
    theirs: dict[str, tuple[float, str]] = {}
    for part in ("peers", "peers-deep"):
        for row in figures[part]["rows"] if part in figures else ():
            if "missing" not in row:
                name = row["workload"]
                theirs[name] = max(theirs.get(name, (0.0, "")), (row["ratio"], row["peer"]))
    for name, (ratio, peer) in sorted(theirs.items()):
        if name in rows:
            best = _best(rows[name])
            yield Goal(f"{name}, {best}, beside {peer}", ratio, _ratio(rows[name], best), "x", True)


def _sizes(figures: Mapping[str, Any]) -> Iterator[Goal]:
    if "states" in figures:
        peak = figures["states"]["peak"] / MIB
        yield Goal("1,000 clients' SCAFFOLD states, peak", 2048.0, peak, " MiB", False)
    if "registered" in figures:
        some = figures["registered"]
        yield Goal("W6, start-up", 5.0, some["startup"], " s", False)
        yield Goal("W6, a client's metadata", 200.0, some["bytes_per_client"], " bytes", False)
    if "aggregation" in figures:
        sums = figures["aggregation"]["rows"]
        for way in (k for k in ("as they come", "all there") if k in sums):
            time = sums[way]["seconds"] / sums["plain"]["seconds"]
            yield Goal(f"aggregation, {way}, of a plain sum", 1.5, time, "x", False)
            yield Goal(f"aggregation, {way}, peak", 3.0, sums[way]["models"], " models", False)


def _starts(figures: Mapping[str, Any]) -> Iterator[Goal]:
    if "startup" in figures:
        some = figures["startup"]
        torch = some["import torch"]["wall"]
        for name in ("import fedshift", "import fedshift, all public names"):
            yield Goal(f"`{name}`, of torch's", 1.5, some[name]["wall"] / torch, "x", False)
        yield Goal("`fedshift --help`", 0.5, some["fedshift --help"]["wall"], " s", False)
