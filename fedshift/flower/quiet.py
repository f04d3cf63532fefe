"""The environment of Flower's processes: without telemetry, update checks and downloads.

Imports neither Flower nor torch, because processes that only wait for others should be small.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def quiet_environment(home: Path) -> dict[str, str]:
    """Variables that keep Flower and Ray off the network, with Flower's files below `home`.

    Set them before Flower is imported, which reads the first one then.
    """
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray runs its workers at the lowest priority, but here they do all the work.
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


@contextlib.contextmanager
def quiet() -> Iterator[Path]:
    """Set these variables for a block, except those that the user has set.

    Yields a folder for Flower's files, which is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="fedshift-flower-") as home:
        variables = quiet_environment(Path(home))
        before = dict(os.environ)
        os.environ.update({k: v for k, v in variables.items() if k not in before})
        try:
            yield Path(home)
        finally:
            # Restore everything: Flower's simulation also changes PYTHONPATH.
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
