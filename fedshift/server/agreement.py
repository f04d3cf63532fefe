"""How far one classifier is from several that know fewer labels, on unlabeled inputs.

Shapes: C clients, B inputs, K labels, at most L of them known to a client. p [C, B, L] are the
clients' probabilities and q [C, B, L] those of the one model for the same labels. Both are 0 in
slots without a label. For "kl", `restricted` gives log q. Weights w are [C], or [C, B] if they
depend on the input.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Disagreement = Literal["mse", "pairwise", "kl"]


def seen_by(q: Tensor, labels: Tensor) -> Tensor:
    """q_k(x): probabilities [B, K] at each client's labels [C, L], 0 where the label is -1."""
    # -1 is no valid index: look up label 0 instead, and mask the result.
    at = q[:, labels.clamp(min=0)].transpose(0, 1)
    return at.masked_fill((labels < 0)[:, None], 0)


def restricted(z: Tensor, labels: Tensor) -> Tensor:
    """log q|k (y|x) = z_y - log sum_{u in Y_k} exp z_u [C, B, L]: logits z [B, K] on Y_k alone.

    labels [C, L]; the value is 0 where the label is -1. Logits outside Y_k get no gradient.
    """
    empty = (labels < 0)[:, None]
    at = z[:, labels.clamp(min=0)].transpose(0, 1)
    # For a client without labels mask nothing: its softmax would be 0 / 0, and NaN times its weight
    # of 0 is NaN.
    logs = at.masked_fill(empty & ~empty.all(2, keepdim=True), -torch.inf).log_softmax(2)
    return logs.masked_fill(empty, 0)


def mse(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y in Y_k} (p_k(y|x) - q(y|x))^2, [].

    It is 0 only if q = p_k on Y_k for every k. Clients with different label sets do not allow that,
    because each p_k sums to 1 over its Y_k.
    """
    return _weighted_mean(w.to(p.dtype), (p - q).square().sum(2))


def pairwise(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y,y' in Y_k} (p_k(y) q(y') - p_k(y') q(y))^2, [].

    Computed in O(L) as 2 (||p||^2 ||q||^2 - (p . q)^2). It is 0 if q is proportional to p_k on Y_k
    for every k, which includes the trivial minimum q(Y_k|x) = 0.
    """
    both = p.square().sum(2) * q.square().sum(2) - (p * q).sum(2).square()
    return _weighted_mean(w.to(p.dtype) * 2.0, both)


def kl(p: Tensor, log_q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y in Y_k} p_k(y|x) log(p_k(y|x) / q|k (y|x)), [].

    log_q [C, B, L] by `restricted`: q is renormalised on each client's labels. The gradient by the
    logits of Y_k is (1/B) sum_k w_k (q|k - p_k), and exactly 0 by all others. The loss is 0 if
    q|k = p_k for every k; so the truth minimises it if each p_k is the truth renormalised on Y_k.
    """
    return _weighted_mean(w.to(p.dtype), (torch.xlogy(p, p) - p * log_q).sum(2))


def _weighted_mean(w: Tensor, each: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x each_k(x), []: each [C, B]."""
    return (w * each.mean(1)).sum() if w.ndim == 1 else (w * each).mean(1).sum()


def farthest(kind: Disagreement, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """How far q is from a zero of the loss, as a difference of probabilities, [].

    The largest |p_k(y|x) - q(y|x)| over clients of positive weight; for "kl" with q|k instead of q,
    for "pairwise" with c p_k(y|x) instead of p_k, c the best factor. A test of the loss itself
    would stop too early: it is about the square of this, and rounds to 0 (or below) long before.
    """
    near = p
    if kind == "kl":
        q = q.exp().where(q != 0, p)  # log q = 0: an only label, or none; either way no difference
    if kind == "pairwise":
        near = (p * q).sum(2, keepdim=True) / p.square().sum(2, keepdim=True) * p
    return (near - q).abs()[w > 0].max()


def disagreement(kind: Disagreement, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """`mse`, `pairwise` or `kl`."""
    return {"mse": mse, "pairwise": pairwise, "kl": kl}[kind](p, q, w)
