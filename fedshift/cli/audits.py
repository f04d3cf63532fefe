"""`fedshift audit`: checks of what clients claimed, after a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.loading import loading

if TYPE_CHECKING:
    from fedshift.audit import Finding

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
        from fedshift.experiments import claims as read
        from fedshift.experiments.task.preparing import prepare
        from fedshift.files import clean

    if format not in ("table", "json"):
        raise unknown("format", format, ("table", "json"))
    if not 0 < level < 0.5:
        raise InputError(f"--level {level:g}: allowed: more than 0, less than 0.5")
    config, source, model = read.configured(place)
    # So errors about the data name the line of the file that set the key.
    with source.placing():
        prepared = prepare(config)
    sent = read.registered_in(place, labels=claims is None)
    counts = sent.get("labels") if claims is None else read.claimed(claims, prepared.task.classes)
    findings = read.audit_task(prepared, *read.model_of(prepared, model), counts, level=level)
    odd = read.other_sizes(prepared, sent)
    if format == "json":
        clients = [clean(asdict(one)) for one in findings]
        console.show_json({"level": level, "clients": clients, "sizes": odd})
    else:
        _show(findings, level)
        _show_sources(odd, registered=bool(sent) and claims is None)


def _show_sources(odd: Sequence[Mapping[str, int]], *, registered: bool) -> None:
    """Say where the claims come from, and which clients registered a wrong size."""
    from fedshift.cli import console

    if registered:
        console.say("The claims are those that the clients registered with the server.")
    for one in odd:
        console.say(
            f"Client {one['client']} registered {one['registered']} examples; the experiment deals "
            f"it {one['dealt']}."
        )


def _show(findings: Sequence[Finding], level: float) -> None:
    from fedshift.cli import console

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
