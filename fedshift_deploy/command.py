"""`fedshift deploy`: a federation of real machines."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift.cli import console
from fedshift.cli.choices import LogFormat
from fedshift.cli.log_lines import line_of, log_line
from fedshift.errors import InputError
from fedshift.files import is_file, is_folder, private
from fedshift.flower.installed import check_flower

if TYPE_CHECKING:
    from fedshift.experiments.config.places import Source
    from fedshift.experiments.config.schema import Config
    from fedshift_deploy.federation import Link


@private()
def init(
    file: Path, folder: Path, hosts: list[str], overrides: list[str], keys: Path | None = None
) -> None:
    """Write the federation's folder, and say which files go where."""
    check_flower()
    from fedshift.experiments.config.load import dumps, load_with_source
    from fedshift.experiments.measures.caps import with_cap
    from fedshift_deploy.machines.deployable import check_start, configured
    from fedshift_deploy.place import make_place
    from fedshift_deploy.sites.check import site_files

    config, source = load_with_source(file, overrides)
    console.tell_dropped(config.method.name, source.dropped)
    training, cap = with_cap(config.method, config.training, config.clients)
    config = config.model_copy(update={"training": training})
    text, clients = dumps(config), config.clients
    with source.placing():
        # Refuse here what would be refused later, after all clients have joined.
        untried = check_start(configured(text))
    if keys is not None:
        _check_order(keys, config.data.clients or ())
    names = _with_own(hosts) if hosts or keys is None else []
    make_place(folder, text, clients, names, beside=site_files(config.data, text), keys=keys)
    console.put(f"{folder}: certificates for {', '.join(names) or 'the names of before'}")
    console.say(cap, indent=0)
    if keys is not None:
        _say_kept(keys, at_sites=config.data.at_sites)
    if untried:
        console.say(untried, indent=0)
    for line in (
        f"Give {folder}/clients/client-I to client I of {clients}, by a way that you trust: it",
        "holds that client's private key. ca.key and server.key never leave this machine.",
        f"Then: fedshift deploy server {folder}, and on each client's machine",
        "      fedshift deploy client client-I --server HOST:PORT",
    ):
        console.put(line)
    _say_sites(config.data.clients or ())


def _check_order(keys: Path, names: Sequence[str]) -> None:
    """Raise InputError if a site would get the number, and with it the key, of another site."""
    from fedshift.experiments.config.load import load_config
    from fedshift_deploy.place import EXPERIMENT

    before = load_config(keys / EXPERIMENT).data.clients if is_file(keys / EXPERIMENT) else None
    for i, (old, new) in enumerate(zip(before or (), names, strict=False)):
        if old != new:
            raise InputError(
                f'data.clients: client-{i} of {keys} is "{old}", and would be "{new}" here, with '
                "its key. Sites are numbered in the order of their names: give a name that comes "
                "after the others', or leave out --keys"
            )


def _say_kept(keys: Path, *, at_sites: bool) -> None:
    """Say what clients with keys of another federation need to join this one."""
    # A site checks its data against experiment.toml, which names all sites.
    also = ", and take the experiment.toml of the new one" if at_sites else ""
    console.say(
        f"Clients of {keys} keep their folders{also}; hand out those of new ones only. What "
        f"clients kept of runs in {keys} is for these runs alone.", indent=0,
    )  # fmt: skip


def _say_sites(names: Sequence[str]) -> None:
    """Say what clients with data of their own have to do before they join."""
    if names:
        each = ", ".join(f"client-{i} is {name}" for i, name in enumerate(names))
        console.say(
            f"Clients have data of their own: {each}. Each names its own in site.toml, and tries "
            "them before anything is sent:",
            indent=0,
        )
        console.put("      fedshift deploy check client-I")


def check(folder: Path, host: str, port: int) -> None:
    """Check a client's folder and data, or a server's folder and port, and describe them."""
    check_flower()
    if is_file(folder / "client.json"):
        from fedshift_deploy.joining import check_place, number_of
        from fedshift_deploy.sites.check import check_site

        check_place(folder)
        lines = check_site(folder, number_of(folder))
    elif not is_folder(folder / "clients"):
        raise InputError(
            f"{folder}: neither a federation's folder (with clients) nor a client's (with "
            "client.json); give one that `fedshift deploy init` made"
        )
    else:
        lines = _check_server(folder, host, port)
    for line in lines:
        console.put(line)


