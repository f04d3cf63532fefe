"""The command line. Commands read files and print; the library does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from click import Choice

import fedshift
from fedshift.cli import console
from fedshift.cli.audits import audit_app
from fedshift.cli.choices import (
    BackendChoice,
    Format,
    FormatOption,
    Out,
    Overrides,
    Resume,
    Where,
)
from fedshift.cli.commands import Commands
from fedshift.cli.ending import perform
from fedshift.cli.loading import loading
from fedshift.engine.backend_names import ALONE, NAMES

app = typer.Typer(
    name="fedshift",
    cls=Commands,
    help="Federated learning under distribution shift.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 2 wrong input or options, 3 missing or damaged data (also CSV "
    "tables), 4 training diverged, 5 download failed, 70 internal error, 130 interrupted (Ctrl-C), "
    "143 terminated (SIGTERM).",
)
datasets_app = typer.Typer(
    help="List the known data sets, show one, or fetch one.", invoke_without_command=True
)
app.add_typer(datasets_app, name="datasets")
app.add_typer(audit_app, name="audit")


# The option is eager: --version works without a command, before other options are checked.
def _version(wanted: bool) -> None:
    if wanted:
        console.put(f"fedshift {fedshift.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Federated learning under distribution shift."""


@app.command()
def demo(out: Out = None, config: Overrides = [], format: FormatOption = Format.table) -> None:  # noqa: B006
    """Train FedAvg, FedPALS and the oracle on data that ship with the package."""
    with loading():
        from fedshift.cli.results import demo_json, draw, show_demo
        from fedshift.cli.stopping import asked_to_stop
        from fedshift.experiments.demo import demo_config, method_configs
        from fedshift.experiments.experiment import record
        from fedshift.experiments.folder.run_folder import check_unused, kept_in, reserved
        from fedshift.experiments.task.preparing import prepare

    loaded, source = demo_config(config)
    console.warn_of_data_folders()
    check_unused(out)
    done = []
    with source.placing():
        # Prepared once, since the three runs differ in nothing but the method.
        prepared = prepare(loaded)
        with reserved(out, "demo") as folder, console.progress() as listen, asked_to_stop() as stop:
            for one in method_configs(loaded):
                place = folder / one.name
                keeper = kept_in(place, one, prepared, asked=stop)
                done.append((place, record(place, one, prepared, listen, keeper=keeper)))
    page = draw([place for place, _ in done], folder)
    if format is Format.json:
        console.show_json(demo_json(done, page))
    else:
        show_demo(done, page)


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE.toml]")] = None,
    out: Out = None,
    config: Overrides = [],  # noqa: B006
    resume: Resume = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Rounds; default: whenever a minute has passed.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Clients at once, a process each; default: one by one.")
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            click_type=BackendChoice(NAMES),
            help="How clients train; auto tries all and takes the fastest.",
        ),
    ] = None,
    state_memory: Annotated[
        float | None,
        typer.Option(metavar="MIB", help="For what clients keep; the rest on disk. Default: all."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say what the time went to.")] = False,
    engine: Annotated[
        Where, typer.Option("--engine", help="flower-sim: Flower's simulation (extra flower).")
    ] = Where.in_process,
    actors: Annotated[
        int | None, typer.Option(help="With flower-sim: clients at once; default: as many as CPUs.")
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Run one experiment and leave a run folder with its numbers, model and report.

    FILE.toml: the experiment's data, shift, method and training.
    """
    with loading():
        from fedshift.cli.running import Asked, run_asked

    asked = Asked(
        file, resume, out, config, engine.value, actors, workers, checkpoint_every, backend,
        state_memory, profile,
    )  # fmt: skip
    run_asked(asked, as_json=format is Format.json)


@app.command()
def init(
    source: Annotated[Path, typer.Argument(metavar="TABLE")],
    client: Annotated[
        str | None, typer.Option(help="The column that says whose row it is.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="A client, shares (ill=0.7,well=0.3), pooled, clients. Default: pooled."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where to write.")] = Path(),
    config: Overrides = [],  # noqa: B006
    format: FormatOption = Format.table,
) -> None:
    """Look at a table of yours, and write an experiment on it that runs.

    TABLE: a CSV or Parquet file with one row per example. -c sets keys of section data, written to
    the experiment, as in -c 'data.drop=["patient"]'.
    """
    with loading():
        from fedshift.cli.init import Asked, init

    init(Asked(source, client, label, target, folder, config), as_json=format is Format.json)


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml")],
    methods: Annotated[str, typer.Option(help="As in fedavg,fedpals; default: the file's.")] = "",
    seeds: Annotated[str, typer.Option(help="As in 0,2,5; default: 0-4, or 0.")] = "",
    config: Overrides = [],  # noqa: B006
    vary: Annotated[
        str,
        typer.Option(
            click_type=Choice(["training", "split", "target"]),
            help="What differs between runs; split: all draws; target: the client held out.",
        ),
    ] = "training",
    targets: Annotated[
        str | None, typer.Option(help="With --vary target, as in north,south; default: all.")
    ] = None,
    base: Annotated[str, typer.Option(help="Differences are to it; default: the first.")] = "",
    metric: Annotated[str | None, typer.Option(help="Compared, as target_macro_f1.")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once, a process each; default: one per core.")
    ] = None,
    backend: Annotated[
        str, typer.Option(click_type=BackendChoice(ALONE), help="How clients train.")
    ] = "loop",
    workers: Annotated[
        int | None, typer.Option(help="Clients at once in each run, a process each.")
    ] = None,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the comparison that was stopped.")
    ] = False,
    format: FormatOption = Format.table,
) -> None:
    """Train several methods over several seeds, and set them side by side in one table.

    FILE.toml: the experiment. A list in -c, as in training.lr=0.01,0.1, is a grid from which
    validation chooses for each method.
    """
    with loading():
        from fedshift.cli.comparing import Asked, compare_asked

    asked = Asked(
        file, methods, seeds, config, vary, targets, base, metric, jobs, backend, workers, out,
        resume,
    )  # fmt: skip
    compare_asked(asked, as_json=format is Format.json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the page: a folder or NAME.html.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for PDF and PNG figures (matplotlib).")
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Draw the report of one run, or one page that compares several.

    FOLDER...: run folders, or folders of them, as `fedshift run`, `compare` and `demo` leave them.
    Runs that differ in the seed alone are one line.
    """
    with loading():
        from fedshift.cli.reporting import report_asked

    report_asked(folders, out, figures, as_json=format is Format.json)


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
        int, typer.Option(min=0, max=100_000, help="Draws for the hull distance's interval.")
    ] = 0,
    report: Annotated[Path | None, typer.Option("--report", help="Write NAME.html.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """From label histograms alone: is the target covered, and at what cost in sample size?"""
    with loading():
        from fedshift.cli.diagnosis import diagnose_files

    diagnose_files(
        counts, target, lam=lam, ess=ess, cap=cap, normalise=normalise, bootstrap=bootstrap,
        page=report,
        as_json=format is Format.json,
    )  # fmt: skip


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument()] = None, format: FormatOption = Format.table
) -> None:
    """List every method: what it is, where it comes from, what leaves a client.

    NAME: one method alone, as in fedrep.
    """
    with loading():
        from fedshift.cli.methods import methods_listed

    methods_listed(name, as_json=format is Format.json)


@datasets_app.callback()
def datasets(context: typer.Context, format: FormatOption = Format.table) -> None:
    """List the known data sets: where each was found, or how to get it."""
    if context.invoked_subcommand is None:
        with loading():
            from fedshift.cli.listings import datasets_listed

        console.warn_of_data_folders()
        datasets_listed(as_json=format is Format.json)


@datasets_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME")], format: FormatOption = Format.table
) -> None:
    """Show one data set; where its clients come with it, also their label shift beside chance.

    NAME: as listed by `fedshift datasets`.
    """
    with loading():
        from fedshift.cli.listings import dataset_shown

    dataset_shown(name, as_json=format is Format.json)


@datasets_app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    folder: Annotated[Path | None, typer.Option(help="Where to; default: the cache.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Download a data set from its official place, with checksums.

    NAME: as listed by `fedshift datasets`.
    """
    with loading():
        from fedshift.cli.listings import fetch_dataset

    fetch_dataset(name, folder, as_json=format is Format.json)


def main() -> None:
    """Entry point: every failure becomes one message and a documented exit code."""
    code = perform(app, sys.argv[1:])
    if code:
        sys.exit(code)
