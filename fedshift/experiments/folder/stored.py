"""Moved to `fedshift.experiments.folder.model_file`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.experiments.folder.model_file")