def _check_server(folder: Path, host: str, port: int) -> list[str]:
    """Lines that describe a server's folder. Raises InputError if its server could not start."""
    from fedshift.experiments.measures.caps import cap_text
    from fedshift_deploy.keys import valid_until
    from fedshift_deploy.machines.deployable import check_start
    from fedshift_deploy.place import check_place_unshared, clients_of
    from fedshift_deploy.processes import check_port

    clients, certificate = clients_of(folder), folder / "server.crt"
    check_place_unshared(folder)
    check_port(host, port)
    lines = [
        f"{certificate}: valid until {valid_until(certificate)}",
        f"{len(clients)} clients' keys; {host}:{port} is free",
    ]
    config, source = _loaded(folder)
    with source.placing():
        untried = check_start(config)
    cap = cap_text(config.method, config.training, config.clients)
    return [*lines, cap, untried or "the experiment can start; nothing was trained"]


def _with_own(hosts: Sequence[str]) -> list[str]:
    """These names, and the names by which the server reaches itself."""
    return list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))


@private()
def renew(folder: Path, hosts: Sequence[str], client: int | None) -> None:
    """Renew the server's certificate, or one client's key, and say what to hand out."""
    check_flower()
    from fedshift_deploy.keys import valid_until
    from fedshift_deploy.place import renew_certificate, renew_client

    next_start = "A server that is running takes it at its next start."
    if client is not None:
        if hosts:
            raise InputError(
                "--host is for the server's certificate; leave out --client, or --host"
            )
        place = renew_client(folder, client)
        console.put(f"{place}: a new key; hand out key and key.pub. {next_start}")
        return
    again = renew_certificate(folder, _with_own(hosts) if hosts else ())
    end = valid_until(folder / "server.crt")
    console.put(f"{folder}/server.crt: valid until {end}. {next_start}")
    if again:
        console.put(f"{folder}/ca.crt: renewed, too; each client needs it in its folder by then.")


@private()
def server(
    folder: Path,
    out: Path | None,
    resume: Path | None,
    host: str,
    port: int,
    waits: dict[str, Any],
    metrics: str | None,
    logs: LogFormat,
    *,
    as_json: bool,
) -> None:
    """Serve, then print a run's results as `fedshift run` does, or a last line of the JSON log."""
    check_flower()
    from fedshift.cli.results import draw, run_json, show_run
    from fedshift.experiments.folder.run_folder import check_unused
    from fedshift_deploy.federation import serve
    from fedshift_deploy.monitoring import monitored

    if resume is None:
        place = next_folder(folder) if out is None else out
        check_unused(place)
    else:
        place = unfinished(resume, out)
    least = waits["min_clients"]
    text = _experiment(folder, late=least is not None)
    with (
        _resumable(folder, place),
        monitored(metrics, folder, teller(logs), least) as (listen, beside),
    ):
        serve(
            folder, place, host=host, port=port, listen=listen, experiment=text,
            beside=_announced(beside, f"{host}:{port}", waits, logs), **waits,
        )  # fmt: skip
    page = draw([place], place)
    if as_json:
        console.show_json(run_json(place, page))
    elif logs is LogFormat.json:
        console.tell(log_line("done", folder=str(place), report=str(page)))
    else:
        show_run(place, page)


@contextlib.contextmanager
def _resumable(folder: Path, place: Path) -> Iterator[None]:
    """If the block is interrupted after a checkpoint, the message says how to resume the run."""
    from fedshift.record.folder import CHECKPOINTS

    try:
        yield
    except KeyboardInterrupt as e:
        if is_folder(place / CHECKPOINTS):
            e.add_note(f"go on with `fedshift deploy server {folder} --resume {place}`")
        raise


def _announced(
    beside: Callable[[Link], contextlib.AbstractContextManager[object]],
    address: str, waits: Mapping[str, Any], logs: LogFormat,
) -> Callable[[Link], contextlib.AbstractContextManager[object]]:  # fmt: skip
    """`beside`, preceded by a line on where the server listens and for whom it waits."""

    def announce(link: Link) -> contextlib.AbstractContextManager[object]:
        least, within = waits["min_clients"], f"within {waits['patience']:g} s"
        fewer = "" if least is None else f", or with {least} of them then"
        text = f"listening on {address}; begins with all {len(link.names)} clients, {within}{fewer}"
        console.tell(log_line("listening", message=text) if logs is LogFormat.json else text)
        return beside(link)

    return announce


