"""How far the server trusts its clients' answers to inputs that it cannot check one by one.

Shapes as in `fedshift.server.agreement`: p or logits z [C, B, L], labels [C, L], w [C].
"""

from __future__ import annotations

import torch
from torch import Tensor

# From half to sixteen times as soft, four values to an octave.
TEMPERATURES = tuple(2.0 ** (i / 4) for i in range(-4, 17))


def by_confidence(p: Tensor, w: Tensor) -> Tensor:
    """w_k(x) = w_k c_k(x) / sum_j w_j c_j(x), c_k(x) = max_y p_k(y|x), [C, B] float64.

    Where all clients are equally sure, these are w. Inputs count as before: their weights sum to 1.
    """
    sure = w.double()[:, None] * p.amax(2).double()
    return sure / sure.sum(0)


def fitted_temperature(z: Tensor, labels: Tensor, y: Tensor, w: Tensor) -> float:
    """argmin_T sum_k w_k sum_{x: y in Y_k} -log softmax(z_k(x) / T)_y, T of `TEMPERATURES`.

    z [C, B, L] are the clients' logits, -inf or anything where there is no label; y [B] the labels
    of the inputs. Sums over examples alone are needed. 1 where no client knows any of them.
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
