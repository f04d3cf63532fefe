"""Moved to `fedshift.engine.trainers`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.engine.trainers")
