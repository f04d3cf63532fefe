"""An experiment on deployed Flower nodes: the ServerApp and ClientApp that Flower loads by name.

The run's configuration holds the experiment's TOML ("experiment"), and where results go ("out").
Each client's machine says what gives its data: "module:function" from (TOML, partition) to a Site.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedshift.algorithms.base import Algorithm
from fedshift.engine.checks.gate import Dropped
from fedshift.engine.run import Federation, Round
from fedshift.engine.traffic import Meter
from fedshift.engine.trial import check_model, check_training
from fedshift.errors import DataError, InputError
from fedshift.evaluation.scores import OwnScores, Score
from fedshift.experiments.at_sites import ASK, answer, own_site
from fedshift.experiments.awaited import Awaited
from fedshift.experiments.config import Config, Training
from fedshift.experiments.experiment import (
    check_method,
    dropped_event,
    federation_of,
    method_of,
    record,
)
from fedshift.experiments.folder import EventLog, kept_in, reserved
from fedshift.experiments.from_sites import check_sites, gather, imagined
from fedshift.experiments.load import validate
from fedshift.experiments.on_flower import configured_site, on_grid, strategy_of
from fedshift.experiments.on_sites import check_own_models
from fedshift.experiments.opening import opening_event
from fedshift.experiments.own_models import MODELS, leave_own_model
from fedshift.experiments.python_names import SITES, is_python
from fedshift.experiments.resume import check_links, reopened
from fedshift.experiments.stopping import check_stopping
from fedshift.experiments.task import Prepared, prepare
from fedshift.experiments.training import silent
from fedshift.files import is_file, write
from fedshift.flower.chosen import SITE, check_site, chosen, imported
from fedshift.flower.client import Own, Site, app_of, partition
from fedshift.flower.kept import folder_of
from fedshift.flower.quiet import KEEP
from fedshift.flower.rounds import evaluated, measured_by_clients, overhear, sites_of
from fedshift.flower.routing import Sites
from fedshift.flower.strategy import AlgorithmStrategy
from fedshift.record.folder import CONFIG, DEPLOYED, EVENTS, SERVING, SUMMARY
from fedshift.tree import Params, Parts

# Flower imports this module and looks for these names (deploy/place.py writes them into the app).
server_app = ServerApp()
# What gives clients the data that the server deals them, as the app's configuration has it.
DEALT = f"{configured_site.__module__}:{configured_site.__name__}"


def configured(text: str) -> Config:
    """The experiment. Raises InputError for what only a simulation can do."""
    config = validate(tomllib.loads(text), text=text, origin="experiment")
    if config.method.options.get("ess") == "auto":
        raise InputError('method.ess = "auto" trains one model per candidate; deploy with a number')
    named = [config.model.name, config.method.name, *config.metrics.extra]
    foreign = config.data.source is not None and not config.data.at_sites
    if foreign or any(map(is_python, named)):
        raise InputError(
            "a deployed federation runs no file that an experiment names, since its text comes by "
            "message: use data, networks and methods of the library, data of the clients' own "
            '(data.source = "sites"), or `fedshift run`'
        )
    if config.data.at_sites:
        check_sites(config)
    if config.shift.target == "clients" and config.training.keep == "best":
        raise InputError(
            'training.keep = "best" may keep an earlier round, and clients then have later models; '
            "leave it out, or simulate it (--engine flower-sim)"
        )
    return config


def check_start(config: Config) -> str:
    """Raise InputError for what a run would refuse before its first round; trains nothing.

    Returns a sentence where that could not be tried, since this machine lacks the data.
    """
    try:
        prepared = imagined(config) if config.data.at_sites else prepare(config)
    except DataError as e:
        return f"Whether this experiment can start was not tried: {e}"
    check_stopping(config.training, prepared.task)
    check_method(config, prepared)
    if prepared.task.tests:
        federation = federation_of(config, prepared)
        algorithm = method_of(config, prepared)(**config.method.options)
        check_own_models(config.method.name, algorithm, federation)
    return ""


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, evaluate on the server's examples, and leave a run folder."""
    given = context.run_config
    config = configured(str(given["experiment"]))
    waits = {k: float(given[k]) for k in ("patience", "timeout")}

    at_sites = config.data.at_sites
    # 0: all. Folders of earlier versions have no such line.
    if least := int(given.get("min_clients", 0)):
        if at_sites:
            raise InputError(
                'with data.source = "sites" columns are agreed on by all clients before round 1, '
                "so that none can join late: leave out --min-clients"
            )
        waits["min_clients"] = least
    out = Path(str(given["out"]))
    news = News(out, config.name)
    Awaited(grid, news, {f"client-{i}": name for i, name in enumerate(config.data.clients or ())})
    prepares = partial(gather, grid, config, waits, news) if at_sites else partial(prepare, config)
    with _folder(out, config, prepares) as (folder, prepared):
        # Every round: on Flower one takes seconds at least, and a checkpoint less.
        keeper = kept_in(folder, config, prepared, 1)
        refits = ("moment", "refitted")[: 1 + bool(given.get("refit"))]
        dealt = given.get("site") == DEALT and not at_sites
        on_sites = config.shift.target == "clients"
        opens = partial(opening, config, prepared, folder, dealt)
        facts = {
            "command": command_of(waits, refit=bool(given.get("refit"))),
            "dealt": dealt,
            "measured_by": "clients" if config.data.validation > 0 else None,
            "tested_by": "clients" if on_sites or prepared.task.test.scorer else "server",
        }
        asks = config.data.validation > 0 and not at_sites
        engine = Deployed(grid, waits, folder, opens, news, on_sites, refits, facts, asks)
        record(folder, config, prepared, silent, engine, keeper)


