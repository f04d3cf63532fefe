"""The output of `datasets`, `datasets show` and `datasets fetch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fedshift import datasets
from fedshift.cli.console import for_bars, put, say, show_json
from fedshift.errors import unknown, visible

HANG = len("    licence  ")


def datasets_listed(*, as_json: bool) -> None:
    """Print the known data sets."""
    rows = datasets.known()
    if as_json:
        show_json([_fields(row) for row in rows])
        return
    for row in rows:
        _describe(row)


def _describe(r: datasets.Known) -> None:
    place = f"found in {r.found}" if r.found else ("generated" if r.available else "not found")
    say(f"{r.name}: {r.summary}")
    put(f"    {place}")
    say(f"    size     {r.size}; {len(r.classes)} classes", HANG)
    say(f"    licence  {r.licence}", HANG)
    if not r.available:
        say(f"    get it   {r.how}", HANG)


def dataset_shown(name: str, *, as_json: bool) -> None:
    """Print one data set; for a table with natural clients, also how far these are apart."""
    rows = {row.name: row for row in datasets.known()}
    if name not in rows:
        raise unknown("data set", name, rows)
    natural = name in {one.name for one in datasets.TABLES}
    table = datasets.load_table(name) if natural else None
    if as_json:
        show_json(_fields(rows[name]) | (_measured(table) if table else {}))
        return
    _describe(rows[name])
    if table:
        sizes, shift = table.counts.sum(1), datasets.label_shift(table.counts)
        say(f"    source   {table.source}", HANG)
        put(f"    clients  {len(sizes)}, of {sizes.min():,} to {sizes.max():,} rows each")
        say(f"    label    {table.label}: {', '.join(table.classes)}", HANG)
        say(
            f"    shift    total variation {shift.mean:.3f} between the labels of a client and of "
            f"all (mean; at most {shift.most:.3f}). Without any shift, chance gives "
            f"{shift.chance:.3f}",
            HANG,
        )


def _measured(table: datasets.Table) -> dict[str, Any]:
    counts = dict(zip(table.clients, table.counts.tolist(), strict=True))
    shift = datasets.label_shift(table.counts)._asdict()
    return {
        "label": table.label,
        "client": table.by,
        "source": table.source,
        "counts": counts,
        "total_variation": shift,
    }


def _fields(row: datasets.Known) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(row).items()}


def fetch_dataset(name: str, folder: Path | None, *, as_json: bool) -> None:
    """Download a data set with progress on stderr, and print where it is."""
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=for_bars(), disable=not sys.stderr.isatty()) as bars:
        # rich would read "[red]" in a name as a colour.
        task = bars.add_task(escape(visible(name)), total=None)

        def progress(done: int, total: int | None) -> None:
            bars.update(task, completed=done, total=total)

        place = datasets.fetch(name, folder, progress=progress)
    if as_json:
        show_json({"name": name, "folder": str(place)})
    else:
        put(f"{name}: {place}")
