"""Moved to `fedshift.engine.processes.pool`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.engine.processes.pool")
