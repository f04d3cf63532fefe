"""A small network with a router, a federation for it, and densities known in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedshift.client.local import Local
from fedshift.data import ClientData
from fedshift.engine.run import Federation
from fedshift.model import Model, build
from fedshift.models.routed import Routed, projection
from fedshift.recipes import Setting, feddrm
from fedshift.router.parts import Here, Part
from fedshift.router.refit import Refit, refit
from fedshift.router.route import Router
from fedshift.seeds import generator
from support.by_hand import final
from support.federations import CLASSES, FEATURES, SIZES, TARGET, make_clients, make_federation


def routed_model(clients: int | None = len(SIZES), seed: int = 1) -> Model:
    """FEATURES-10-6-CLASSES, and from the 10 a client branch 10-6-clients."""
    stages = (
        lambda: nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU()),
        lambda: projection(10, 6),
    )
    return build(lambda: Routed(stages, 6, CLASSES, clients, shared=1), seed)


def routed_setting(model: Model, **local: object) -> Setting:
    given = {"lr": 0.1, "epochs": 2, "batch": 8} | local
    return Setting(model, TARGET, Local(**given), clients=len(SIZES))  # type: ignore[arg-type]


def routed_federation(model: Model, clients: tuple[ClientData, ...] | None = None) -> Federation:
    return make_federation(model, make_clients() if clients is None else clients)


def gaussian(x: Tensor, mean: float, sd: float) -> Tensor:
    """log N(x; mean, sd^2) without its constant."""
    return -((x - mean) ** 2) / (2 * sd**2) - torch.tensor(sd).double().log()


def draw_gaussians(
    means: Sequence[float], sds: Sequence[float], sizes: Sequence[int], seed: int = 0
) -> list[Tensor]:
    """Client i's sample [n_i] of N(mean_i, sd_i^2), float64."""
    source = generator(seed, "gaussians")
    normals = (torch.randn(n, generator=source, dtype=torch.float64) for n in sizes)
    return [m + s * z for m, s, z in zip(means, sds, normals, strict=True)]


def squares(x: Tensor) -> Tensor:
    """The basis (x, x^2) of Gaussian density ratios: [n] -> [n, 2]."""
    return torch.stack([x, x**2], 1)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Standard normal numbers, float64."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def trained_router() -> Router:
    """The router of FedDRM after four rounds on the small network."""
    model = routed_model()
    algorithm = feddrm(routed_setting(model))
    played = final(algorithm, routed_federation(model), 4)
    return Router.of(algorithm, played.server, played.states)


def refit_locally(features: Sequence[Tensor], **options: float) -> Refit:
    """`refit` of clients in this process: features[i] is client i's h [n_i, e]."""
    return refit(Part(Here(features)), **options)  # type: ignore[arg-type]
