"""The tasks of many runs, of which those with one population share its data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fedshift.errors import FedshiftError
from fedshift.experiments.config.schema import Config
from fedshift.experiments.task.preparing import Prepared, as_bytes, population
from fedshift.sweeps.store import Run


def population_of(config: Config) -> str:
    """What the clients' data and the target follow from."""
    sections = config.model_dump_json(include={"data", "shift", "server"})
    return f"{sections} {config.seeds.resolved().split} {as_bytes(config)}"


class Populations:
    """Makes the tasks of runs; the population of the run before is not loaded again.

    Processes that are copies of this one share what was loaded here before they began.
    """

    def __init__(self) -> None:
        self.last: tuple[str, Callable[[Config], Prepared]] | None = None

    def __call__(self, run: Run) -> Prepared:
        """The task of a run, equal to what `prepare` makes. Raises what that raises."""
        return self._shared(run.config)(run.config)

    def load(self, run: Run) -> None:
        """Have the run's population here; the run itself will say what is wrong with it."""
        with contextlib.suppress(FedshiftError):
            self._shared(run.config)

    def _shared(self, config: Config) -> Callable[[Config], Prepared]:
        key = population_of(config)
        if self.last is None or self.last[0] != key:
            self.last = None  # let go of it before the next is loaded
            self.last = key, population(config)
        return self.last[1]
