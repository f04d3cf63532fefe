"""One experiment from configuration to outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.engine.clock import Clock, Idle
from fedshift.engine.rounds import Federation, run
from fedshift.errors import InputError
from fedshift.experiments.config import Config
from fedshift.experiments.method_fit import named_alike
from fedshift.experiments.progress import Keeper
from fedshift.experiments.selection import Choice, candidates, choose
from fedshift.experiments.settings import setting
from fedshift.experiments.task import Prepared, oracle_clients, prepare
from fedshift.experiments.training import Listener, Outcome, Play, check_first_round, silent, train
from fedshift.experiments.wording import in_file_words

Fit = Callable[[str, dict[str, Any]], tuple[Algorithm, Outcome]]
# From a configuration and the method's options, as they were chosen, to what plays its rounds. One
# whose numbers are not those of the loop has an attribute `backend`, the name of what it trains by.
Engine = Callable[[Config, dict[str, Any]], Play]


def in_process(config: Config, options: dict[str, Any]) -> Play:
    """The engine that runs all clients in this process.

    Raises InputError for a deadline and for retries.
    """
    check_deadline(config)
    check_retries(config)
    return run


def trained_by(engine: Engine) -> str:
    """The name of the backend that an engine's numbers are those of, bit for bit."""
    return str(getattr(engine, "backend", "loop"))


def check_deadline(config: Config) -> None:
    """Refuse, with InputError, a deadline where nothing can end a client that is at work."""
    if config.training.deadline is not None:
        raise InputError(
            "training.deadline needs clients in processes of their own, which can be ended: "
            "--workers N, or Flower"
        )


def check_retries(config: Config) -> None:
    """Refuse, with InputError, retries where no process of a client can die alone."""
    if config.training.retries:
        raise InputError(
            f"training.retries = {config.training.retries} asks clients again whose process died, "
            "and here all train in one process; leave it out, or train with --workers N, or on "
            "Flower"
        )


@dataclass(frozen=True, eq=False)
class Experiment:
    """What was configured, what it was run on, and what came of it."""

    config: Config
    prepared: Prepared
    algorithm: Algorithm
    outcome: Outcome
    choice: Choice | None


def federation_of(config: Config, prepared: Prepared) -> Federation:
    """The task's clients; others, which follow the target, where the method's are such."""
    traits = recipes.recipe(config.method.name).traits
    return prepared.federation(oracle_clients(prepared) if traits.follows_target else None)


def method_of(config: Config, prepared: Prepared) -> Callable[..., Algorithm]:
    """The configured recipe as a function of its options."""
    shape = tuple(prepared.task.clients[0].x.shape[1:])
    base = setting(config, prepared.model, prepared.told, prepared.server_inputs, shape)
    return partial(recipes.recipe(config.method.name).make, base)


def run_experiment(
    config: Config,
    *,
    listen: Listener = silent,
    prepared: Prepared | None = None,
    engine: Engine = in_process,
    keeper: Keeper | None = None,
    clock: Clock = Idle(),
) -> Experiment:
    """Prepare (unless given), train, and where `ess = "auto"` choose among candidates.

    clock: told what the time of all of them goes to.
    """
    torch.set_num_threads(config.training.threads)
    ready = prepare(config) if prepared is None else prepared
    options, make = config.method.options, method_of(config, ready)
    recipe = recipes.recipe(config.method.name)
    federation = federation_of(config, ready)

    def fit(label: str, given: dict[str, Any]) -> tuple[Algorithm, Outcome]:
        with in_file_words("method", named_alike(recipe)):
            algorithm = make(**given)
            check_first_round(algorithm, federation, config.training, ready.task)
        trained = train(
            algorithm, federation, ready.task, config.training, label=label, listen=listen,
            play=engine(config, given), keeper=keeper, clock=clock,
        )  # fmt: skip
        return algorithm, trained

    if options.get("ess") != "auto":
        return Experiment(config, ready, *fit(config.name, options), None)
    return _automatic(config, ready, federation, fit)


def _automatic(config: Config, ready: Prepared, federation: Federation, fit: Fit) -> Experiment:
    options = {k: v for k, v in config.method.options.items() if k != "ess"}
    solver = {k: options[k] for k in ("cap", "fidelity") if k in options}
    with in_file_words("method", {name: name for name in solver}):
        grid = candidates(
            federation.table["labels"].numpy(), ready.told, config.selection.grid, **solver
        )
    made: dict[str, Algorithm] = {}

    def train_one(label: str, fraction: float) -> Outcome:
        given = {"lam": 0.0} if fraction == 0 else {"ess": fraction}
        made[label], outcome = fit(f"{config.name} {label}", options | given)
        return outcome

    choice = choose(ready.task, config.selection, grid, train_one)
    chosen = choice.chosen
    return Experiment(config, ready, made[chosen.label], chosen.outcome, choice)


def reasons(
    classes: Sequence[str],
    target: Sequence[float],
    mixed: Sequence[float],
    used: Sequence[float],
    unmeasured: float = 0.0,
) -> list[str]:
    """Why weights matter here: which of the target's labels sample-size weights train too little.

    `mixed` [K] is the label mix that sample-size weights train on, `used` [K] the mix of the
    weights in use. Labels are named where sample-size weights miss more than 0.02 of T; those that
    no client has are named apart, since no weights can help there. `unmeasured` is the mass of T
    whose recall no validation example measures.
    """
    absent = [y for y, t in enumerate(target) if t > 0 and mixed[y] == 0]
    short = [y for y, t in enumerate(target) if t - mixed[y] > 0.02 and y not in absent]
    surplus = math.fsum(m for m, t in zip(mixed, target, strict=True) if t == 0)
    said = []
    if absent:
        mass = 100 * math.fsum(target[y] for y in absent)
        named = ", ".join(f'"{classes[y]}"' for y in absent)
        said.append(
            f"No client has any example of {named}, {mass:.0f} % of the target: no weights can "
            "make up for that."
        )
    if short:
        named = ", ".join(
            f'"{classes[y]}" ({100 * target[y]:.0f} % of the target, {100 * mixed[y]:.0f} % in '
            f"FedAvg, {100 * used[y]:.0f} % here)"
            for y in sorted(short, key=lambda y: mixed[y] - target[y])[:5]
        )
        said.append(f"Sample-size weights train too little on {named}.")
    if surplus > 0.02:
        said.append(
            f"{100 * surplus:.0f} % of what FedAvg trains on are labels that the target never sees."
        )
    if unmeasured > 0:
        said.append(
            f"The estimate leaves out {100 * unmeasured:.0f} % of the target: labels of which no "
            "client holds a validation example; it counts them as wrong."
        )
    return said or ["Sample-size weights already mix to the target's labels: little to gain."]
