"""The former place of `fedshift.papers.datasets.heart`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.papers.datasets.heart")
