"""Moved to `fedshift.engine.processes.pool`."""

import warnings

from fedshift.engine.processes.pool import *  # noqa: F403

warnings.warn(
    "fedshift.engine.workers is now fedshift.engine.processes.pool",
    DeprecationWarning,
    stacklevel=2,
)
