"""Label shift of the tables with natural clients: `python benchmarks/natural.py [--write]`.

Rows, clients, and the total variation of label shares beside what chance gives. Tables whose
package is absent are left out. `--write` puts what was printed into docs/datasets.md, and wants all
of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from page import table

from fedshift.datasets import TABLES, label_shift, load_table
from fedshift.datasets.natural.loading import find_table

PAGE = Path(__file__).parents[1] / "docs" / "datasets.md"
START, END = "<!-- python benchmarks/natural.py --write -->\n", "<!-- end -->\n"
HEADER = ["table", "rows", "clients", "rows of a client", "classes", "classes of a client"]
HEADER += ["TV, mean", "most", "chance"]


def span(values: np.ndarray) -> str:
    """The smallest and the largest: "22 to 969"."""
    least, most = values.min(), values.max()
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def rows() -> Iterator[list[str]]:
    """One row for each table that is on this machine."""
    for one in TABLES:
        if find_table(one) is None:
            print(f"{one.name} is left out: {one.package.how}")
            continue
        counts = load_table(one.name).counts
        sizes, classes, shift = counts.sum(1), (counts > 0).sum(1), label_shift(counts)
        yield [
            *(f"`{one.name}`", f"{sizes.sum():,}", str(len(sizes))),
            *(span(sizes), str(counts.shape[1]), span(classes)),
            *(f"{value:.3f}" for value in shift),
        ]


def main() -> None:
    """Prints the table, or writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/datasets.md")
    write, measured = parser.parse_args().write, list(rows())
    lines = "\n".join(table(HEADER, measured)) + "\n"
    if not write:
        print(lines)
    elif len(measured) < len(TABLES):
        raise SystemExit("nothing was written: a table is absent")
    else:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(before + START + lines + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
