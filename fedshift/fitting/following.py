"""Who hears of a run as it goes on: callbacks and loggers."""

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
    """Where numbers of rounds go; see `fedshift.fitting.loggers`."""

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """A run begins, or one of its candidates; config: its keys with their values, flat."""

    def log(self, run: str, numbers: Mapping[str, float], t: int) -> None:
        """The finite numbers of round t."""

    def finish(self) -> None:
        """All is over, or has failed."""


@contextlib.contextmanager
def following(
    planned: Plan, callbacks: Sequence[Callback], loggers: Sequence[Logger]
) -> Iterator[Listener]:
    """A listener that tells callbacks and loggers of every round, once it is measured.

    Loggers get the name of a method of the user's, which is "python" in the configuration.
    Raises InputError for a callback that cannot be called, and for what is no logger.
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
            return  # the round's own event names all who dropped out
        waiting.update(event)
        if event["event"] == "round" and config.training.evaluates(event["round"]):
            return  # its evaluation follows
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
    """A list of what may be one alone."""
    return given if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def tracked_keys(config: Config) -> dict[str, Any]:
    """The keys that were given, and all of method, training and seed: runs are told apart by them.

    Those left out are defaults of today's version, which a tracker that keeps runs for years lacks.
    """
    everything = config.model_dump(exclude_none=True)
    shown = {name: everything[name] for name in ("method", "training", "seeds")}
    return flat_keys(config.model_dump(exclude_defaults=True) | shown)


def flat_keys(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training.lr": 0.1, ...}"""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{prefix}{name}"
        flat |= flat_keys(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat


def _numeric(numbers: Numbers) -> dict[str, float]:
    """Finite numbers alone: trackers take no NaN."""
    kept = {k: v for k, v in numbers.items() if k not in ("run", "round", "rounds")}
    return {
        k: float(v) for k, v in kept.items()
        if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < float("inf")
    }  # fmt: skip
