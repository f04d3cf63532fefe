"""An experiment on deployed Flower nodes: the ServerApp and ClientApp that Flower loads by name.

Flower's run configuration has the experiment's TOML ("experiment") and the folder for results
("out"). Each client's machine names the function that gives its data, as "module:function"; it maps
(TOML, partition) to a Site.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedshift.algorithms.method import Method
from fedshift.engine.run import Federation
from fedshift.errors import InputError
from fedshift.experiments.config.python_names import SITES
from fedshift.experiments.config.schema import Config
from fedshift.experiments.experiment import record
from fedshift.experiments.folder.run_folder import EventLog, kept_in, reserved
from fedshift.experiments.listeners import ignore_event
from fedshift.experiments.measures.caps import cap_named
from fedshift.experiments.resume import check_links, reopened
from fedshift.experiments.task.preparing import Prepared, prepare
from fedshift.files import is_file
from fedshift.flower.client import Own, Site, app_of, partition
from fedshift.flower.kept import folder_of
from fedshift.flower.records import fields_of
from fedshift.record.folder import CONFIG, EVENTS, SERVING, SUMMARY
from fedshift.tree import Params
from fedshift_deploy.chosen import CHOICES, KEEP, SITE, check_source, chosen, imported
from fedshift_deploy.machines.awaited import Awaited
from fedshift_deploy.machines.deployable import check_min_clients, configured
from fedshift_deploy.machines.deployed_engine import Deployed, News, validated
from fedshift_deploy.machines.opening import opening_event
from fedshift_deploy.notices import notify, tell_here
from fedshift_deploy.sites.answering import ASK, answer, own_site
from fedshift_deploy.sites.gathering import gather
from fedshift_deploy.sites.own_model import MODELS, leave_own_model

# Flower imports this module and looks for these names (deploy/place.py writes them into the app).
server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate on the server's examples, and leave a run folder."""
    given = context.run_config
    config = configured(str(given["experiment"]))
    waits = {k: float(given[k]) for k in ("patience", "timeout")}

    at_sites = config.data.at_sites
    # 0 means all clients.
    if least := int(given.get("min_clients", 0)):
        check_min_clients(config.data)
        waits["min_clients"] = least
    out = Path(str(given["out"]))
    names = config.data.clients or ()
    news = News(out, config.name, names=names)
    Awaited(grid, news, {f"client-{i}": name for i, name in enumerate(names)})
    prepares = partial(gather, grid, config, waits, news) if at_sites else partial(prepare, config)
    with _folder(out, config, prepares) as (folder, prepared):
        # A checkpoint after every round: on Flower a round takes seconds at least, so it costs
        # little beside it.
        keeper = kept_in(folder, config, prepared, 1)
        # The refit by gradients takes many messages, so it is done only on request.
        refits = ("moment", "refitted")[: 1 + bool(given.get("refit"))]
        dealt = str(given.get("site")) == CHOICES[SITE] and not at_sites
        on_sites = config.shift.target == "clients"
        opens = partial(
            opening, EventLog(folder), prepared, run=config.name, dealt=dealt,
            cap=cap_named(config.method, config.training), cohort=config.training.cohort,
        )  # fmt: skip
        facts = {
            "command": command_of(waits, refit=bool(given.get("refit"))),
            "dealt": dealt,
            "measured_by": "clients" if config.data.validation > 0 else None,
            "tested_by": "clients" if on_sites or prepared.task.test.scorer else "server",
        }
        asks = config.data.validation > 0 and not at_sites
        counts = validated(prepared.task) if dealt or at_sites else None
        engine = Deployed(
            grid, waits, folder, opens, news, on_sites=on_sites, refits=refits, facts=facts,
            asks=asks, dealt=prepared.task if dealt else None, counts=counts,
        )  # fmt: skip
        record(folder, config, prepared, ignore_event, engine, keeper)


def opening(
    log: EventLog, prepared: Prepared, algorithm: Method, federation: Federation,
    table: Params, **facts: Any,
) -> None:  # fmt: skip
    """Log what the clients registered before round 1; facts: more arguments of `opening_event`."""
    # If no weights exist for this table there is nothing to log. `open_round` reports that, or
    # skips the round.
    with contextlib.suppress(InputError):
        log(opening_event(prepared, algorithm, federation, table, **facts))


