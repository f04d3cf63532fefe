"""A class branch and, for FedDRM, a client branch from the same trunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedshift.errors import InputError

Stage = Callable[[], nn.Module]


def projection(inputs: int, outputs: int) -> nn.Sequential:
    """z [n, inputs] -> relu(LayerNorm(W z + b)) [n, outputs]."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.ReLU())


def untouched(net: nn.Module) -> None:
    """Leave the first weights as torch's layers draw them."""


class Router(nn.Module):
    """Client logits [n, M] = c + V h(x) on the client branch's features h(x) [n, e].

    h is `branch`, `head` holds V [M, e] and c [M]; in Wang et al. 2026 (FedDRM, arXiv 2509.23049)
    h_tau, xi and gamma.
    """

    def __init__(self, branch: nn.Module, width: int, clients: int) -> None:
        super().__init__()
        self.branch = branch
        self.head = nn.Linear(width, clients)

    def forward(self, trunk: Tensor) -> dict[str, Tensor]:
        features = self.branch(trunk)
        return {"client_features": features, "client_logits": self.head(features)}


class Routed(nn.Module):
    """Stages and a classifier; with `clients`, a router that shares the first `shared` stages.

    stages   makers of the stages, in order; together they map x to the class features [n, width]
    width    of the last stage, in both branches
    clients  M, or None for the network of methods without a router
    shared   0 (two networks) to len(stages) - 1 (the client branch has a last stage of its own)
    init     draws the first weights of a part anew; by default they are torch's

    `body` holds all stages up to the class features, `head` is the classifier, `router` has its own
    copies of the stages that are not shared, and the client head. The router is made last, so the
    same seed gives the same body and head with and without it.

    Outputs: features [n, width], logits [n, K]; with two stages or more trunk [n, ...], what the
    last stage of the class branch is given; with a router client_features [n, width] and
    client_logits [n, M].

    Raises InputError for clients below 1.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        width: int,
        classes: int,
        clients: int | None = None,
        *,
        shared: int,
        init: Callable[[nn.Module], None] = untouched,
    ) -> None:
        super().__init__()
        if clients is not None and clients < 1:
            raise InputError(
                f"clients={clients}; a router tells 1 or more clients apart. Give their number, or "
                "None for a network without a router."
            )
        self.shared = shared
        self.body = nn.Sequential(*(make() for make in stages))
        self.head = nn.Linear(width, classes)
        # Part by part, so that the router's draws come after all others.
        init(self.body)
        init(self.head)
        # Made last: see the docstring.
        self.router: Router | None = None
        if clients is not None:
            branch = nn.Sequential(*(make() for make in stages[shared:]))
            self.router = Router(branch, width, clients)
            init(self.router)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        # The shared stages run once for both branches.
        common = self.body[: self.shared](x)
        trunk = self.body[self.shared : -1](common)
        features = self.body[-1](trunk)
        out = {"features": features, "logits": self.head(features)}
        # A single stage is given the inputs themselves.
        out |= {"trunk": trunk} if len(self.body) > 1 else {}
        return out if self.router is None else out | self.router(common)
