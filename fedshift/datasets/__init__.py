"""Data sets: a small real one in the package, known ones from disk or their official places."""

from fedshift.datasets.base import (
    Dataset,
    Samples,
    cache_folder,
    content_sha256,
    search_folders,
)
from fedshift.datasets.fetch import fetch
from fedshift.datasets.gaussians import Gaussians, gaussians
from fedshift.datasets.registry import Known, find, known, load

__all__ = [
    "Dataset",
    "Gaussians",
    "Known",
    "Samples",
    "cache_folder",
    "content_sha256",
    "fetch",
    "find",
    "gaussians",
    "known",
    "load",
    "search_folders",
]
