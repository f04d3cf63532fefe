"""Moved to `fedshift.engine.checks.gate`."""

import warnings

from fedshift.engine.checks.gate import *  # noqa: F403

warnings.warn(
    "fedshift.engine.gate is now fedshift.engine.checks.gate", DeprecationWarning, stacklevel=2
)