def opening(
    config: Config, prepared: Prepared, folder: Path, dealt: bool, algorithm: Algorithm,
    federation: Federation, table: Params,
) -> None:  # fmt: skip
    """Enter into the run's events what the clients' claims amount to."""
    # A table that has no weights is refused, or its round skipped, where the round is opened.
    with contextlib.suppress(InputError):
        event = opening_event(config, prepared, algorithm, federation, table, dealt=dealt)
        EventLog(folder)(event)


@dataclass
class News:
    """Enters what happens between rounds into a run's events; t: the last round that is over.

    Written as it comes, since the round that would tell it may go on for an hour.
    """

    folder: Path
    run: str
    t: int = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        # Sites that score a model do not know of which round it is.
        round_ = {"round": self.t} if event["event"] == "unscored" else {}
        EventLog(self.folder)({"event": event["event"], "run": self.run, **round_, **event})


@contextlib.contextmanager
def _folder(
    out: Path, config: Config, prepares: Callable[[], Prepared]
) -> Iterator[tuple[Path, Prepared]]:
    """A new run folder, or that of a run whose server has ended before it; what the run needs."""
    again = f"{command_of({})} --resume {{}}"
    if is_file(out / CONFIG) and not is_file(out / SUMMARY):
        check_links(out)  # events are written before it is open
        prepared = prepares()
        with reopened(out, config, prepared, again=again) as (folder, _):
            yield folder, prepared
    else:
        with reserved(out, config.name, again) as folder:
            try:
                prepared = prepares()
            except BaseException:
                # Nothing has begun: the next server takes the same folder.
                (folder / EVENTS).unlink(missing_ok=True)
                raise
            yield folder, prepared


def command_of(waits: Mapping[str, float], *, refit: bool = False) -> str:
    """What plays the federation's experiment again."""
    served = os.environ.get(SERVING, "fedshift deploy server FOLDER")
    options = [f"--{name.replace('_', '-')} {value:g}" for name, value in waits.items()]
    return " ".join([served, *options, *(["--refit"] if refit else [])])


def name_of(folder: Path) -> str:
    """The name by which clients know a run, also when it goes on: its first event has its time."""
    with (folder / EVENTS).open("rb") as f:
        return hashlib.sha256(f.readline()).hexdigest()[:32]


