"""Moved to `fedshift.engine.run`."""

import warnings

from fedshift.engine.run import *  # noqa: F403

warnings.warn("fedshift.engine.rounds is now fedshift.engine.run", DeprecationWarning, stacklevel=2)
