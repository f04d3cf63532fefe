"""What `datasets` prints."""

from __future__ import annotations

import sys
from pathlib import Path

from fedshift import datasets
from fedshift.cli.console import for_bars, put, say, show_json
from fedshift.errors import visible

HANG = len("    licence  ")


def datasets_listed(*, as_json: bool) -> None:
    """Print the known data sets."""
    rows = datasets.known()
    if as_json:
        show_json(
            [{k: str(v) if isinstance(v, Path) else v for k, v in vars(r).items()} for r in rows]
        )
        return
    for r in rows:
        place = f"found in {r.found}" if r.found else ("generated" if r.available else "not found")
        say(f"{r.name}: {r.summary}")
        put(f"    {place}")
        say(f"    size     {r.size}; {len(r.classes)} classes", HANG)
        say(f"    licence  {r.licence}", HANG)
        if not r.available:
            say(f"    get it   {r.how}", HANG)


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
