"""Wrong uses that pass in silence, before and now: `python benchmarks/traps/run.py [--write]`.

A trap is a function `trap_...` of a file beside this one. It does one thing that a user may do, and
says what came of it: "right", "refused: ..." or "silent: ...". Any other error is "raw: ...".
`--before CHECKOUT` has the same traps tried with the package in another checkout, that of the
commit before they were mended. `--write` writes results/traps.md. Traps that the page has keep what
it says of "before": modules have moved, so that f00c906, their commit, no longer imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "results" / "traps.md"
# What may come of a trap; "refused" is an error that names the mistake.
OUTCOMES = ("right", "refused", "raw", "silent")


class Trap(NamedTuple):
    """One wrong use, by the area that it belongs to."""

    area: str
    name: str
    use: str
    try_it: Callable[[], str]


def traps() -> Iterator[Trap]:
    """All traps, area by area."""
    for path in sorted(HERE.glob("*.py")):
        if path.name == Path(__file__).name:
            continue
        spec = importlib.util.spec_from_file_location(f"traps_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # workers pickle classes by their module's name
        spec.loader.exec_module(module)
        for name, function in [*vars(module).items()]:  # a trap's warnings add a name
            if name.startswith("trap_"):
                use = (function.__doc__ or name).strip().partition("\n")[0].rstrip(".")
                yield Trap(path.stem, name, use, function)


def outcome(trap: Trap) -> str:
    """What came of a trap; an error that it does not expect is "raw"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = trap.try_it()
    except Exception as e:
        result = f"raw: {type(e).__name__}: {e}"
    kind = result.partition(":")[0]
    return result if kind in OUTCOMES else f"raw: the trap says {result!r}"


def outcomes_with(checkout: Path) -> dict[str, str]:
    """Outcomes by area and name, with the package of that checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__)), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def page(rows: Sequence[tuple[Trap, str, str]]) -> str:
    """The table of all traps; rows: (trap, before, now)."""
    counts = [Counter(r[i].partition(":")[0] for r in rows) for i in (1, 2)]
    lines = [
        "# Traps",
        "",
        "Uses that were once answered in silence with something else than what was meant. Made by",
        "`python benchmarks/traps/run.py --before CHECKOUT --write`, CHECKOUT being of f00c906, or",
        "for the later traps of the commit before their mend. `tests/docs/test_traps.py` tries all",
        "of them again.",
        "",
        "| | right | refused in a sentence | other error | silent |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, count in zip(("before", "now"), counts, strict=True):
        lines.append(f"| {name} | {' | '.join(str(count[o]) for o in OUTCOMES)} |")
    lines += ["", "| area | use | before | now |", "| --- | --- | --- | --- |"]
    for trap, before, now in rows:
        cells = (*cells_of(trap), before.partition(":")[0], now.partition(":")[0])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cells_of(trap: Trap) -> tuple[str, str]:
    """The cells that name a trap."""
    return trap.area, trap.use.replace("|", "/")


def written_before(text: str) -> dict[tuple[str, str], str]:
    """What a page says of "before", by the cells that name a trap."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {(area, use): before for area, use, before, now in (r for r in rows if len(r) == 4)}


def main() -> int:
    """Exit 1 where a use passes in silence, or is answered by an error that names no mistake."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--json", action="store_true", help="outcomes alone, as JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps({f"{t.area}/{t.name}": outcome(t) for t in traps()}))
        return 0
    now = outcomes_with(ROOT)
    before = outcomes_with(options.before.resolve()) if options.before else dict.fromkeys(now, "")
    written = written_before(PAGE.read_text()) if options.before else {}
    rows = [
        (t, written.get(cells_of(t), before[key]), now[key])
        for t in traps()
        for key in [f"{t.area}/{t.name}"]
    ]
    for trap, old, new in rows:
        print(f"{trap.area}: {trap.use}\n  before {old[:150]}\n  now    {new[:150]}")
    print(Counter(new.partition(":")[0] for _, _, new in rows))
    if options.write:
        PAGE.write_text(page(rows))
    return int(any(new.startswith(("silent", "raw")) for _, _, new in rows))


if __name__ == "__main__":
    sys.exit(main())
