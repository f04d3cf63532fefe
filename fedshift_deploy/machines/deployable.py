"""Checks of whether a federation of machines can run an experiment, before it starts."""

from __future__ import annotations

import tomllib

from fedshift.engine.checks.reply_bytes import check_room
from fedshift.engine.preflight.method import check_whole_models
from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.python_names import is_python
from fedshift.experiments.config.schema import Config, Data
from fedshift.experiments.experiment import check_method, federation_of, method_of
from fedshift.experiments.first_checks import check_own_models
from fedshift.experiments.measures.stopping import check_stopping
from fedshift.experiments.task.custom_data import prepare_built
from fedshift.experiments.task.preparing import prepare
from fedshift_deploy.sites.gathering import check_sites, check_target, imagined, is_table

UNSCORED = (
    "set data.validation = 0 (and, with data of the clients' own, a table of the target as "
    'data.target), or take method.mode = "public"'
)


def configured(text: str) -> Config:
    """The experiment in this TOML text. Raises InputError for what only a simulation can do."""
    config = validate(tomllib.loads(text), text=text, origin="experiment")
    if config.method.options.get("ess") == "auto":
        raise InputError('method.ess = "auto" trains one model per candidate; deploy with a number')
    named = [config.model.name, config.method.name, *config.metrics.extra]
    foreign = config.data.source is not None and not config.data.at_sites
    if foreign or config.model.weights is not None or any(map(is_python, named)):
        raise InputError(
            "a deployed federation runs no file that an experiment names, since its text comes by "
            "message. Use data, networks and methods of the library, data of the clients' own "
            '(data.source = "sites"), or `fedshift run`'
        )
    if config.data.at_sites:
        check_sites(config.data, config.method.name, config.training.prior)
    if config.shift.target == "clients" and config.training.keep == "best":
        raise InputError(
            'training.keep = "best" may keep an earlier round, and clients then have later models; '
            "leave it out, or simulate it (--engine flower-sim)"
        )
    return config


def check_start(config: Config) -> str:
    """Raise InputError for what a run would refuse before its first round; trains nothing.

    Returns a sentence if this could not be tried because this machine lacks the data, or "".
    """
    if config.data.at_sites:
        check_target(config.data)  # the target's table is the only data file on this machine
    try:
        if config.data.at_sites:
            prepared = prepare_built(config, imagined(config.data))
        else:
            prepared = prepare(config)
    except DataError as e:
        return f"Whether this experiment can start was not tried: {e}"
    check_stopping(config.training, prepared.task)
    check_method(config.method, config.training, prepared)
    algorithm = method_of(config.method, config.training, prepared)(**config.method.options)
    check_room(algorithm, *algorithm.model.init(), prepared.gate)
    if prepared.task.tests:
        federation = federation_of(config.method, prepared)
        check_own_models(config.method.name, algorithm, federation)
    # Without a table of the target, the test examples are at the sites, which score them.
    if config.data.validation > 0 or (config.data.at_sites and not is_table(config.data.target)):
        check_whole_models(algorithm, UNSCORED)
    return ""


def check_min_clients(data: Data) -> None:
    """Raise InputError for --min-clients in an experiment whose clients cannot join late."""
    if data.at_sites:
        raise InputError(
            'with data.source = "sites" columns are agreed on by all clients before round 1, '
            "so that none can join late: leave out --min-clients"
        )
