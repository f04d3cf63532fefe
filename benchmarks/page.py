"""results/benchmarks.md, drawn from what the benchmarks left. No figure is typed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from goals import goals

from fedshift.engine.backend_names import GONE

MIB = 2**20
# The subject of each part, and where its figures to reach are.
ABOUT = {
    "engine": "Seconds per round against a plain loop",
    "engine-earlier": "The same by an earlier version, on an EPYC of the generation Zen 4",
    "engine-elsewhere": "The same by an earlier version, on an Intel processor",
    "sparse": "FedPALS with sparse weights on a convolutional network, more rounds",
    "deep": "Seconds per round of a deep network",
    "peers": "Other libraries",
    "peers-deep": "Other libraries on a deep network",
    "methods": "What each method costs relative to FedAvg",
    "growth": "How cost grows",
    "registered": "Very many registered clients (W6)",
    "precision": "Local training in bfloat16",
    "startup": "How soon it is there",
    "aggregation": "Folding a cohort",
    "states": "Clients' states on disk",
}


def drawn(figures: Mapping[str, Any]) -> str:
    """The page over those benchmarks that have figures."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench` and, for other libraries, `python benchmarks/peers/run.py`, from the "
        "JSON files that they leave, which lie in [benchmarks](benchmarks). Ratios compare what "
        "ran in turn on one machine.",
    ]
    if goal_rows := list(goals(figures)):
        lines += ["", "## Figures to reach", ""]
        header = ["figure", "asked", "measured", "reached"]
        lines += table(header, [goal.cells() for goal in goal_rows])
        lines += [
            "",
            "A workload that was played twice has two rows. Beside another library: its ratio is "
            "asked, and ours measured, each to a plain loop of its own, which may be another "
            "machine's. [Results](README.md) says which parts are of earlier versions and what "
            f"is short on which processor. Tables below still have {', '.join(GONE)}, which is "
            "gone; it counts for none of these figures.",
        ]
    for name, about in ABOUT.items():
        if name in figures:
            lines += ["", f"## {about}", "", *_part(name, figures[name])]
    return "\n".join(lines) + "\n"


def _part(name: str, left: Mapping[str, Any]) -> Iterator[str]:
    yield from PARTS[name](left["figures"])
    yield ""
    yield made_by(left)


