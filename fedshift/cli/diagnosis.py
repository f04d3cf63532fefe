"""`fedshift diagnose`: from two CSV files to a verdict, tables and a page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fedshift.cli.console import put, say, show_json, show_report_table, tell
from fedshift.csv_counts import read_counts, read_target
from fedshift.diagnose import diagnose
from fedshift.diagnosis import Diagnosis
from fedshift.errors import InputError
from fedshift.experiments.config.wording import reworded
from fedshift.files import check_page, write
from fedshift.report.diagnosis_page import (
    carrier_table,
    curve_table,
    diagnosis_page,
    label_table,
)

BAR = 40


def diagnose_files(
    counts: Path,
    target: Path,
    *,
    lam: float | None,
    ess: float | None,
    cap: float | None,
    normalise: bool,
    bootstrap: int,
    page: Path | None,
    as_json: bool,
) -> None:
    """Read, diagnose, warn about uncovered labels on stderr, print."""
    if page is not None:
        _check(page)
    table = read_counts(counts)
    shares = read_target(target, table.classes)
    with _reword_for_options():
        diagnosis = diagnose(
            table.counts,
            shares,
            classes=table.classes,
            clients=table.clients,
            lam=lam,
            ess=ess,
            cap=cap,
            normalise_target=normalise,
            bootstrap=bootstrap,
        )
    # On stderr, because a program that reads stdout expects nothing but the document.
    if diagnosis.missing:
        labels = ", ".join(f'"{name}"' for name in diagnosis.missing)
        tell(f"warning: no client holds {labels}; no weights can cover the target")
    if page is not None:
        write(page, diagnosis_page(diagnosis, title=f"{counts.name} for {target.name}"))
    if as_json:
        show_json(diagnosis.to_json())
    else:
        _print(diagnosis, page)


@contextlib.contextmanager
def _reword_for_options() -> Iterator[None]:
    """Reword errors about Python arguments in terms of this command's options."""
    names = {name: f"--{name}" for name in ("lam", "ess", "cap", "bootstrap")}
    try:
        yield
    except InputError as e:
        # This argument is a switch on the command line, without a value.
        message = str(e).replace("normalise_target=True", "--normalise")
        e.args = (reworded(message, names, " "),)
        raise


def _check(page: Path) -> None:
    if os.path.isdir(page):  # other errors show when it is written
        raise InputError(f"{page}: is a folder; give the page a file name")
    check_page(page)


def _print(diagnosis: Diagnosis, page: Path | None) -> None:
    for sentence in diagnosis.verdict:
        say(sentence)
    show_report_table(label_table(diagnosis))
    show_report_table(curve_table(diagnosis))
    _plot(diagnosis)
    show_report_table(carrier_table(diagnosis))
    if page is not None:
        put(f"Page: {page}")


def _plot(diagnosis: Diagnosis) -> None:
    """ESS against distance as bars: how much label mass each setting leaves misplaced."""
    largest = max(point.l1 for point in diagnosis.curve) or 1.0
    put("Misplaced label mass (half the L1 distance) by share of the sample size kept:")
    for point in diagnosis.curve:
        bar = "█" * round(BAR * point.l1 / largest)
        mark = "  <- chosen" if point.chosen else ""
        put(f"  {100 * point.ess_fraction:5.1f} %  {bar:<{BAR}} {50 * point.l1:5.1f} %{mark}")