@dataclass
class Deployed:
    """The engine of clients on deployed nodes.

    waits: `patience`, `timeout` and `min_clients` of `strategy_of`. opens: called once clients have
    registered. news: gets events. on_sites: clients have test examples of their own, on which each
    tests the model that it serves, in rounds that are evaluated. refits: as of `OnSites`. facts:
    what is true of this run because it is deployed. asks: whether clients are asked to score models
    on validation examples; where all data are theirs, these ask by themselves.
    """

    grid: Grid
    waits: Mapping[str, float]
    folder: Path
    opens: Callable[[Algorithm, Federation, Params], None]
    news: News
    on_sites: bool = False
    refits: tuple[str, ...] = ("moment",)
    facts: Mapping[str, Any] = field(default_factory=dict)
    asks: bool = False
    backend: str = "loop"
    tells_drops = True
    # How to make the strategy of the run, and it, once it exists.
    make: list[Callable[..., AlgorithmStrategy]] = field(default_factory=list, repr=False)
    made: list[AlgorithmStrategy] = field(default_factory=list, repr=False)

    def rounds(
        self,
        algorithm: Algorithm,
        federation: Federation,
        training: Training,
        options: Mapping[str, Any],
        *,
        after: Round | None,
        meter: Meter,
    ) -> Iterator[Round]:
        """As `Engine`; the clients have the method's options from Flower."""
        check_model(algorithm.model, federation)
        check_training(algorithm, federation.params, training.rounds)
        self.make[:] = [partial(
            strategy_of, algorithm, federation, training, after=after, own=self.on_sites,
            evaluates=lambda t: self.on_sites and training.evaluates(t), dropping=self._drop,
            registers=partial(self._registered, algorithm, federation), tell=self.news,
            **self.waits,
        )]  # fmt: skip

        def played() -> Iterator[Round]:
            began, strategy = time.perf_counter(), self.strategy
            self.news.t = after.t if after else 0
            for current in on_grid(self.grid, strategy, training, meter=meter, began=began):
                self.news.t = current.t
                took_part = dict.fromkeys(sorted(strategy.took_part), Parts())
                # What clients keep stays with them; who took part is what the server knows of it.
                yield current._replace(states=took_part) if self.on_sites else current

        return played()

    @property
    def strategy(self) -> AlgorithmStrategy:
        """The server's side of the run, made when it is first needed."""
        if not self.made:
            # The name exists only once a round is requested: then the first event is on disk.
            self.made.append(self.make[0](name=name_of(self.folder)))
            overhear(self.grid, self.made[0].hear)
        return self.made[0]

    def measured(self, current: Round) -> Mapping[int, Score] | None:
        """As `Engine`: sums of each client that is connected and answers."""
        return measured_by_clients(self.strategy, self.grid, current) if self.asks else None

    def own_scores(self, algorithm: Algorithm, current: Round) -> Mapping[int, OwnScores]:
        """As `OnSites`; a run that goes on after its last round asks once more."""
        if not self.strategy.tests:
            evaluated(self.strategy, self.grid, current.t)
        return self.strategy.tests

    def sites(self) -> Sites:
        """As `OnSites`."""
        return sites_of(self.strategy, self.grid)

    def _registered(self, algorithm: Algorithm, federation: Federation, table: Params) -> None:
        columns = {name: column.long().tolist() for name, column in table.items()}
        facts = {**self.facts, "registered": columns}
        write(self.folder / DEPLOYED, json.dumps(facts, indent=1) + "\n")
        self.opens(algorithm, federation, table)

    def _drop(self, t: int, one: Dropped) -> None:
        self.news(dropped_event(self.news.run, t, one))


def site_of(context: Context) -> Site:
    """What this node's client has, from the function that its machine has chosen."""
    check_site(str(context.run_config["site"]))
    text = str(context.run_config["experiment"])
    # First: the text comes by message, and must name no file that the site's function would run.
    config = configured(text)
    site: Site
    if config.data.at_sites:
        site = own_site(config, context, place_of(context))
    else:
        site = imported(chosen(SITE))(text, partition(context))
    # Here, not in the app: only the run's configuration says how many.
    torch.set_num_threads(config.training.threads)
    return site


def state_folder() -> Path | None:
    """The configured folder for this node's client state between rounds, or None."""
    path = os.environ.get(KEEP)
    return Path(path) if path else None


def place_of(context: Context) -> Path:
    """This client's folder, as `fedshift deploy init` made it, with site.toml."""
    kept = state_folder()
    if kept is None:
        raise InputError("data of its own need a client that `fedshift deploy client` started")
    return kept.parent


def is_private(context: Context) -> bool:
    """Whether the clients of a run have data of their own."""
    data = tomllib.loads(str(context.run_config["experiment"])).get("data", {})
    return bool(data.get("source") == SITES)


def leave_model(context: Context, own: Own) -> None:
    """Write the model that this client serves into its folder; without a folder, nothing."""
    kept, text = state_folder(), str(context.run_config["experiment"])
    if kept is not None and own.name:
        folder = folder_of(kept.parent / MODELS, own.name)
        about = {"round": own.t, "shape": own.shape, "classes": own.classes, "clients": own.clients}
        leave_own_model(folder, text, own.pair, **about)


# States are never opened here: on real machines they are the clients' own.
client_app = app_of(site_of, 1, False, state_folder(), is_private, leave_model)


@client_app.query(ASK)
def answer_site(message: Message, context: Context) -> Message:
    """A question to a client with data of its own."""
    config = configured(str(context.run_config["experiment"]))
    torch.set_num_threads(config.training.threads)
    content = answer(message, context, config, place_of(context))
    return Message(content, reply_to=message)
