"""The client head: an affine map from client features to client logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedshift.sketch import sketched


@sketched
@dataclass(frozen=True, eq=False)
class ClientHead:
    """z = gamma + xi h: gamma [N], xi [N, e], client features h [B, e] -> client logits [B, N].

    softmax(z) is P(client | h) at the clients' own sizes, so gamma holds log(n_i / N). Adding one
    number to all of gamma, or one row to all of xi, changes nothing. float64.
    """

    gamma: Tensor
    xi: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        # In float64: a few hundred features are summed, and posteriors depend on differences.
        xi, gamma = self.xi.to(features.device), self.gamma.to(features.device)
        return gamma + features.double() @ xi.T
