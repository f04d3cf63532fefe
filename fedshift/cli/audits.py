"""`fedshift audit`: what can be checked of a federation afterwards."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.loading import loading

audit_app = typer.Typer(help="Check what clients claim.", no_args_is_help=True)


@audit_app.callback()
def audit() -> None:
    """Check what clients claim."""


@audit_app.command()
def marginals(
    place: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG")],
    claims: Annotated[
        Path | None,
        typer.Option(help="CSV: labels as header, one row per client; default: what they hold."),
    ] = None,
    level: Annotated[float, typer.Option(help="Share of false alarms per client.")] = 0.01,
    format: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
) -> None:
    """Do the clients' gradients fit the label counts that they claim?

    RUN_OR_CONFIG: a run folder, whose model is used, or FILE.toml, with the first model.
    """
    with loading():
        from fedshift.cli import console
        from fedshift.errors import InputError, unknown
        from fedshift.experiments.claims import audit_task, claimed, configured, model_of
        from fedshift.experiments.task import prepare
        from fedshift.files import clean

    if format not in ("table", "json"):
        raise unknown("format", format, ("table", "json"))
    if not 0 < level < 0.5:
        raise InputError(f"--level {level:g}: allowed: more than 0, less than 0.5")
    config, source, model = configured(place)
    # Errors of the data name the line of the file that asked for them.
    with source.placing():
        prepared = prepare(config)
    counts = None if claims is None else claimed(claims, prepared.task.classes)
    findings = audit_task(prepared, *model_of(prepared, model), counts, level=level)
    if format == "json":
        console.show_json({"level": level, "clients": [clean(asdict(one)) for one in findings]})
        return
    rows = [
        (str(f.client), *("–" if math.isnan(v) else f"{v:.3g}" for v in (f.misfit, f.p)), f.verdict)
        for f in findings
    ]
    title = "Gradients against claimed label counts"
    console.show_table(title, ("Client", "Misfit", "p", "Verdict"), rows)
    console.say(
        f"Inconsistent: a misfit that a true claim shows with chance {level:g}. The claim, the "
        "gradient or P(X | Y) may be another one there; the test cannot tell which. Untested: no "
        "mixture of the others has this client's labels."
    )
