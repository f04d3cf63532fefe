"""Moved to `fedshift.experiments.config.load`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.experiments.config.load")
