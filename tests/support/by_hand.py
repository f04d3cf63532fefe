"""Problems with known answers, and the same methods written out in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.method import Method
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import Term, View
from fedshift.data import client_data, register
from fedshift.engine.run import Federation, Round, run
from fedshift.model import Model, build
from fedshift.seeds import Seeds
from fedshift.server.combine import Mean
from fedshift.server.weights import Uniform
from fedshift.tree import Params
from support.federations import CLASSES, FEATURES, double, make_clients, make_federation

Array = np.ndarray[Any, np.dtype[np.float64]]


def final(algorithm: Method, federation: Federation, rounds: int = 2, **options: Any) -> Round:
    return list(run(algorithm, federation, rounds, **options))[-1]


def max_difference(a: Params, b: Params) -> float:
    return max(float((a[k].double() - b[k].double()).abs().max()) for k in a)


@dataclass(frozen=True, eq=False)
class Quadratics(Term):
    """F_i(t) = (1/2) (t - b_i)' A_i (t - b_i) on client i, whatever the batch.

    a [M, d, d] symmetric positive definite, b [M, d].
    """

    a: Tensor
    b: Tensor

    def __call__(self, view: View) -> Tensor:
        i = view.context["client"]["id"]
        r = view.params["weight"].flatten() - self.b[i]
        return r @ self.a[i] @ r / 2

    def minimiser(self, weights: Tensor) -> Tensor:
        """argmin sum_i w_i F_i = (sum_i w_i A_i)^{-1} sum_i w_i A_i b_i."""
        left = torch.einsum("i,ijk->jk", weights.double(), self.a)
        return torch.linalg.solve(
            left, torch.einsum("i,ijk,ik->j", weights.double(), self.a, self.b)
        )


CURVATURES = (
    [[2.0, 0.5], [0.5, 1.0]],
    [[0.5, 0.0], [0.0, 3.0]],
    [[1.0, -0.4], [-0.4, 0.7]],
)
CENTRES = ([1.0, -2.0], [-3.0, 0.5], [2.0, 2.0])
THREE = Quadratics(torch.tensor(CURVATURES).double(), torch.tensor(CENTRES).double())


def quadratic_model(d: int = 2) -> Model:
    return Model(nn.Linear(d, 1, bias=False))


def quadratic_federation(
    steps: tuple[int, ...], start: tuple[float, ...] = (0.0, 0.0)
) -> Federation:
    """Clients of as many examples as steps: with a batch of 1, client i takes steps_i per epoch."""
    d = len(start)
    clients = tuple(
        client_data(torch.zeros(n, d).double(), torch.zeros(n).long(), i)._replace(
            w=torch.ones(n).double()
        )
        for i, n in enumerate(steps)
    )
    params = {"weight": torch.tensor([start]).double()}
    return Federation(clients, params, {}, register(clients, 2), Seeds.of(0))


def theta(played: Round) -> Tensor:
    return played.server["params"]["weight"].flatten()


def softmax_regression() -> Model:
    return build(lambda: nn.Linear(FEATURES, CLASSES), seed=4)


def softmax_federation(sizes: tuple[int, ...] = (12, 20, 9)) -> Federation:
    return double(make_federation(softmax_regression(), make_clients(sizes=sizes)))


@dataclass(frozen=True)
class Hand:
    """Softmax regression on one federation with plain arrays: theta [K, d + 1], bias last."""

    federation: Federation
    algorithm: Method

    def start(self) -> Array:
        return self.flat(self.federation.params)

    @staticmethod
    def flat(params: Params) -> Array:
        return np.hstack([params["weight"].numpy(), params["bias"].numpy()[:, None]])

    def batches(self, client: int, t: int) -> list[Array]:
        """Row numbers of each step of client `client` in round t."""
        data = self.federation.clients[client]
        plan = plan_all(self.algorithm.phases(), data, t, self.federation.seeds.batch, client)
        steps = plan["train0"]
        return [steps.rows[s][: steps.sizes[s]].numpy() for s in range(steps.steps)]

    def gradient(self, theta: Array, client: int, rows: Array | slice = slice(None)) -> Array:
        """(1/B) sum_b (softmax(theta x_b) - e_{y_b}) x_b'."""
        data = self.federation.clients[client]
        x = np.hstack([data.x.numpy(), np.ones((len(data.x), 1))])[rows]
        y = data.y.numpy()[rows]
        z = x @ theta.T
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return p.T @ x / len(y)


def uniform_fedavg(model: Model, local: Local) -> FedAvg:
    return FedAvg(model, local=local, combine=Mean(Uniform()))
