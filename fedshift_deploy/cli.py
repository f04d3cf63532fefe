"""The commands `fedshift deploy ...`, with their options; `command.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.choices import (
    Format,
    FormatOption,
    LogFormat,
    LogOption,
    Out,
    Overrides,
    Resume,
)
from fedshift.cli.loading import loading

app = typer.Typer(
    help="A federation of real machines, on Flower (extra flower).", no_args_is_help=True
)

MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics", metavar="[HOST:]PORT",
        help="Serve /healthz, /readyz and /metrics there; HOST: 127.0.0.1. Default: not.",
    ),
]  # fmt: skip


@app.command("init")
def deploy_init(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    host: Annotated[
        list[str], typer.Option(help="A name or address of the server; may be repeated.")
    ] = [],  # noqa: B006
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A federation whose authority and keys are kept."),
    ] = None,
    config: Overrides = [],  # noqa: B006
) -> None:
    """Write certificates, the clients' keys and the app of an experiment into FOLDER.

    FILE.toml: the experiment, as for `fedshift run`.
    """
    with loading():
        from fedshift_deploy.command import init

    init(file, folder, host, config, keys)


@app.command("check")
def deploy_check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    host: Annotated[str, typer.Option(help="Where the server will listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
) -> None:
    """Try a client's folder with its own data, or a federation's on the server; send nothing.

    FOLDER: of a client, with client.json in it, or the one that `fedshift deploy init` made.
    """
    with loading():
        from fedshift_deploy.command import check

    check(folder, host, port)


@app.command("server")
def deploy_server(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    out: Out = None,
    resume: Resume = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a client has for a round.")
    ] = 3600.0,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for all clients before round 1.")
    ] = 600.0,
    min_clients: Annotated[
        int | None,
        typer.Option(min=1, help="Start with so many once --patience is over; default: all."),
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="Also refit a router by gradients: many messages.")
    ] = False,
    metrics: MetricsOption = None,
    log_format: LogOption = LogFormat.text,
    format: FormatOption = Format.table,
) -> None:
    """Run a federation's experiment once all its clients have joined."""
    with loading():
        from fedshift_deploy.command import server

    waits = {"timeout": timeout, "patience": patience, "min_clients": min_clients, "refit": refit}
    server(
        folder, out, resume, host, port, waits, metrics, log_format,
        as_json=format is Format.json,
    )  # fmt: skip


@app.command("renew")
def deploy_renew(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    host: Annotated[
        list[str], typer.Option(help="As for init; default: the present certificate's names.")
    ] = [],  # noqa: B006
    client: Annotated[
        int | None, typer.Option(min=0, help="A new key for client I instead.", metavar="I")
    ] = None,
) -> None:
    """Renew the server's certificate, or a client's key, in the folder of a federation.

    FOLDER: as made by init. A server that is running takes the new ones when it is started again.
    """
    with loading():
        from fedshift_deploy.command import renew

    renew(folder, host, client)


@app.command("client")
def deploy_client(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    server: Annotated[str, typer.Option(help="HOST:PORT of the federation's server.")],
    patience: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for a server that takes this client.")
    ] = 600.0,
    metrics: MetricsOption = None,
    log_format: LogOption = LogFormat.text,
) -> None:
    """Be a client, with the folder that `fedshift deploy init` made for it."""
    with loading():
        from fedshift_deploy.command import client

    client(folder, server, patience, metrics, log_format)
