"""Moved to `fedshift.engine.checks.gate`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.engine.checks.gate")