@contextlib.contextmanager
def _folder(
    out: Path, config: Config, prepares: Callable[[], Prepared]
) -> Iterator[tuple[Path, Prepared]]:
    """(the run's folder, the prepared experiment).

    The folder is new, unless it has a run whose server ended before the run did.
    """
    again = f"{command_of({})} --resume {{}}"
    if is_file(out / CONFIG) and not is_file(out / SUMMARY):
        check_links(out)  # here, because preparing writes events before `reopened` checks
        prepared = prepares()
        with reopened(out, config, prepared, again=again) as (folder, _):
            yield folder, prepared
    else:
        with reserved(out, config.name, again) as folder:
            try:
                prepared = prepares()
            except BaseException:
                # Nothing has begun. Without events the next server can use the same folder.
                (folder / EVENTS).unlink(missing_ok=True)
                raise
            yield folder, prepared


def command_of(waits: Mapping[str, float], *, refit: bool = False) -> str:
    """The command that runs the federation's experiment again."""
    served = os.environ.get(SERVING, "fedshift deploy server FOLDER")
    options = [f"--{name.replace('_', '-')} {value:g}" for name, value in waits.items()]
    return " ".join([served, *options, *(["--refit"] if refit else [])])


def site_of(context: Context) -> Site:
    """This node's client, made by the function that its machine names."""
    check_source(str(context.run_config["site"]))
    text = str(context.run_config["experiment"])
    # Before anything else: the text came by message. If it named a Python file, the site's function
    # could run it.
    config = configured(text)
    site: Site
    if config.data.at_sites:
        site, _ = own_site(config, context, place_of(context))
    else:
        site = imported(chosen(SITE))(text, partition(context))
    # Set here and not when the app is made: only the run's configuration has the number.
    torch.set_num_threads(config.training.threads)
    return site


def state_folder() -> Path | None:
    """The folder for what this node's client keeps between rounds, or None."""
    path = os.environ.get(KEEP)
    return Path(path) if path else None


def place_of(context: Context) -> Path:
    """This client's folder, which `fedshift deploy init` made, and which has site.toml."""
    kept = state_folder()
    if kept is None:
        raise InputError("data of its own need a client that `fedshift deploy client` started")
    return kept.parent


def is_private(context: Context) -> bool:
    """Whether the clients of a run have data of their own."""
    data = tomllib.loads(str(context.run_config["experiment"])).get("data", {})
    return bool(data.get("source") == SITES)


def leave_model(context: Context, served: Own) -> None:
    """Write the model that this client serves into its folder, if it has one."""
    kept, text = state_folder(), str(context.run_config["experiment"])
    if kept is not None and served.name:
        folder = folder_of(kept.parent / MODELS, served.name)
        about = {
            "round": served.t,
            "shape": served.shape,
            "classes": served.classes,
            "clients": served.clients,
        }
        leave_own_model(folder, text, served.pair, **about)


def note_round(sent: RecordDict, context: Context) -> None:
    """Tell the process that watches this client how far the run is, for its screen."""
    if "run" in sent.config_records and "round" in (run := fields_of(sent, "run")):
        rounds = configured(str(context.run_config["experiment"])).training.rounds
        notify(round=int(run["round"]), rounds=rounds)


# False: the server may never read clients' states here. On real machines they are private.
client_app = app_of(
    site_of, 1, False, state_folder(), is_private, leave_model, note_round, tell_here
)


@client_app.query(ASK)
def answer_site(message: Message, context: Context) -> Message:
    """Answer a question that the server asks a client with data of its own."""
    try:
        config, place = configured(str(context.run_config["experiment"])), place_of(context)
    except InputError as e:
        # For example, the server has another version. The client's operator should see it, too.
        tell_here(e)
        raise
    torch.set_num_threads(config.training.threads)
    content = answer(message, context, config, place)
    return Message(content, reply_to=message)
