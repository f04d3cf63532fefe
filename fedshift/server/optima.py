"""Exact minimisers of central tuning's losses, input by input, as if no network limited the answer.

Shapes: C clients, n inputs, K labels. p [C, n, K] are the clients' probabilities, 0 for labels that
a client does not have; holds [C, K] says which ones it has (Y_k for client k). w [C, n] are the
clients' weights on each input. The answers [n, K] sum to 1 over the labels. All in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.server.rows import by_label

# Relative to the matrix. If several answers are best, it selects the most even one.
RIDGE = 1e-10
NEWTON, HALVINGS, FLAT = 100, 30, 1e-10
# What `accuracies` returns, in this order.
MEASURED = ("aggregate", "mse", "pairwise", "kl")


def accuracies(
    p: Tensor, labels: Tensor, w: Tensor, z: Tensor, y: Tensor, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accuracies [4] on y [n] of the logits z [n, K] and of each loss's optimum; errors [3].

    In the order of `MEASURED`, float64. p [C, n, L] are the clients' answers for their labels
    [C, L]; w [C] or [C, n]; among [K] the labels of `over` = "union", None for all. (KL has only
    the optimum over all labels.) The errors are standard errors of the difference between an
    optimum and the aggregate: s / sqrt(n), s the standard deviation over examples; 1 for n = 1.
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

    They are renormalised in float64: Newton's method would take a missing 1e-8 for a slope.
    """
    wide = by_label(p.double().transpose(1, 2), labels, classes).transpose(1, 2)
    ones = torch.ones(labels.shape, dtype=torch.float64, device=labels.device)
    wide = wide / wide.sum(2, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return wide, by_label(ones, labels, classes) > 0


def mse_optimum(p: Tensor, holds: Tensor, w: Tensor, among: Tensor | None = None) -> Tensor:
    """argmin over the simplex of sum_k w_k sum_{y in Y_k} (p_k(y) - q(y))^2, [n, K].

    q(y) = max(0, (b_y + nu) / a_y), a_y = sum_{k: y in Y_k} w_k and b_y = sum_k w_k p_k(y), with
    nu such that q sums to 1. If sum_y b_y / a_y < 1, labels that no client has share the rest.
    among [K] bool: q is 0 on all other labels.
    """
    among = holds.new_ones(holds.shape[1]) if among is None else among
    a, b = torch.einsum("cn,ck->nk", w, holds.double()), torch.einsum("cn,cnk->nk", w, p)
    claimed = (a > 0) & among
    inverse = claimed / torch.where(claimed, a, 1.0)
    order = torch.where(claimed, b, -torch.inf).argsort(1, descending=True)
    # nu if the m labels with the largest b have mass, for each m. The right m is the largest one
    # for which the last of these labels does have some.
    ordered = [v.gather(1, order).cumsum(1) for v in (inverse, b * inverse)]
    nu = (1 - ordered[1]) / ordered[0].clamp(min=torch.finfo(torch.float64).tiny)
    active = (nu + b.gather(1, order) > 0) & claimed.gather(1, order)
    nu = nu.gather(1, active.sum(1, keepdim=True).sub(1).clamp(min=0))
    unclaimed = ~(a > 0) & among
    # Unclaimed labels cost nothing, so mass goes to them before any q exceeds b / a (nu > 0).
    nu = torch.where(unclaimed.any(1, keepdim=True), nu.clamp(max=0), nu)
    q = ((b + nu) * inverse).clamp(min=0)
    rest = (1 - q.sum(1, keepdim=True)).clamp(min=0)
    return q + rest * unclaimed / unclaimed.sum(1, keepdim=True).clamp(min=1)


def pairwise_optimum(p: Tensor, holds: Tensor, w: Tensor, among: Tensor | None = None) -> Tensor:
    """argmin over the simplex of sum_k w_k sum_{y,z in Y_k} (p_k(y) q(z) - p_k(z) q(y))^2, [n, K].

    It is q' M q with M = 2 sum_k w_k (||p_k||^2 diag(1{y in Y_k}) - p_k p_k'), so that q = M^-1 1
    up to its sum. This q is not negative: M has no positive entry off its diagonal, and so M^-1 has
    no negative one. If M is singular, as with labels that no client has, (M + ridge)^-1 is used.
    among [K] bool: q is 0 on all other labels, and M has only the rows and columns of these.
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
    sum_k w_k (q|k - p_k). The loss does not compare labels that no chain of clients connects: each
    connected group keeps its mean logit from `start` [n, K], on which nothing else depends.
    """
    z, gone = start.double(), ~holds[:, None]
    b = torch.einsum("cn,cnk->nk", w, p)
    eye = RIDGE * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)

    def loss(z: Tensor) -> Tensor:
        """sum_k w_k KL(p_k || q|k) for each input [n], up to a constant in z."""
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
        # Inputs are independent problems, so each one has its own step length.
        rate = torch.ones_like(z[:, :1])
        for _ in range(HALVINGS):
            # Armijo's condition: the loss must fall by a fraction of what the slope promises.
            due = 1e-4 * rate[:, 0] * (step * grad).sum(1)
            worse = loss(z - rate * step) > now - due + 1e-14
            if not bool(worse.any()):
                break
            rate = torch.where(worse[:, None], rate / 2, rate)
        z = z - rate * step
    return z.softmax(1)
