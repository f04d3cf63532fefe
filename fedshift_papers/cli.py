"""The command `fedshift reproduce`: its arguments. Its code is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.choices import BackendChoice, Format, FormatOption, Overrides
from fedshift.cli.loading import loading
from fedshift.engine.backend_names import ALONE

app = typer.Typer(add_completion=False)
PublishOption = Annotated[
    Path | None, typer.Option(help="Also here, with the runs' summaries but no models.")
]
CountsOption = Annotated[
    Path | None,
    typer.Option(help="For figures of weights: a CSV of label counts, a row per client."),
]


@app.command()
def reproduce(
    context: typer.Context,
    target: Annotated[str | None, typer.Argument()] = None,
    dataset: Annotated[list[str], typer.Option(help="Only this data set; may be repeated.")] = [],  # noqa: B006
    split: Annotated[list[str], typer.Option(help="Only this split, as in C=3.")] = [],  # noqa: B006
    methods: Annotated[str | None, typer.Option(help="Only these, as in fedpals,fedavg.")] = None,
    seeds: Annotated[str | None, typer.Option(help="As in 0-7 or 0,2,5.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Fewer (or more) than the paper's.")] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once, a process each.")] = 1,
    backend: Annotated[
        str, typer.Option(click_type=BackendChoice(ALONE), help="How clients train.")
    ] = "loop",
    tune: Annotated[bool, typer.Option("--tune", help="Train the grids first, and keep.")] = False,
    no_train: Annotated[
        bool, typer.Option("--no-train", help="Draw the table from what is there.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Runs and tables; what is there is used.")] = Path(
        "reproduced"
    ),
    publish: PublishOption = None,
    counts: CountsOption = None,
    config: Overrides = [],  # noqa: B006
    format: FormatOption = Format.table,
) -> None:
    """Train a paper's table or figure again, and set it beside what was printed.

    TARGET: as in fedpals/table1; leave out to list all.
    """
    with loading():
        from fedshift.sweeps.spans import parse_seeds
        from fedshift_papers.command import list_tables, reproduce_target
        from fedshift_papers.reproduce.reproduce import Request

    as_json = format is Format.json
    if target is None:
        list_tables(_options(context) - {"--format"}, as_json=as_json)
        return
    request = Request(
        target, out, tuple(dataset), tuple(split),
        () if methods is None else tuple(m.strip() for m in methods.split(",")),
        None if seeds is None else parse_seeds(seeds),
        rounds, tuple(config), jobs, backend, tune, not no_train, publish, counts,
    )  # fmt: skip
    reproduce_target(request, as_json=as_json)


def _options(context: typer.Context) -> set[str]:
    """The options that were given on the command line, as opposed to defaults."""
    sources = {p.name: context.get_parameter_source(p.name or "") for p in context.command.params}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    return {p.opts[-1] for p in context.command.params if p.name in given}