def _experiment(folder: Path, *, late: bool) -> str:
    """The TOML of the federation's experiment, after checks.

    late: whether clients may join after the start.
    """
    from fedshift.experiments.config.load import dumps
    from fedshift_deploy.machines.deployable import check_min_clients

    config, _ = _loaded(folder)
    if late:
        check_min_clients(config.data)
    return dumps(config)


def _loaded(folder: Path) -> tuple[Config, Source]:
    """The federation's experiment, after checks."""
    from fedshift.experiments.config.load import dumps, load_with_source
    from fedshift_deploy.machines.deployable import configured
    from fedshift_deploy.place import EXPERIMENT, clients_of

    keys, file = len(clients_of(folder)), folder / EXPERIMENT
    config, source = load_with_source(file)
    with source.placing():
        configured(dumps(config))
    if config.clients != keys:
        key = "shift.clients" if config.data.clients is None else "the number of data.clients"
        raise InputError(
            f"{file}: {key} = {config.clients}, and the federation has the keys of "
            f"{keys} clients; give {keys}, or make another federation with `fedshift deploy init`"
        )
    return config, source


def teller(logs: LogFormat) -> Callable[[dict[str, Any]], None]:
    """A listener that prints a run's events, each as a line of JSON, or as lines for people."""
    if logs is LogFormat.json:
        return lambda event: console.tell(line_of(event))
    # Lines instead of bars even on a terminal: rounds take minutes, and an operator who comes back
    # wants to read what has happened.
    listen = console.PlainProgress(each=True)

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "claims":
            for line in _claims(event):
                console.tell(line)
        elif event["event"] == "fits":
            console.tell(f"{event['run']}: fitting the router, by messages to its clients")
        else:
            listen(event)

    return tell


def _claims(event: Mapping[str, Any]) -> Iterator[str]:
    """Lines on what the clients claimed before round 1."""
    free, capped = f"{event['without_cap']:.3f}", f"{event['one_could_take']:.3f}"
    more = f"; without a cap {free}" if event["cap"] < 1 else "; set training.max_weight for less"
    # "of all clients": if others drop out it is more, since one of two clients has half.
    of = "of the weight in a round of all clients"
    yield f"one dishonest client could take at most {capped} {of}{more}"
    largest = event["largest"]
    registered, left = (f"{largest[key]:.3f}" for key in ("weight", "capped"))
    less = f"; the cap leaves it {left}" if left != registered else ""
    yield f"largest weight by what clients registered: {_called(largest)} {registered}{less}"
    yield f"label counts against gradients: {event['audit']}"
    for one in event["suspicions"]:
        yield f"warning: {_called(one)}: {one['reason']}"


def _called(one: Mapping[str, Any]) -> str:
    return str(one.get("name", f"client {one['client']}"))


def unfinished(place: Path, out: Path | None) -> Path:
    """The run folder, if there is something in it to go on from."""
    from fedshift.experiments.resume import configured
    from fedshift.record.folder import CHECKPOINTS

    if out is not None:
        raise InputError("--resume goes on in its folder; leave out --out")
    # Its result is not needed: it raises for a complete run, and for no run folder.
    configured(place)
    if not is_folder(place / CHECKPOINTS):
        raise InputError(
            f"{place}: no checkpoint: the server ended before round 1 was over; leave out --resume"
        )
    return place


def next_folder(folder: Path) -> Path:
    """folder/run, or the first of run-2, run-3, ... that does not exist."""
    names = itertools.chain(["run"], (f"run-{n}" for n in itertools.count(2)))
    return next(folder / name for name in names if not os.path.exists(folder / name))


@private()
def client(
    place: Path, address: str, patience: float, metrics: str | None, logs: LogFormat
) -> None:
    """Join, and stay until interrupted or refused."""
    check_flower()
    from fedshift_deploy.joining import join, node_command
    from fedshift_deploy.monitoring import client_monitored

    def say(text: str, level: str) -> None:
        console.tell(log_line("client", level, message=text) if logs is LogFormat.json else text)

    node_command(place, address)  # refuses a wrong folder or address before anything is printed
    first = f"joining {address}; what happens is in {place / 'supernode.log'}"
    if logs is LogFormat.json:
        say(first, "info")
    else:
        console.put(f"{first}; Ctrl-C leaves")
        # Flushed, because the process may now wait for hours.
        sys.stdout.flush()
    with client_monitored(metrics, place) as watch:
        join(place, address, patience=patience, say=say, watch=watch)
