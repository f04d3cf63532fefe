"""Rules that deal one pool of samples to clients so that they differ, and their label tables.

A shift is called as `shift(labels, classes, clients, rng)`; see `Shift`.
"""

from fedshift.shifts.base import (
    Partition,
    Shift,
    check_partition,
    label_counts,
    marginals,
)
from fedshift.shifts.groups import whole_groups
from fedshift.shifts.label import DirichletPerClass, DirichletPerClient, Iid, Shards, Sparsity
from fedshift.shifts.pacs import Imbalanced
from fedshift.shifts.quantity import QuantitySkew
from fedshift.shifts.target import dirichlet_marginal, resample_to, sparse_marginal

__all__ = [
    "DirichletPerClass",
    "DirichletPerClient",
    "Iid",
    "Imbalanced",
    "Partition",
    "QuantitySkew",
    "Shards",
    "Shift",
    "Sparsity",
    "check_partition",
    "dirichlet_marginal",
    "label_counts",
    "marginals",
    "resample_to",
    "sparse_marginal",
    "whole_groups",
]
