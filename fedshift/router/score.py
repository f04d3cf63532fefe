"""The client head, and scores, posteriors and priors from its logits.

Shapes: B queries, N clients, e client features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.errors import InputError, unknown
from fedshift.sketch import sketched

Rule = Literal["posterior", "density"]
Numbers = Tensor | Sequence[float]
Prior = Rule | Numbers
RULES = ("posterior", "density")


@sketched
@dataclass(frozen=True, eq=False)
class ClientHead:
    """z = gamma + xi h: gamma [N], xi [N, e], client features h [B, e] -> client logits [B, N].

    softmax(z) is P(client | h) at the clients' own sizes, so gamma contains log(n_i / N). Adding
    one number to all of gamma, or one row to all of xi, changes nothing. float64.
    """

    gamma: Tensor
    xi: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        # float64, because posteriors depend on differences of sums over hundreds of features.
        xi, gamma = self.xi.to(features.device), self.gamma.to(features.device)
        return gamma + features.double() @ xi.T


def scores(logits: Tensor, sizes: Tensor, prior: Prior = "posterior") -> Tensor:
    """s_i(x) = z_i(x) - log(n_i / N) + log q_i; [B, N] float64.

    z [B, N] are raw client logits: they contain log(n_i / N), because the router was fitted to
    clients of these sizes n [N]. So z_i - log(n_i / N) is the log of client i's density, up to a
    function of x that all clients share, and softmax(s) is P(client | x) when queries come from the
    clients in proportions q.

        "posterior"  q_i = n_i / N: s = z. The paper's rule
        "density"    q_i = 1 / N: which population x resembles most. The rule of the authors' code
        numbers      q [N], any distribution

    Only clients with n_i > 0 count in N, and q is conditioned on x coming from one of them.

    A client with n_i = 0 or q_i = 0 scores minus infinity. Logarithms are taken in float64.

    Source: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 2.3; other priors: Saerens, Latinne
    and Decaestecker 2002. Raises InputError for invalid priors or sizes.
    """
    if logits.ndim != 2 or logits.shape[1:] != sizes.shape:
        raise InputError(
            f"client logits {tuple(logits.shape)} for sizes {tuple(sizes.shape)}; "
            "give [B, N] and [N]"
        )
    return logits.double() + log_tilt(sizes, prior).to(logits.device)


def posterior(logits: Tensor, sizes: Tensor, prior: Prior = "posterior") -> Tensor:
    """r_i(x) = softmax_i(s(x)): P(client i | x) under the prior, [B, N] float64."""
    return scores(logits, sizes, prior).softmax(1)


def log_tilt(sizes: Tensor, prior: Prior) -> Tensor:
    """log q - log(n / N) [N]: 0 for the clients' own prior, exactly.

    Raises InputError for a prior that is no distribution over these clients.
    """
    client_shares = shares(sizes)
    if not isinstance(prior, str):
        prior_shares = _checked_prior(prior, client_shares)
        # Distribute the mass of clients that get no queries among the others.
        unusable = float(prior_shares[client_shares == 0].sum())
        q = prior_shares / (1.0 - unusable) if unusable else prior_shares
    elif prior == "density":
        q = torch.full_like(client_shares, 1.0 / int((client_shares > 0).sum()))
    elif prior == "posterior":
        return torch.zeros_like(client_shares).masked_fill(client_shares == 0, -torch.inf)
    else:
        raise unknown("prior", prior, RULES)
    # The logit of a client without examples is meaningless: the router was not fitted to it.
    return torch.where(client_shares > 0, q.log() - client_shares.log(), -torch.inf)


def shares(sizes: Tensor) -> Tensor:
    """n_i / N [N] in float64. Raises InputError unless sizes are 0 or more and not all 0."""
    # On the CPU: these are a few numbers, and checks of values would make a GPU wait.
    n = sizes.detach().cpu().double()
    total = float(n.sum())
    if n.ndim != 1 or bool((n < 0).any()) or not 0.0 < total < float("inf"):
        raise InputError(
            f"sizes must be one number of examples per client, not all 0, got {_shown(n)}"
        )
    return n / total


def _checked_prior(prior: Numbers, client_shares: Tensor) -> Tensor:
    """The prior. Raises InputError unless it is a distribution over clients, one of them usable."""
    try:
        q = torch.as_tensor(prior, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"a prior must be a number per client, got {prior!r}") from None
    if q.shape != client_shares.shape:
        raise InputError(
            f"a prior of shape {tuple(q.shape)} for {len(client_shares)} clients; give one each"
        )
    if not bool(torch.isfinite(q).all()) or bool((q < 0).any()) or abs(float(q.sum()) - 1) > 1e-6:
        raise InputError(f"a prior must be 0 or more and sum to 1, got {_shown(q)}")
    if not bool((q[client_shares > 0] > 0).any()):
        raise InputError(
            f"the prior {_shown(q)} is 0 for every client that can be routed to; "
            f"give mass to one of {(client_shares > 0).nonzero().flatten().tolist()}"
        )
    return q


def _shown(v: Tensor) -> str:
    text = ", ".join(f"{x:g}" for x in v.flatten()[:8].tolist())
    return f"[{text}{', ...' if v.numel() > 8 else ''}]"


def estimate_prior(
    logits: Tensor, sizes: Tensor, *, tolerance: float = 1e-10, steps: int = 10_000
) -> Tensor:
    """The mix q [N] of clients that unlabelled queries come from, float64.

    q maximises sum_x log sum_i q_i r_i(x) / w_i, w_i = n_i / N and r the posterior at q = w, which
    is concave. Expectation-maximisation: q_i <- mean_x (q_i r_i(x) / w_i) / sum_l (q_l r_l(x) /
    w_l), from q = w until the change sum_i |dq_i| is below the tolerance.

    Source: Saerens, Latinne and Decaestecker 2002, "Adjusting the outputs of a classifier to new a
    priori probabilities: a simple procedure", Neural Computation 14. The estimate is consistent if
    r is calibrated, so refit the router before. Raises InputError without queries.
    """
    if not len(logits):
        raise InputError("no queries to estimate a prior from; give at least one")
    client_shares = shares(sizes)
    present = client_shares > 0
    # r_i / w_i up to a factor per query, which cancels in every step and avoids overflow.
    log_ratio = scores(logits, sizes, "density").cpu()[:, present]
    ratio = (log_ratio - log_ratio.amax(1, keepdim=True)).exp()
    # Expectation-maximisation: no step lowers the likelihood.
    q = client_shares[present]
    for _ in range(steps):
        joint = ratio * q
        new = (joint / joint.sum(1, keepdim=True)).mean(0)
        change = float((new - q).abs().sum())
        q = new
        if change < tolerance:
            break
    full = torch.zeros_like(client_shares)
    full[present] = q
    return full
