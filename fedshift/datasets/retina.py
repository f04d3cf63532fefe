"""The former place of `fedshift.papers.datasets.retina`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.papers.datasets.retina")
