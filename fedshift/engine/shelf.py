"""Moved to `fedshift.engine.storage.client_states`."""

import warnings

from fedshift.engine.storage.client_states import *  # noqa: F403

warnings.warn(
    "fedshift.engine.shelf is now fedshift.engine.storage.client_states",
    DeprecationWarning,
    stacklevel=2,
)
