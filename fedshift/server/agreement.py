"""How far one classifier is from several that know fewer labels, on unlabeled inputs.

Shapes: C clients, B inputs, K labels, L of them (at most) known to a client. p [C, B, L] are the
clients' probabilities and q [C, B, L] those of the one model for the same labels, both 0 where a
client has no label. w [C].
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Disagreement = Literal["mse", "pairwise"]


def seen_by(q: Tensor, labels: Tensor) -> Tensor:
    """q_k(x): probabilities [B, K] at each client's labels [C, L], 0 where the label is -1."""
    # -1 is no index; what label 0 gives there is masked.
    at = q[:, labels.clamp(min=0)].transpose(0, 1)
    return at.masked_fill((labels < 0)[:, None], 0)


def mse(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y in Y_k} (p_k(y|x) - q(y|x))^2, [].

    It is 0 only where q is p_k on Y_k for every k, which label sets that differ do not allow: each
    p_k sums to 1 over Y_k alone.
    """
    return (w.to(p.dtype) * (p - q).square().sum(2).mean(1)).sum()


def pairwise(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k (1/B) sum_x sum_{y,y' in Y_k} (p_k(y) q(y') - p_k(y') q(y))^2, [].

    By the identity 2 (||p||^2 ||q||^2 - (p . q)^2), in O(L). It is 0 where q is proportional to p_k
    on Y_k for every k: also where q(Y_k|x) = 0, its trivial minimum.
    """
    both = p.square().sum(2) * q.square().sum(2) - (p * q).sum(2).square()
    return (w.to(p.dtype) * 2.0 * both.mean(1)).sum()


def farthest(kind: Disagreement, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """How far q is from where the loss is 0, in the probability of a label, [].

    The largest |p_k(y|x) - q(y|x)| over clients of positive weight; for "pairwise" the largest
    distance from q(y|x) to c p_k(y|x), c being the nearest multiple. The loss itself is a square,
    which rounds to 0, or to either side of it, long before.
    """
    near = p
    if kind == "pairwise":
        near = (p * q).sum(2, keepdim=True) / p.square().sum(2, keepdim=True) * p
    return (near - q).abs()[w > 0].max()


def disagreement(kind: Disagreement, p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """`mse` or `pairwise`."""
    return mse(p, q, w) if kind == "mse" else pairwise(p, q, w)
