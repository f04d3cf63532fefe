"""Passing a run's numbers to callbacks and loggers while it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fedshift.arguments import called
from fedshift.errors import InputError
from fedshift.experiments.config.schema import Config
from fedshift.experiments.listeners import Listener
from fedshift.fitting.planning import Plan

Numbers = Mapping[str, Any]
Callback = Callable[[Numbers], object]


class Logger(Protocol):
    """An object that gets the numbers of rounds; see `fedshift.fitting.loggers`."""

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """A run, or one of its candidates, begins; config: {"training.lr": 0.1, ...}."""

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """The finite numbers of round t."""

    def finish(self) -> None:
        """All runs are over, or have failed."""


@contextlib.contextmanager
def following(
    planned: Plan, callbacks: Sequence[Callback], loggers: Sequence[Logger]
) -> Iterator[Listener]:
    """A listener that passes every round's numbers to callbacks and loggers.

    A round that is evaluated is passed on with its scores. Loggers get the real name of a user's
    method, which is "python" in the configuration. Raises InputError for a callback that cannot be
    called, and for an object that is no logger.
    """
    for one in callbacks:
        if not callable(one):
            raise InputError(f"callbacks has {called(one)}; give functions of a dict of numbers")
    for logger in loggers:
        if not all(hasattr(logger, name) for name in ("start", "log", "finish")):
            raise InputError(
                f"loggers has {called(logger)}; give fs.TensorBoard(folder), fs.MLflow() or "
                "fs.WandB(project)"
            )
    config, made = planned.config, planned.prepared.custom.method
    flat = tracked_keys(config) | ({"method.name": made.name} if made else {})
    waiting: dict[str, Any] = {}

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            for logger in loggers:
                logger.start(event["run"], flat)
            return
        if event["event"] == "dropped":
            return  # the round's own event names all clients that dropped out
        waiting.update(event)
        if event["event"] == "round" and config.training.evaluates(event["round"]):
            return  # wait for its evaluation, which follows
        numbers = {k: v for k, v in waiting.items() if k != "event"}
        waiting.clear()
        for callback in callbacks:
            callback(dict(numbers))
        for logger in loggers:
            logger.log(numbers["run"], _numeric(numbers), numbers["round"])

    try:
        yield listen
    finally:
        for logger in loggers:
            logger.finish()


def several(given: Any) -> Sequence[Any]:
    """The value as a list; a single object becomes a list of one."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def tracked_keys(config: Config) -> dict[str, Any]:
    """The keys that trackers get: those that were set, and all of method, training and seeds.

    These sections are written out in full: a tracker keeps runs for years, and does not know the
    defaults of the version that trained them.
    """
    everything = config.model_dump(exclude_none=True)
    shown = {name: everything[name] for name in ("method", "training", "seeds")}
    return flat_keys(config.model_dump(exclude_defaults=True) | shown)


def flat_keys(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: {"training.lr": 0.1, ...}."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{prefix}{name}"
        flat |= flat_keys(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def _numeric(numbers: Numbers) -> dict[str, float]:
    """The finite numbers; trackers do not take NaN."""
    kept = {k: v for k, v in numbers.items() if k not in ("run", "round", "rounds")}
    return {
        k: float(v) for k, v in kept.items()
        if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < float("inf")
    }  # fmt: skip
