"""Moved to `fedshift.experiments.folder.run_models`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.experiments.folder.run_models")
