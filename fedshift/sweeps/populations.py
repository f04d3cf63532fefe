"""The tasks of many runs; runs on the same data, clients and target share what was loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fedshift.errors import FedshiftError
from fedshift.experiments.config.schema import Config
from fedshift.experiments.task.preparing import Prepared, as_bytes, population
from fedshift.sweeps.store import Run


def population_of(config: Config) -> str:
    """A key for the clients' data and the target: equal keys have the same population."""
    sections = config.model_dump_json(include={"data", "shift", "server"})
    return f"{sections} {config.seeds.resolved().split} {as_bytes(config.data, config.model)}"


class Populations:
    """Makes the tasks of runs, and keeps the population of the last one for the next.

    Forked processes share what was loaded here before they were forked.
    """

    def __init__(self) -> None:
        self.last: tuple[str, Callable[[Config], Prepared]] | None = None

    def __call__(self, run: Run) -> Prepared:
        """The task of a run, equal to that of `prepare`. Raises what `prepare` raises."""
        return self._shared(run.config)(run.config)

    def load(self, run: Run) -> None:
        """Load the run's population. Errors are left for the run itself to report."""
        with contextlib.suppress(FedshiftError):
            self._shared(run.config)

    def _shared(self, config: Config) -> Callable[[Config], Prepared]:
        key = population_of(config)
        if self.last is None or self.last[0] != key:
            self.last = None  # free its memory before the next population is loaded
            self.last = key, population(config)
        return self.last[1]
