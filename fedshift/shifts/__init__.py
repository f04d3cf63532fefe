"""Rules that deal one pool of samples to clients so that they differ, and their label tables.

A shift is called as `shift(labels, classes, clients, rng)`; see `Shift`. Feature shifts change what
a client's images look like: `transform_of(pool, client)(images)`; see `covariate`.
"""

from fedshift.shifts.base import Partition as Partition
from fedshift.shifts.base import Shift as Shift
from fedshift.shifts.base import check_partition as check_partition
from fedshift.shifts.base import label_counts as label_counts
from fedshift.shifts.base import marginals as marginals
from fedshift.shifts.covariate import Brightness as Brightness
from fedshift.shifts.covariate import Compose as Compose
from fedshift.shifts.covariate import Gamma as Gamma
from fedshift.shifts.covariate import Hue as Hue
from fedshift.shifts.covariate import Invert as Invert
from fedshift.shifts.covariate import Posterise as Posterise
from fedshift.shifts.covariate import Saturation as Saturation
from fedshift.shifts.covariate import Transform as Transform
from fedshift.shifts.covariate import bit_pool as bit_pool
from fedshift.shifts.covariate import fashion_pool as fashion_pool
from fedshift.shifts.covariate import transform_of as transform_of
from fedshift.shifts.covariate import wide_pool as wide_pool
from fedshift.shifts.groups import group_shares as group_shares
from fedshift.shifts.groups import whole_groups as whole_groups
from fedshift.shifts.label import DirichletPerClass as DirichletPerClass
from fedshift.shifts.label import DirichletPerClient as DirichletPerClient
from fedshift.shifts.label import Iid as Iid
from fedshift.shifts.label import Shards as Shards
from fedshift.shifts.label import Sparsity as Sparsity
from fedshift.shifts.label_sets import LabelSetSplit as LabelSetSplit
from fedshift.shifts.measures import LabelDistances as LabelDistances
from fedshift.shifts.measures import domain_auc as domain_auc
from fedshift.shifts.measures import label_distances as label_distances
from fedshift.shifts.noise import GaussianNoise as GaussianNoise
from fedshift.shifts.noise import noise_pool as noise_pool
from fedshift.shifts.quantity import QuantitySkew as QuantitySkew
from fedshift.shifts.target import dirichlet_marginal as dirichlet_marginal
from fedshift.shifts.target import resample_to as resample_to
from fedshift.shifts.target import sparse_marginal as sparse_marginal
