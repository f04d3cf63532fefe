"""No client counts more than a cap, whatever it claims: every rule's weights go through here.

Sizes and label counts are claims, and so are losses and Fisher traces: a client that says it has
10^9 examples would otherwise have all the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.real import described, number
from fedshift.tree import Params

# Weights this little above the cap are the rounding of a solver that has the cap as well.
ROUNDING = 1e-12


def check_cap(name: str, cap: float) -> None:
    """Raise InputError unless 0 < cap <= 1."""
    if not 0.0 < number(cap) <= 1.0:
        raise InputError(
            f"{name} must be a weight, more than 0 and at most 1; got {described(cap)}"
        )


def capped(weights: Tensor, cap: float, able: Tensor | None = None) -> Tensor:
    """argmin_b KL(b || a) over sum b = 1, 0 <= b_i <= max(cap, 1/C); weights a [C] -> b [C].

    b_i = min(cap, s a_i) with the one s that makes the sum 1: what is above the cap goes to the
    others in proportion to their weights (water-filling). Clients below the cap so keep the ratios
    that the rule gave them. For sizes n_i it is FedPALS under the cap at lambda = inf, the largest
    ESS that the cap allows. The Euclidean projection would give each of the others the same amount,
    and thus lift small clients most.

    able [C] bool: clients that may have weight, C of them; None: all. If those of positive weight
    cannot carry the sum, each has the cap, and the others that are able share the rest evenly. That
    is the limit of the above for weights that go to 0 together. `weights` itself comes back where
    none is above the cap. Raises InputError unless 0 < cap <= 1. The I-projection: Csiszar 1975.

    >>> import torch
    >>> from fedshift.server.cap import capped
    >>> capped(torch.tensor([0.8, 0.15, 0.05]), 0.5).numpy().round(3).tolist()
    [0.5, 0.375, 0.125]
    """
    check_cap("cap", cap)
    some = weights > 0
    able = torch.ones_like(some) if able is None else able | some
    most = max(cap, 1.0 / max(int(able.sum()), 1))
    if not bool((weights > most * (1.0 + ROUNDING)).any()):
        return weights
    carried = int(some.sum()) * most
    if carried <= 1.0:
        rest = able & ~some
        return most * some.double() + (1.0 - carried) / max(int(rest.sum()), 1) * rest.double()
    a, place = weights.double().sort(descending=True, stable=True)
    # With the k largest at the cap, client j has (1 - k cap) a_j / sum of all from k on.
    below = a.flip(0).cumsum(0).flip(0)
    left = 1.0 - most * torch.arange(len(a), dtype=torch.float64)
    k = int((left * (a / below) <= most).nonzero()[0])
    filled = torch.cat([torch.full_like(a[:k], most), left[k] * (a[k:] / below[k])])
    return torch.zeros_like(a).index_copy(0, place, filled)


def capped_columns(shares: Tensor, cap: float, able: Tensor) -> Tensor:
    """`capped` of each column of shares [C, K], over those that are able [C, K] bool."""
    if cap >= 1.0:
        return shares
    columns = zip(shares.unbind(1), able.unbind(1), strict=True)
    return torch.stack([capped(share, cap, one) for share, one in columns], 1)


def capped_sizes(n: Tensor, cap: float) -> Tensor:
    """Sizes [C] whose shares are `capped`: n_i where that is below the cap, less where above.

    m_i = b_i min_j n_j / b_j over clients with n_j > 0, b the shares under the cap (or 1 / their
    number). n [C] itself comes back where no share is above the cap.

    >>> import torch
    >>> from fedshift.server.cap import capped_sizes
    >>> capped_sizes(torch.tensor([1e9, 30.0, 10.0]), 0.5).tolist()
    [40.0, 30.0, 10.0]
    """
    some = n > 0
    shares = n.double() / n.double().sum().clamp(min=1e-300)
    bounded = capped(shares, cap, some)
    if bounded is shares:
        return n
    ratio = (n.double()[some] / bounded[some]).min()
    return torch.minimum(bounded * ratio, n.double())


def cap_of(cohort: Params) -> float:
    """The cap of a round, as the server's part "cohort" has it; 1 where it has none."""
    return float(cohort["cap"]) if "cap" in cohort else 1.0
