"""Wrong uses of routers that once gave an answer; each says what it gives now."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor

from fedshift import Federation, Local, Router, run
from fedshift.algorithms.fedavg import FedAvg
from fedshift.data import ClientData, client_data, register
from fedshift.engine.run import Round
from fedshift.errors import FedshiftError
from fedshift.model import build
from fedshift.models.dense import routed_mlp
from fedshift.recipes import Setting, feddrm
from fedshift.router import quality
from fedshift.seeds import Seeds, generator

CENTRES = ((0.0, 0.0), (6.0, 0.0), (0.0, 6.0), (6.0, 6.0))


def _draw(client: int, n: int, spread: float = 1.0) -> Tensor:
    source = generator(n, "trap", client)
    return torch.tensor(CENTRES[client]) + spread * torch.randn(n, 2, generator=source)


def _clients(n: int, spread: float = 1.0) -> list[ClientData]:
    y = torch.arange(n) % 2
    return [client_data(_draw(i, n, spread), y, i) for i in range(len(CENTRES))]


def _trained(
    clients: list[ClientData], rounds: int, cohort: int | None = None
) -> tuple[FedAvg, Round]:
    model = build(lambda: routed_mlp((2,), (16, 8), 2, len(clients)), seed=0)
    method = feddrm(Setting(model, target=(0.5, 0.5), local=Local(lr=0.1, steps=5, batch=32)))
    federation = Federation(clients, *model.init(), register(clients, 2), Seeds.of(0))
    *_, last = run(method, federation, rounds, cohort=cohort)
    return method, last


@cache
def _router() -> Router:
    method, last = _trained(_clients(60), 20)
    return Router.of(method, last.server, last.states)


def _told(trap: Callable[[], str]) -> Callable[[], str]:
    @wraps(trap)
    def tried() -> str:
        try:
            return trap()
        except FedshiftError as e:
            return f"refused: {e}"
        except Exception as e:
            return f"raw: {type(e).__name__}"

    return tried


@_told
def trap_moments_after_a_client_has_left() -> str:
    """I take moments after a client has left, and expect its queries to be new."""
    clients = _clients(60)
    gone = _router().without(3).with_moments(clients)
    limit = -quality.threshold(-torch.cat([gone.novelty(c.x) for c in clients[:3]]), 0.99)
    routed = gone.route(_draw(3, 500), max_novelty=limit).clients
    share = float((routed == -1).double().mean())
    return "right" if share > 0.5 else f"silent: {100 * share:.0f} % of its queries are refused"


@_told
def trap_clients_that_cannot_be() -> str:
    """I ask for the four best clients under a prior that rules two of them out."""
    clients, shares = _router().route(_draw(0, 50), k=4, prior=[0.5, 0.5, 0.0, 0.0])
    listed = int((clients[shares == 0] >= 0).sum())
    return f"silent: {listed} places name a client of probability 0" if listed else "right"


@_told
def trap_a_router_trained_alone() -> str:
    """I draw one client each round, and then route."""
    method, last = _trained(_clients(60), 12, cohort=1)
    router = Router.of(method, last.server, last.states)
    right = [float((router.route(_draw(i, 200)).clients == i).double().mean()) for i in range(4)]
    return f"silent: the right client is found for {100 * sum(right) / 4:.0f} %"


@_told
def trap_true_for_a_client() -> str:
    """I take out `True` where a client's id is due."""
    gone = _router().without(True)
    return f"silent: the clients {gone.clients} are left"


@_told
def trap_a_refit_that_is_too_sure() -> str:
    """I refit a router on few examples of clients that look alike, and trust its probabilities."""
    clients, fresh = _clients(12, spread=9.0), [_draw(i, 2000, 9.0) for i in range(4)]
    method, last = _trained(clients, 10)
    made = Router.of(method, last.server, last.states).refitted(clients)
    belief = made.scores(torch.cat(fresh)).softmax(1)
    error = quality.calibration_error(belief, torch.arange(4).repeat_interleave(2000))
    calibration = getattr(made, "calibration", None)
    if calibration is None:
        return f"silent: calibration error {error:.2f}, and nothing says so"
    return (
        "right" if error < 0.15 or not calibration.better else f"silent: {error:.2f}, recommended"
    )
