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
        typer.Option(
            help="CSV: labels as header, one row per client; default: what clients of a deployed "
            "run registered, else what they hold."
        ),
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
        from fedshift.experiments.claims import (
            audit_task,
            claimed,
            configured,
            model_of,
            registered_in,
        )
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
    sent = registered_in(place)
    counts = sent.get("labels") if claims is None else claimed(claims, prepared.task.classes)
    if sent and counts is None:
        raise InputError(
            f"{place}: clients registered sizes alone, since {config.method.name} asks for no "
            "labels; give what they claim as --claims FILE.csv"
        )
    findings = audit_task(prepared, *model_of(prepared, model), counts, level=level)
    dealt = prepared.federation().table["n"].tolist()
    odd = [
        {"client": i, "registered": int(a), "dealt": int(b)}
        for i, (a, b) in enumerate(zip(sent.get("n", dealt), dealt, strict=True))
        if a != b
    ]
    if format == "json":
        clients = [clean(asdict(one)) for one in findings]
        console.show_json({"level": level, "clients": clients, "sizes": odd})
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
    if sent and claims is None:
        console.say("The claims are those that the clients registered with the server.")
    for one in odd:
        console.say(
            f"Client {one['client']} registered {one['registered']} examples; the experiment deals "
            f"it {one['dealt']}."
        )
