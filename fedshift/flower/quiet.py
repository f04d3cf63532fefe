"""Flower without telemetry, update checks and downloads. Imports nothing of Flower."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def quiet_environment(home: Path) -> dict[str, str]:
    """Variables that keep Flower and Ray off the network, with Flower's files below `home`.

    Flower reads the first when it is imported, so that it must be set before.
    """
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's workers do the work here: not at the lowest priority, which is its default.
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


@contextlib.contextmanager
def quiet() -> Iterator[Path]:
    """These variables while something runs; what the user has set is left as it is.

    Gives a folder for Flower's own files, which is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="fedshift-flower-") as home:
        wanted = quiet_environment(Path(home))
        before = dict(os.environ)
        os.environ.update({k: v for k, v in wanted.items() if k not in before})
        try:
            yield Path(home)
        finally:
            # As it was: Flower's simulation writes into PYTHONPATH, too.
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
