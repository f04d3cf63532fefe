"""Where central tuning would end, input by input, if no network stood between: exact minimisers.

Shapes: C clients, n inputs, K labels. p [C, n, K] are the clients' probabilities, 0 outside of the
labels Y_k that client k holds, as holds [C, K]; w [C, n] their weights on each input. The answers
[n, K] sum to 1 over the labels. All in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.server.rows import by_label

# Relative to the matrix: where several answers are best, the one that is spread most evenly.
RIDGE = 1e-10
NEWTON, HALVINGS, FLAT = 100, 30, 1e-10
# Of `accuracies`, in order.
MEASURED = ("aggregate", "mse", "pairwise", "kl")


def accuracies(
    p: Tensor, labels: Tensor, w: Tensor, z: Tensor, y: Tensor, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accuracies [4] on y [n] of the logits z [n, K] and of each loss's optimum; errors [3].

    In the order of `MEASURED`, float64. p [C, n, L] are the answers for the labels [C, L]; w [C] or
    [C, n]; among [K] the labels of `over` = "union", None for all. KL's optimum is that over all:
    there is no other. The errors are standard errors of optimum minus aggregate, s / sqrt(n) with s
    the standard deviation of the differences example by example; 1 where there is one example.
    """
    wide, holds = spread(p, labels, z.shape[1])
    w = (w if w.ndim == 2 else w[:, None].expand(-1, len(y))).double()
    optima = (mse_optimum(wide, holds, w, among), pairwise_optimum(wide, holds, w, among))
    answers = (z, *optima, kl_optimum(wide, holds, w, z))
    right = torch.stack([(q.argmax(1) == y).double() for q in answers])
    gains = right[1:] - right[:1]
    errors = gains.std(1) / len(y) ** 0.5 if len(y) > 1 else torch.ones_like(gains[:, 0])
    return right.mean(1), errors


def spread(p: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(p [C, n, K], holds [C, K]) of probabilities [C, n, L] of the labels [C, L], -1 for none.

    They sum to 1 in float64, too: Newton's method takes what is missing for a slope.
    """
    wide = by_label(p.double().transpose(1, 2), labels, classes).transpose(1, 2)
    ones = torch.ones(labels.shape, dtype=torch.float64, device=labels.device)
    wide = wide / wide.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return wide, by_label(ones, labels, classes) > 0


def mse_optimum(p: Tensor, holds: Tensor, w: Tensor, among: Tensor | None = None) -> Tensor:
    """argmin over the simplex of sum_k w_k sum_{y in Y_k} (p_k(y) - q(y))^2, [n, K].

    q(y) = max(0, (b_y + nu) / a_y), a_y = sum_{k: y in Y_k} w_k and b_y = sum_k w_k p_k(y), with
    nu such that q sums to 1. Labels that no client knows share the rest where sum_y b_y / a_y < 1.
    among [K] bool: q is 0 on all other labels.
    """
    among = holds.new_ones(holds.shape[1]) if among is None else among
    a, b = torch.einsum("cn,ck->nk", w, holds.double()), torch.einsum("cn,cnk->nk", w, p)
    there = (a > 0) & among
    inverse = there / torch.where(there, a, 1.0)
    order = torch.where(there, b, -torch.inf).argsort(1, descending=True)
    # nu of the m labels of largest b: the right m is the largest whose last label has some mass.
    ordered = [v.gather(1, order).cumsum(1) for v in (inverse, b * inverse)]
    nu = (1 - ordered[1]) / ordered[0].clamp(min=torch.finfo(torch.float64).tiny)
    active = (nu + b.gather(1, order) > 0) & there.gather(1, order)
    nu = nu.gather(1, active.sum(1, keepdim=True).sub(1).clamp(min=0))
    unclaimed = ~(a > 0) & among
    nu = torch.where(unclaimed.any(1, keepdim=True), nu.clamp(max=0), nu)
    q = ((b + nu) * inverse).clamp(min=0)
    rest = (1 - q.sum(1, keepdim=True)).clamp(min=0)
    return q + rest * unclaimed / unclaimed.sum(1, keepdim=True).clamp(min=1)


def pairwise_optimum(p: Tensor, holds: Tensor, w: Tensor, among: Tensor | None = None) -> Tensor:
    """argmin over the simplex of sum_k w_k sum_{y,z in Y_k} (p_k(y) q(z) - p_k(z) q(y))^2, [n, K].

    It is q' M q with M = 2 sum_k w_k (||p_k||^2 diag(1{y in Y_k}) - p_k p_k'), so that q = M^-1 1
    up to its sum: M has no positive entry off its diagonal, and M^-1 no negative one. Where M is
    singular, as with labels that no client knows, (M + ridge)^-1 takes its place. among [K] bool:
    q is 0 on all other labels, and M has the rows and columns of these.
    """
    among = holds.new_ones(holds.shape[1]) if among is None else among
    norms = torch.einsum("cn,ck->nk", w * p.square().sum(2), holds.double())
    m = 2 * (torch.diag_embed(norms) - torch.einsum("cn,cnk,cnl->nkl", w, p, p))
    m, scale = m[:, among][:, :, among], norms.sum(1).clamp(min=torch.finfo(m.dtype).tiny)
    eye = torch.eye(m.shape[1], dtype=m.dtype, device=m.device)
    ones = torch.ones_like(m[:, 0])
    q = torch.zeros_like(norms)
    q[:, among] = torch.linalg.solve(m / scale[:, None, None] + RIDGE * eye, ones).clamp(min=0)
    return q / q.sum(1, keepdim=True)


def kl_optimum(p: Tensor, holds: Tensor, w: Tensor, start: Tensor) -> Tensor:
    """argmin of sum_k w_k KL(p_k || q|k), q|k = q renormalised on Y_k, [n, K].

    Newton's method with halved steps in the logits, in which the loss is convex; the gradient is
    sum_k w_k (q|k - p_k). Between labels that no client ties together, by a label in common, the
    loss says nothing: there logits keep their means of `start` [n, K], and elsewhere it has no say.
    """
    z, gone = start.double(), ~holds[:, None]
    b = torch.einsum("cn,cnk->nk", w, p)
    eye = RIDGE * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)

    def loss(z: Tensor) -> Tensor:
        each = z.masked_fill(gone, -torch.inf).logsumexp(2)
        each = torch.where(holds.any(1)[:, None], each, 0.0)
        total: Tensor = (w * each).sum(0) - (b * z).sum(1)
        return total

    for _ in range(NEWTON):
        q = torch.where(gone, 0.0, z.masked_fill(gone, -torch.inf).softmax(2))
        grad = torch.einsum("cn,cnk->nk", w, q) - b
        if not len(z) or float(grad.abs().max()) < FLAT:
            break
        wide = torch.diag_embed(torch.einsum("cn,cnk->nk", w, q))
        hessian = wide - torch.einsum("cn,cnk,cnl->nkl", w, q, q) + eye
        step, now = torch.linalg.solve(hessian, grad), loss(z)
        rate = torch.ones_like(z[:, :1])
        for _ in range(HALVINGS):
            due = 1e-4 * rate[:, 0] * (step * grad).sum(1)
            worse = loss(z - rate * step) > now - due + 1e-14
            if not bool(worse.any()):
                break
            rate = torch.where(worse[:, None], rate / 2, rate)
        z = z - rate * step
    return z.softmax(1)
