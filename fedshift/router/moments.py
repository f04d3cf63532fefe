"""A router from first and second moments of the client features, and the novelty of a query.

Shapes: N clients, n examples of one client, e client features, B queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.router.score import ClientHead
from fedshift.sketch import sketched


@sketched
class Moments(NamedTuple):
    """A client's only message: n [], sum_b h_b [e], sum_b h_b h_b^T [e, e]; float64.

    Of the third, only the sum over clients is used, unless a client leaves.
    """

    n: Tensor
    sum: Tensor
    square: Tensor


def moments(features: Tensor) -> Moments:
    """The moments of one client's features h [n, e]."""
    h = features.double()
    return Moments(torch.tensor(float(len(h)), dtype=torch.float64), h.sum(0), h.T @ h)


@sketched
@dataclass(frozen=True, eq=False)
class Gaussians:
    """N Gaussians with a common covariance: means [N, e], factor [e, e], sizes n [N]; float64.

    factor is the lower Cholesky factor of the loaded pooled within-client covariance

        S = (1/N) sum_i sum_b (h_b - mu_i)(h_b - mu_i)^T + loading * mean(diag) * I.

    `sent` and `loading` are the arguments of `pooled` from which they were made.
    """

    means: Tensor
    factor: Tensor
    sizes: Tensor
    sent: tuple[Moments, ...] = field(repr=False)
    loading: float

    def without(self, client: int) -> Gaussians:
        """The Gaussians without this client, bit for bit as if it had sent nothing."""
        nothing = Moments(*(torch.zeros_like(v) for v in self.sent[client]))
        others = (nothing if i == client else m for i, m in enumerate(self.sent))
        return pooled(tuple(others), self.loading)

    def head(self) -> ClientHead:
        """Linear discriminant analysis: xi_i = S^-1 mu_i, gamma_i = -mu_i^T xi_i / 2 + log n_i/N.

        If client i's features are N(mu_i, S), softmax(gamma + xi h) is P(client | h).
        """
        xi = torch.cholesky_solve(self.means.T, self.factor).T
        gamma = -0.5 * (self.means * xi).sum(1) + (self.sizes / self.sizes.sum()).log()
        return ClientHead(gamma, xi)

    def novelty(self, features: Tensor) -> Tensor:
        """min_i (h - mu_i)^T S^-1 (h - mu_i) over clients with examples; h [B, e] -> [B].

        Lee et al. 2018, arXiv 1807.03888, Equation 2, with clients instead of classes. It is around
        e for a query like the clients' own, if their features are Gaussian.
        """
        # Leave out clients without examples, whose mean of 0 is not that of any data.
        means = self.means[self.sizes > 0].to(features.device)
        factor = self.factor.to(features.device)
        h = torch.linalg.solve_triangular(factor, features.double().T, upper=False).T
        centres = torch.linalg.solve_triangular(factor, means.T, upper=False).T
        # One client at a time, because all B x N x e differences could need too much memory.
        return torch.stack([(h - c).square().sum(1) for c in centres]).amin(0)


def pooled(sent: Sequence[Moments], loading: float = 0.01) -> Gaussians:
    """The Gaussians of clients 0..N-1 from the moments that they sent.

    loading is the share of the mean variance that is added to every variance. Raises InputError for
    a loading below 0, for features without any variance, and without examples.
    """
    if not loading >= 0.0:
        raise InputError(f"loading must be 0 or more, got {loading}")
    n, total = torch.stack([m.n for m in sent]), torch.stack([m.sum for m in sent])
    if not n.sum() > 0:
        raise InputError("no client has examples; a router needs some")
    means = total / n.clamp(min=1.0)[:, None]
    # The covariance within clients: differences between clients are the signal, not the noise.
    within = torch.stack([m.square for m in sent]).sum(0) - (means * n[:, None]).T @ means
    scale = (within / n.sum()).diagonal().mean()
    covariance = within / n.sum() + loading * scale * torch.eye(len(within), dtype=within.dtype)
    # cholesky_ex returns whether it failed; cholesky would raise torch's own error.
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if int(failed) or not scale > 0:
        raise InputError(
            f"the features' covariance is singular at loading={loading}; give a larger one, as "
            "0.01, and features that vary within clients"
        )
    return Gaussians(means, factor, n, tuple(sent), loading)
