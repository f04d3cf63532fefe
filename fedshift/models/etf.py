"""A classifier that is not trained: the simplex of equal angles, an ETF."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift.errors import InputError

TEMPERATURE = 0.1


def simplex(classes: int, width: int) -> Tensor:
    """V [K, width], K directions of length 1 that are as far apart as can be.

    V = sqrt(K/(K-1)) (I - 11^T/K) P^T, P [width, K] with orthonormal columns, drawn at random from
    torch's generator. V V^T = K/(K-1) I - 1/(K-1) 11^T: 1 on the diagonal, -1/(K-1) beside it. An
    equiangular tight frame; to it classifiers tend by themselves where classes are balanced
    (Papyan, Han and Donoho 2020, arXiv 2008.08186). Raises InputError unless 2 <= K <= width.
    """
    if not 2 <= classes <= width:
        raise InputError(
            f"a simplex of {classes} directions in {width} dimensions; give two directions or "
            "more, and as many dimensions"
        )
    basis = torch.linalg.qr(torch.randn(width, classes, dtype=torch.float64))[0]
    centring = torch.eye(classes, dtype=torch.float64) - 1 / classes
    scaled: Tensor = (classes / (classes - 1)) ** 0.5 * centring @ basis.T
    return scaled.to(torch.get_default_dtype())


class EtfHead(nn.Module):
    """logits z_c = s v_c . h / ||h||, h = A f + b the features f [n, features], projected.

    weight   the directions v_c of `simplex`, [K, width]; fixed (`requires_grad` is False): it is
             never trained and never sent
    scale    s, a number, 1 / temperature at first; trained, unless a method freezes it
    project  A and b, to width = max(features, K); they let h be negative where f cannot be
    bias     None, as in `nn.Linear(..., bias=False)`: no label has an advance of its own

    Li et al. 2023 (FedETF), arXiv 2303.10058, whose code starts s at 10 or at 1; Fan et al. 2023
    (FedGELA), arXiv 2405.18972, whose code has s = 5. Raises InputError for fewer than two classes,
    and unless temperature > 0.
    """

    bias: None

    def __init__(self, features: int, classes: int, temperature: float = TEMPERATURE) -> None:
        super().__init__()
        if not 0.0 < temperature < float("inf"):
            raise InputError(f"temperature must be a positive number, got {temperature}")
        width = max(features, classes)
        self.project = nn.Linear(features, width)
        self.weight = nn.Parameter(simplex(classes, width), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1 / temperature))
        self.register_parameter("bias", None)

    def forward(self, features: Tensor) -> Tensor:
        # eps: a zero vector stays 0 instead of becoming 0/0.
        h = F.normalize(self.project(features), dim=1, eps=1e-8)
        return self.scale * F.linear(h, self.weight)


def with_etf(net: nn.Module, temperature: float = TEMPERATURE) -> nn.Module:
    """The network, its linear layer `head` replaced by an `EtfHead`; returns the same object.

    >>> from fedshift.models.dense import Mlp
    >>> from fedshift.models.etf import with_etf
    >>> net = with_etf(Mlp((4,), (8,), classes=3))
    >>> [k for k, v in net.head.named_parameters() if not v.requires_grad], net.head.bias
    (['weight'], None)

    Raises InputError for a network without such a layer.
    """
    head = getattr(net, "head", None)
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"{type(net).__name__} has no linear layer named head for an ETF to take the place of; "
            "use EtfHead as its last layer"
        )
    net.head = EtfHead(head.in_features, head.out_features, temperature)
    return net
