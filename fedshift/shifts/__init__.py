"""Rules that deal one pool of samples to clients so that they differ, and their label tables.

A shift is called as `shift(labels, classes, clients, rng)`; see `Shift`. Feature shifts change what
a client's images look like: `transform_of(pool, client)(images)`; see `covariate`.
"""

from fedshift.moved import moved
from fedshift.shifts.base import (
    Partition,
    Shift,
    check_partition,
    label_counts,
    marginals,
)
from fedshift.shifts.covariate import (
    Brightness,
    Compose,
    Gamma,
    Hue,
    Invert,
    Posterise,
    Saturation,
    Transform,
    bit_pool,
    fashion_pool,
    transform_of,
    wide_pool,
)
from fedshift.shifts.crop import RandomResizedCrop
from fedshift.shifts.groups import group_shares, whole_groups
from fedshift.shifts.label import DirichletPerClass, DirichletPerClient, Iid, Shards, Sparsity
from fedshift.shifts.label_sets import LabelSetSplit
from fedshift.shifts.measures import LabelDistances, domain_auc, label_distances
from fedshift.shifts.noise import GaussianNoise, noise_pool, noisy_writers
from fedshift.shifts.quantity import QuantitySkew
from fedshift.shifts.target import dirichlet_marginal, resample_to, sparse_marginal

__getattr__ = moved(__name__, Imbalanced="fedshift.papers.datasets.fedpals_clients")

__all__ = [
    "Brightness",
    "Compose",
    "DirichletPerClass",
    "DirichletPerClient",
    "Gamma",
    "GaussianNoise",
    "Hue",
    "Iid",
    "Invert",
    "LabelDistances",
    "LabelSetSplit",
    "Partition",
    "Posterise",
    "QuantitySkew",
    "RandomResizedCrop",
    "Saturation",
    "Shards",
    "Shift",
    "Sparsity",
    "Transform",
    "bit_pool",
    "check_partition",
    "dirichlet_marginal",
    "domain_auc",
    "fashion_pool",
    "group_shares",
    "label_counts",
    "label_distances",
    "marginals",
    "noise_pool",
    "noisy_writers",
    "resample_to",
    "sparse_marginal",
    "transform_of",
    "whole_groups",
    "wide_pool",
]
