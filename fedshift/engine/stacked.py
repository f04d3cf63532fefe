"""Moved to `fedshift.engine.stacking.stacked`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.engine.stacking.stacked")
