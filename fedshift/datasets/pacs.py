"""The former place of `fedshift.papers.datasets.pacs`."""

from fedshift.moved import replaced

replaced(__name__, "fedshift.papers.datasets.pacs")
