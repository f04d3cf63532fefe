"""Moved to `fedshift.engine.storage.client_states`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.engine.storage.client_states")
