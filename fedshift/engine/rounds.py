"""Moved to `fedshift.engine.run`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.engine.run")
