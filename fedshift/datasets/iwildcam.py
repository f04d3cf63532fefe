"""The former place of `fedshift.papers.datasets.iwildcam`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.papers.datasets.iwildcam")
