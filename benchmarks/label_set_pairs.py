"""How often attackers order (holder, other) pairs rightly: AUC, its interval, its ceiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from label_set_messages import Heard, K, Size
from torch import Tensor

from fedshift.seeds import numpy_generator

RESAMPLES = 2000


class Compared(NamedTuple):
    """Pairs (holder, other) of federations [F, F]: those in order, and all."""

    right: Tensor
    pairs: Tensor


def compared(
    fed: Tensor, score: Tensor, pos: Tensor, neg: Tensor, group: Tensor | None = None
) -> Compared:
    """Count pairs, ties as halves: entries [n], pos and neg how often each is a yes and a no.

    group: only pairs of one group (of one federation) count.
    """
    n = int(fed.max()) + 1
    right, pairs = torch.zeros(n, n).double(), torch.zeros(n, n).double()
    for f in range(n):
        mine, others = fed == f, (fed == f) if group is not None else (fed >= 0)
        a, b = mine & (pos > 0), others & (neg > 0)
        s, t = score[a][:, None], score[b]
        weight = pos[a][:, None] * neg[b]
        if group is not None:
            weight = weight * (group[a][:, None] == group[b])
        order = (s > t).double() + 0.5 * (s == t)
        right[f].index_add_(0, fed[b], (weight * order).sum(0))
        pairs[f].index_add_(0, fed[b], weight.sum(0))
    return Compared(right, pairs)


def auc(worlds: Sequence[Compared], seed: int = 0) -> tuple[float, float, float]:
    """(AUC, and the 2.5 % and 97.5 % points of it when federations are drawn anew, world by world).

    Pairs are of one world: its attacker's scores mean nothing in another.
    """
    source = numpy_generator("label-set-attacks", "bootstrap", seed)
    right, pairs = np.zeros(RESAMPLES + 1), np.zeros(RESAMPLES + 1)
    for one in worlds:
        n = len(one.right)
        w = np.vstack([np.ones(n), source.multinomial(n, np.full(n, 1 / n), RESAMPLES)])
        within = not bool((one.pairs - one.pairs.diag().diag()).any())
        for total, matrix in ((right, one.right.numpy()), (pairs, one.pairs.numpy())):
            # Pairs of one federation are there as often as it was drawn, if there are no others.
            total += w @ matrix.sum(1) if within else ((w @ matrix) * w).sum(1)
    values = right / pairs
    return values[0], *np.quantile(values[1:], [0.025, 0.975])


def ceiling(clients: int, size: Size) -> float:
    """The AUC of who knows how many of the others hold each label, and no more: in closed form.

    h of n others hold a label, h ~ Bin(n, C / K), and each of the n is as likely to be one of them:
    sum_{h, g} P(h) P(g) h (n - g) (1{h > g} + 1{h = g} / 2) / (E h (n - E h)).
    """
    n, p = clients - 1, size.labels / K
    h = np.arange(n + 1)
    chance = np.array([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in h])
    order = np.tril(np.ones((n + 1, n + 1)), -1) + np.eye(n + 1) / 2
    return float((chance * h) @ order @ (chance * (n - h))) / (n * p * n * (1 - p))


def equal_rows(attacked: Sequence[Heard]) -> Compared:
    """Slots of two clients of one federation: are their rows of the last round the same bits?"""
    fed, score, bit = [], [], []
    for f, views in enumerate(attacked):
        rows_ = views.rows_down[-1].flatten(0, 1)
        owner = torch.arange(len(views.labels)).repeat_interleave(views.labels.shape[1])
        pair = owner[:, None] < owner
        same = (rows_[:, None] == rows_).all(-1)
        labels = views.labels.flatten()
        score.append(same[pair].double())
        bit.append((labels[:, None] == labels)[pair].double())
        fed.append(torch.full((int(pair.sum()),), f))
    bits = torch.cat(bit)
    return compared(torch.cat(fed), torch.cat(score), bits, 1 - bits)
