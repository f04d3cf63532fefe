"""How far one classifier is from several that know fewer labels, on unlabeled inputs.

Shapes: C clients, B inputs, K labels, L of them (at most) known to a client. p [C, B, L] are the
clients' probabilities and q [C, B, L] those of the one model for the same labels, both 0 where a
client has no label; for "kl" log q, by `restricted`. w [C], or [C, B] where it differs by input.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Disagreement = Literal["mse", "pairwise", "kl"]


def seen_by(q: Tensor, labels: Tensor) -> Tensor:
    """q_k(x): probabilities [B, K] at each client's labels [C, L], 0 where the label is -1."""
    # -1 is no index; what label 0 gives there is masked.
    at = q[:, labels.clamp(min=0)].transpose(0, 1)
    return at.masked_fill((labels < 0)[:, None], 0)


def restricted(z: Tensor, labels: Tensor) -> Tensor:
    """log q|k (y|x) = z_y - log sum_{u in Y_k} exp z_u [C, B, L]: logits z [B, K] on Y_k alone.

    labels [C, L]; 0 where the label is -1. No other logit enters, and so none gets a gradient.
    """
    empty = (labels < 0)[:, None]
    at = z[:, labels.clamp(min=0)].transpose(0, 1)
    # Masks nothing for a client without labels: 0/0 = NaN would survive its weight of 0.
    logs = at.masked_fill(empty & ~empty.all(2, keepdim=True), -torch.inf).log_softmax(2)
    return logs.masked_fill(empty, 0)


def mse(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y in Y_k} (p_k(y|x) - q(y|x))^2, [].

    It is 0 only where q is p_k on Y_k for every k, which label sets that differ do not allow: each
    p_k sums to 1 over Y_k alone.
    """
    return _weighed(w.to(p.dtype), (p - q).square().sum(2))


def pairwise(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y,y' in Y_k} (p_k(y) q(y') - p_k(y') q(y))^2, [].

    By the identity 2 (||p||^2 ||q||^2 - (p . q)^2), in O(L). It is 0 where q is proportional to p_k
    on Y_k for every k: also where q(Y_k|x) = 0, its trivial minimum.
    """
    both = p.square().sum(2) * q.square().sum(2) - (p * q).sum(2).square()
    return _weighed(w.to(p.dtype) * 2.0, both)


def kl(p: Tensor, log_q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y in Y_k} p_k(y|x) log(p_k(y|x) / q|k (y|x)), [].

    log_q [C, B, L] by `restricted`: q is renormalised on each client's labels. The gradient in the
    logits of Y_k is (1/B) sum_k w_k (q|k - p_k), and exactly 0 in those of other labels. It is 0
    where q|k is p_k for every k: at the truth, if each p_k is the truth renormalised on Y_k.
    """
    return _weighed(w.to(p.dtype), (torch.xlogy(p, p) - p * log_q).sum(2))


def _weighed(w: Tensor, each: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x each_k(x), []: each [C, B]."""
    return (w * each.mean(1)).sum() if w.ndim == 1 else (w * each).mean(1).sum()


def farthest(kind: Disagreement, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """How far q is from where the loss is 0, in the probability of a label, [].

    The largest |p_k(y|x) - q(y|x)| over clients of positive weight, for "kl" with q|k in the place
    of q; for "pairwise" the largest distance from q(y|x) to c p_k(y|x), c being the nearest
    multiple. The loss itself is a square, or like one, which rounds to 0, or to either side of it,
    long before.
    """
    near = p
    if kind == "kl":
        q = q.exp().where(q != 0, p)  # 0 is log 1, or no label: both are as they should be
    if kind == "pairwise":
        near = (p * q).sum(2, keepdim=True) / p.square().sum(2, keepdim=True) * p
    return (near - q).abs()[w > 0].max()


def disagreement(kind: Disagreement, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """`mse`, `pairwise` or `kl`."""
    return {"mse": mse, "pairwise": pairwise, "kl": kl}[kind](p, q, w)
