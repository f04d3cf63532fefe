"""The largest weight that a client can get, whatever it claims: all rules' weights pass here.

Sizes, label counts, losses and Fisher traces are only claims: a client that claims 10^9 examples
would otherwise get all the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.real import described, number
from fedshift.tree import Params

# A solver that respects the cap itself may exceed it by this much, in relative terms.
ROUNDING = 1e-12


def check_cap(name: str, cap: float) -> None:
    """Raise InputError unless 0 < cap <= 1."""
    if not 0.0 < number(cap) <= 1.0:
        raise InputError(
            f"{name} must be a weight, more than 0 and at most 1; got {described(cap)}"
        )


def capped(weights: Tensor, cap: float, able: Tensor | None = None) -> Tensor:
    """argmin_b KL(b || a) over sum b = 1, 0 <= b_i <= max(cap, 1/C); weights a [C] -> b [C].

    b_i = min(cap, s a_i), where s makes the sum 1 (water-filling): what is above the cap goes to
    the others in proportion to their weights, so that clients below the cap keep their ratios. For
    sizes n_i this is FedPALS under the cap at lambda = inf, the largest ESS that the cap allows. (A
    Euclidean projection would give each of the others the same amount, and lift small clients
    most.)

    able [C] bool marks the clients that may have weight, and C counts these; None: all. If the
    clients of positive weight cannot sum to 1 under the cap, each gets the cap, and the other able
    ones share the rest evenly. That is the limit of the above if their weights go to 0 together.
    Returns `weights` itself if none is above the cap. Raises InputError unless 0 < cap <= 1. The
    I-projection: Csiszar 1975.

    >>> import torch
    >>> from fedshift.server.cap import capped
    >>> capped(torch.tensor([0.8, 0.15, 0.05]), 0.5).numpy().round(3).tolist()
    [0.5, 0.375, 0.125]
    """
    check_cap("cap", cap)
    if not bool((weights > cap * (1.0 + ROUNDING)).any()):  # all weights, where the cap is 1
        return weights
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
    # If the k largest are at the cap, each other client j gets (1 - k cap) a_j / sum_(l >= k) a_l.
    # The right k is the first for which the largest of these is within the cap.
    below = a.flip(0).cumsum(0).flip(0)
    left = 1.0 - most * torch.arange(len(a), dtype=torch.float64)
    k = int((left * (a / below) <= most).nonzero()[0])
    filled = torch.cat([torch.full_like(a[:k], most), left[k] * (a[k:] / below[k])])
    return torch.zeros_like(a).index_copy(0, place, filled)


def capped_columns(shares: Tensor, cap: float, able: Tensor) -> Tensor:
    """`capped` of each column of shares [C, K], with the able clients of each, [C, K] bool."""
    if cap >= 1.0:
        return shares
    columns = zip(shares.unbind(1), able.unbind(1), strict=True)
    return torch.stack([capped(share, cap, one) for share, one in columns], 1)


def capped_sizes(n: Tensor, cap: float) -> Tensor:
    """Sizes [C] whose shares are `capped`: smaller than n_i for clients above the cap, else n_i.

    m_i = b_i min_j n_j / b_j over clients with n_j > 0, b the shares under the cap (or under 1 /
    their number). Returns n [C] itself if no share is above the cap.

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
    # The largest common factor with which no size exceeds what the client has claimed.
    ratio = (n.double()[some] / bounded[some]).min()
    return torch.minimum(bounded * ratio, n.double())


def cap_of(cohort: Params) -> float:
    """The cap of a round, from the server's part "cohort"; 1 if there is none."""
    return float(cohort["cap"]) if "cap" in cohort else 1.0
