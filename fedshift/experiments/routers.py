"""Moved to `fedshift.experiments.folder.routers`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.experiments.folder.routers")
