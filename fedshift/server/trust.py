"""How much the server trusts its clients' answers on inputs that it has no labels for.

Shapes as in `fedshift.server.agreement`: p or logits z [C, B, L], labels [C, L], w [C].
"""

from __future__ import annotations

import torch
from torch import Tensor

# From 1/2 to 16, four values for each doubling.
TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-4, 17))


def by_confidence(p: Tensor, w: Tensor) -> Tensor:
    """w_k(x) = w_k c_k(x) / sum_j w_j c_j(x), c_k(x) = max_y p_k(y|x), [C, B] float64.

    If all clients are equally sure, these are w. The weights on each input still sum to 1, so all
    inputs count alike.
    """
    sure = w.double()[:, None] * p.amax(2).double()
    return sure / sure.sum(0)


def fitted_temperature(z: Tensor, labels: Tensor, y: Tensor, w: Tensor) -> float:
    """argmin_T sum_k w_k sum_{x: y in Y_k} -log softmax(z_k(x) / T)_y, T of `TEMPERATURES`.

    z [C, B, L] are the clients' logits (any value in slots without a label), y [B] the labels of
    the inputs. Only sums over examples are needed. Returns 1 if no client has any of these labels.
    """
    mine = labels[:, None] == y[:, None]  # [C, B, L]
    if not bool(mine[w > 0].any()):
        return 1.0
    best, least = 1.0, torch.inf
    for temperature in TEMPERATURES:
        logs = (z.double() / temperature).masked_fill((labels < 0)[:, None], -torch.inf)
        logs = logs.log_softmax(2).masked_fill(~mine, 0)
        loss = -float((w.double() * logs.sum((1, 2)))[w > 0].sum())
        best, least = (temperature, loss) if loss < least else (best, least)
    return best