def made_by(left: Mapping[str, Any]) -> str:
    """The command, the machine and the versions."""
    machine = left["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in machine["packages"].items() if v)
    trial = " A trial, not a result." if left["quick"] else ""
    return (
        f"`{left['command']}`; {machine['processor']}, {machine['cores']} cores, load "
        f"{machine['load']} at the end, {machine['system']}, Python {machine['python']}, "
        f"{packages}.{trial}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown; columns after the first are right-aligned."""
    yield f"| {' | '.join(header)} |"
    yield f"| --- |{' ---: |' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def engine(figures: Mapping[str, Any]) -> Iterator[str]:
    """The plain loop's seconds, and the other backends' speed relative to it."""
    rows = figures["rows"]
    others = list(dict.fromkeys(k for row in rows for k in row["seconds"] if k != "plain"))

    def speed(seconds: Mapping[str, float], name: str) -> str:
        return f"{seconds['plain'] / seconds[name]:.2f}x" if name in seconds else "–"

    cells = [
        [row["workload"], f"{row['seconds']['plain']:.3f}",
         *(speed(row["seconds"], name) for name in others), f"{row['rounds']}"]
        for row in rows
    ]  # fmt: skip
    yield from table(["workload", "plain loop, s", *others, "rounds"], cells)
    yield ""
    yield "; ".join(f"{row['workload']}: {row['what']}" for row in rows) + "."
    yield ""
    yield (
        "Medians of the rounds that count; [Results](README.md) says where a process's first does. "
        "All have a process of their own; contenders play in turn, and every counted round has "
        "its own batches and, where one is drawn, its own cohort. Checked before: as many steps of "
        "as many examples as the plain loop's, and after the first steps of the same batches the "
        "same parameters, the largest difference over the round's change being "
        + ", ".join(f"{max(row['apart'].values()):.0e} ({row['workload']})" for row in rows)
        + "."
        + "".join(
            f" In {row['workload']}, {row['weighing']} clients have weight; the plain loop trains "
            "all."
            for row in rows
            if row["workload"].startswith("W5")
        )
    )


def peers(figures: Mapping[str, Any]) -> Iterator[str]:
    """Each peer's speed on each workload, and which have no figures."""
    rows = [row for row in figures["rows"] if "missing" not in row]
    works = sorted({row["workload"] for row in rows})
    ratios = {(row["peer"], row["workload"]): f"{row['ratio']:.2f}x" for row in rows}
    names = {row["peer"]: f"{row['peer']} {row['version']}" for row in rows}
    cells = [[title, *(ratios.get((k, w), "–") for w in works)] for k, title in names.items()]
    if cells:
        yield from table(["library", *works], cells)
        yield ""
    absent = [row for row in figures["rows"] if "missing" in row]
    rounds = " or ".join(map(str, sorted({row["rounds"] for row in rows}))) or "no"
    few = {r["workload"]: (r["clients"], r["of"]) for r in rows if r.get("clients") != r.get("of")}
    yield " ".join([
        "Relative to the plain loop, which each has in its own process and environment, in turn; "
        f"medians of {rounds} round(s). pfl trains in one thread, Flower in a process for each "
        "core, FedJAX in as many threads as XLA takes; the plain loop in one.",
        *(f"{work} with {n} of its {of} clients." for work, (n, of) in few.items()),
        *(f"{row['peer']}: {row['missing'].rstrip('.')}." for row in absent),
    ])  # fmt: skip


def methods(figures: Mapping[str, Any]) -> Iterator[str]:
    """Measured and demanded, as ratios to FedAvg."""
    yield (
        f"W2 with {figures['clients']} clients, one thread. Demanded: passes over examples by the "
        "method's equations (forward 1, backward 2), over FedAvg's. Left out, since their first "
        f"rounds do not train: {', '.join(figures['left_out'])}."
    )
    yield ""
    rows = [
        [f"`{row['method']}`", f"{row['ratio']:.2f}x", f"{row['demanded']:.2f}x",
         f"{row['ratio'] / row['demanded']:.2f}"]
        for row in figures["rows"]
    ]  # fmt: skip
    yield from table(["method", "measured", "demanded", "measured / demanded"], rows)


def growth(figures: Mapping[str, Any]) -> Iterator[str]:
    """A table for each of what grows."""
    for axis, rows in figures.items():
        field = "model" if axis == "parameters" else axis
        cells = [
            [f"{row[field]:,}", _seconds(row["seconds"]), f"{100 * row['beside']:.0f}",
             _seconds(row["last_tenth"]), f"{row['peak'] / MIB:,.0f}"]
            for row in rows
        ]  # fmt: skip
        header = [axis, "s a round", "% beside clients' work", "s in the last tenth", "peak MiB"]
        yield from table(header, cells)
        yield ""


def registered(figures: Mapping[str, Any]) -> Iterator[str]:
    """W6 in one row."""
    header = ["clients", "cohort", "start-up, s", "of it imports", "s a round", "bytes a client",
              "peak MiB", "of it examples"]  # fmt: skip
    row = [
        f"{figures['clients']:,}", f"{figures['cohort']}", f"{figures['startup']:.2f}",
        f"{figures['imports']:.2f}", _seconds(figures["round"]),
        f"{figures['bytes_per_client']:.0f}", f"{figures['peak'] / MIB:,.0f}",
        f"{figures['pool'] / MIB:,.0f}",
    ]  # fmt: skip
    yield from table(header, [row])


def precision(figures: Mapping[str, Any]) -> Iterator[str]:
    """A step's seconds by float32, the others' speed relative to it, and gradients' errors."""
    extensions = ", ".join(figures["extensions"]) or "none"
    yield (
        f"One thread; the processor's own instructions for bfloat16: {extensions}. With "
        "amx_bf16 bfloat16 is faster than float32 where products take most of the time; without "
        "such instructions it may be slower. Last columns: how far gradients at the first weights "
        "are from float64's."
    )
    yield ""
    rows = figures["rows"]
    ways = [name for name in rows[0]["seconds"] if name != "float32"]
    cells = [
        [f"{row['workload']}, batch {row['batch']}", _seconds(row["seconds"]["float32"]),
         *(f"{row['seconds']['float32'] / row['seconds'][way]:.2f}x" for way in ways),
         *(f"{error:.1e}" for error in row["errors"].values())]
        for row in rows
    ]  # fmt: skip
    errors = [f"error of {name}" for name in rows[0]["errors"]]
    yield from table(["workload", "float32, s a step", *ways, *errors], cells)


def startup(figures: Mapping[str, Any]) -> Iterator[str]:
    """New processes, beside `import torch`."""
    torch = figures["import torch"]["wall"]
    rows = [
        [
            f"`{name}`",
            f"{row['wall']:.2f}",
            f"{row['processor']:.2f}",
            f"{row['wall'] / torch:.2f}x",
        ]
        for name, row in figures.items()
    ]
    yield from table(["new process", "s", "processor s", "of `import torch`"], rows)


def aggregation(figures: Mapping[str, Any]) -> Iterator[str]:
    """Ours beside a plain float64 weighted sum."""
    plain = figures["rows"]["plain"]["seconds"]
    yield f"{figures['clients']} clients, {figures['parameters']:,} parameters, one thread."
    yield ""
    rows = [
        [name, f"{row['seconds']:.2f}", f"{row['seconds'] / plain:.2f}x",
         f"{row['processor']:.2f}", f"{row['models']:.1f}"]
        for name, row in figures["rows"].items()
    ]  # fmt: skip
    header = ["", "s", "of the plain sum", "processor s", "models held beyond the replies"]
    yield from table(header, rows)


def states(figures: Mapping[str, Any]) -> Iterator[str]:
    """SCAFFOLD's controls on disk."""
    header = ["clients", "steps", "budget MiB", "peak MiB", "on disk MiB", "s a round"]
    row = [
        f"{figures['clients']:,}", f"{figures['steps']}", f"{figures['budget'] / MIB:.0f}",
        f"{figures['peak'] / MIB:,.0f}", f"{figures['on_disk'] / MIB:,.0f}",
        f"{figures['seconds']:.1f}",
    ]  # fmt: skip
    yield from table(header, [row])


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"


PARTS = {
    "engine": engine, "engine-earlier": engine, "engine-elsewhere": engine, "sparse": engine,
    "deep": engine,
    "peers": peers, "peers-deep": peers, "methods": methods, "growth": growth,
    "registered": registered, "precision": precision, "startup": startup,
    "aggregation": aggregation, "states": states,
}  # fmt: skip
