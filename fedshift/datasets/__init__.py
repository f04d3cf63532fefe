"""Data sets: a small one that ships with the package, and known ones, which can be downloaded."""

from fedshift.datasets.base import (
    Dataset,
    Samples,
    cache_folder,
    content_sha256,
    search_folders,
)
from fedshift.datasets.catalogue import entries, entry
from fedshift.datasets.entry import Entry, OwnClients, Wanted
from fedshift.datasets.fetch import fetch
from fedshift.datasets.natural.loading import TABLES, load_table, natural_table
from fedshift.datasets.natural.shift import LabelShift, label_shift
from fedshift.datasets.natural.table import Table
from fedshift.datasets.registry import Known, find, known, load

__all__ = [
    "TABLES",
    "Dataset",
    "Entry",
    "Known",
    "LabelShift",
    "OwnClients",
    "Samples",
    "Table",
    "Wanted",
    "cache_folder",
    "content_sha256",
    "entries",
    "entry",
    "fetch",
    "find",
    "known",
    "label_shift",
    "load",
    "load_table",
    "natural_table",
    "search_folders",
]
