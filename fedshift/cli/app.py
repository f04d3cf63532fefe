"""The command line. Commands read files and print; what they do lives in the library."""

from __future__ import annotations

import sys
import tempfile
import traceback
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli import console
from fedshift.errors import FedshiftError

app = typer.Typer(
    name="fedshift",
    help="Federated learning under distribution shift.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 2 wrong input, 3 missing or damaged data, 4 training diverged, "
    "5 download failed, 70 internal error, 130 interrupted.",
)
datasets_app = typer.Typer(
    help="List the known data sets, or fetch one.", invoke_without_command=True
)
app.add_typer(datasets_app, name="datasets")


class Format(StrEnum):
    """How a command prints its result."""

    table = "table"
    json = "json"


FormatOption = Annotated[
    Format, typer.Option("--format", help="Print a table, or one JSON document.")
]
Overrides = Annotated[
    list[str],
    typer.Option("-c", "--config", metavar="SECTION.KEY=VALUE", help="Set one key of the file."),
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for the results (new or empty).")]


@app.command()
def demo(out: Out = None, config: Overrides = [], format: FormatOption = Format.table) -> None:  # noqa: B006
    """Train FedAvg, FedPALS and the oracle on data that ship with the package."""
    from fedshift.cli.results import demo_json, draw, show_demo
    from fedshift.experiments.demo import demo_config, run_demo
    from fedshift.experiments.folder import reserved

    loaded = demo_config(config)
    with reserved(out, "demo") as folder, console.progress() as listen:
        done = run_demo(loaded, folder, listen)
    page = draw([place for place, _ in done], folder)
    if format is Format.json:
        console.show_json(demo_json(done, page))
    else:
        show_demo(done, page)


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The experiment.")],
    out: Out = None,
    config: Overrides = [],  # noqa: B006
    format: FormatOption = Format.table,
) -> None:
    """Run one experiment and leave a run folder with its numbers, model and report."""
    from fedshift.cli.results import draw, run_json, show_run
    from fedshift.experiments.experiment import run_experiment
    from fedshift.experiments.folder import EventLog, reserved, write_run
    from fedshift.experiments.load import load_config
    from fedshift.experiments.task import prepare
    from fedshift.experiments.training import listeners

    loaded = load_config(file, config)
    prepared = prepare(loaded)
    with reserved(out, loaded.name) as folder, console.progress() as listen:
        heard = listeners(EventLog(folder), listen)
        experiment = run_experiment(loaded, listen=heard, prepared=prepared)
        write_run(folder, experiment)
    page = draw([folder], None)
    if format is Format.json:
        console.show_json(run_json(folder, experiment, page))
    else:
        show_run(folder, experiment, page)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Run folders.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where to write the page.")] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for PDF and PNG figures (matplotlib).")
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Draw the report of one run, or one page that compares several."""
    from fedshift.cli.results import draw, figure_files

    page = draw(folders, out)
    drawn = [] if figures is None else [str(path) for path in figure_files(folders, figures)]
    if format is Format.json:
        console.show_json({"report": str(page), "figures": drawn})
    else:
        print("\n".join([str(page), *drawn]))


@app.command()
def diagnose(
    counts: Annotated[Path, typer.Option(help="CSV: labels as header, one row per client.")],
    target: Annotated[Path, typer.Option(help="CSV: the target's share of each label.")],
    lam: Annotated[float | None, typer.Option(help="Lambda, 0 or more, or inf.")] = None,
    ess: Annotated[float | None, typer.Option(help="ESS fraction in (0, 1].")] = None,
    cap: Annotated[float | None, typer.Option(help="Upper bound of any weight.")] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Divide the target by its sum.")
    ] = False,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Draws for an interval of the hull distance; 0: none.")
    ] = 0,
    report: Annotated[Path | None, typer.Option("--report", help="Write a page here.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """From label histograms alone: is the target covered, and at what cost in sample size?"""
    from fedshift.cli.diagnosis import diagnose_files

    diagnose_files(
        counts, target, lam=lam, ess=ess, cap=cap, normalise=normalise, bootstrap=bootstrap,
        page=report,
        as_json=format is Format.json,
    )  # fmt: skip


@app.command()
def methods(format: FormatOption = Format.table) -> None:
    """List every method: what it is, where it comes from, what leaves a client."""
    from fedshift.cli.listings import methods_listed

    methods_listed(as_json=format is Format.json)


@datasets_app.callback()
def datasets(context: typer.Context, format: FormatOption = Format.table) -> None:
    """List the known data sets: where each was found, or how to get it."""
    if context.invoked_subcommand is None:
        from fedshift.cli.listings import datasets_listed

        datasets_listed(as_json=format is Format.json)


@datasets_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A name from `fedshift datasets`.")],
    folder: Annotated[Path | None, typer.Option(help="Where to; default: the cache.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Download a data set from its official place, with checksums."""
    from fedshift.cli.listings import fetch_dataset

    fetch_dataset(name, folder, as_json=format is Format.json)


def main() -> None:
    """Entry point: every failure becomes one message and a documented exit code."""
    as_json = "--format=json" in sys.argv or ("--format", "json") in pairwise(sys.argv)
    try:
        app()
    except FedshiftError as e:
        console.show_error(e, as_json)
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as e:
        console.show_error(_internal(e), as_json)
        sys.exit(FedshiftError.exit_code)


def _internal(error: Exception) -> FedshiftError:
    """An unforeseen failure: the traceback goes to a file, its place to the user."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="fedshift-", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        traceback.print_exception(error, file=log)
    kind = type(error).__name__
    return FedshiftError(
        f"internal error ({kind}: {error}). This is a defect of fedshift; please report it with "
        f"{log.name}"
    )
