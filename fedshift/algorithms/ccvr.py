"""CCVR: after the last training round, the server fits the classifier to virtual features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, Wrapper
from fedshift.arguments import Positive, check_fields
from fedshift.client.local import Local
from fedshift.client.prototypes import check_features, class_products, head_shape
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.combine import total
from fedshift.server.virtual import drawn, gaussians, refitted
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts

# A pass over all examples; its batches only bound the memory.
WHOLE = Local(epochs=1, batch=256)


@sketched
@dataclass(frozen=True)
class Ccvr(Wrapper):
    """`inner` in rounds 1, ..., `after`; in later rounds the server fits the head anew.

        client   E_i[1{y = c}], E_i[1{y = c} f], E_i[1{y = c} f f^T] of its features f, [K, d, d]
        server   their means by the cohort's weights a_i: a Gaussian for each label
                 `virtual` features of each label are drawn, and (W, b) <- softmax regression on
                 them, label c counting `shares`_c

    f is the input of the head, computed by the received model in evaluation mode. Labels that no
    client of the cohort has are left out, and the other shares rescaled to sum to 1; if no label is
    left, the head does not change. The server uses only sums over clients.

    shares   [K]: 1/K each as in the paper, or the target's shares, for which the head is then right
    ridge    of the regression, `fedshift.server.virtual.refitted`
    head     name prefixes of the last linear layer

    Luo et al. 2021, "No fear of heterogeneity: classifier calibration for federated learning with
    non-IID data" (CCVR), arXiv 2106.05001. We differ in three ways: labels are weighted by shares
    instead of drawn equally often, the regression runs to its minimum, and the covariance is
    divided by n. Raises InputError for settings out of range, and before round 1 for a model
    without "features", or with a head that is no linear layer.
    """

    inner: Method
    after: int
    shares: tuple[float, ...]
    virtual: int = 500
    ridge: Positive = 1e-3
    head: tuple[str, ...] = ("head.",)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.after < 0 or self.virtual < 1:
            raise InputError(
                f"CCVR after {self.after} rounds with {self.virtual} virtual features of a label; "
                "give 0 or more rounds, and 1 feature or more"
            )

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        server = self.inner.init(params, buffers, table)
        if server["params"].keys() != params.keys():
            raise InputError(
                "CCVR fits the head of one model for all, and clients keep parameters of their "
                f"{type(self.inner).__name__}; give a method that shares them all"
            )
        self._layer(params)  # for its checks
        return server

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        check_features(self.model, self.head, params, buffers, data)
        return self.inner.init_client(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return {"statistics": WHOLE}

    def trains(self, weights: Tensor) -> Tensor:
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        # Not `inner`'s message: its other parts are for training, and no client trains here.
        return {"params": server["params"], "buffers": server["buffers"]}

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        pair, plan = (message["params"], message["buffers"]), plans["statistics"]
        shape = head_shape(self.model, self.head)
        moments, loss = class_products(self.model, *pair, data, plan, shape)
        return {"moments": moments, "report": {"id": data.id, "loss": loss}}, {}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        moments = total(updates, "moments", updates["cohort"]["weight"])
        shares = torch.tensor(self.shares, dtype=torch.float64) * (moments["share"] > 0)
        if not shares.sum() > 0:  # no label is left
            return {}
        old = server["params"]
        names = self._layer(old)
        fixed = None
        if not set(names[1:]) - self.model.fixed:  # the layer has no bias, or a fixed one
            fixed = old[names[1]] if names[1:] else torch.zeros(len(shares))
        virtual = drawn(*gaussians(**moments), self.virtual, seed)
        fitted = refitted(virtual, shares / shares.sum(), self.ridge, fixed)
        # Not strict: without a bias in the network there is only the name of the matrix.
        new = {k: v.to(old[k]) for k, v in zip(names, fitted, strict=False)}
        return {"params": old | new}

    def reveals(self) -> Mapping[str, str]:
        return {
            **self.inner.reveals(),
            "moments": "in the last round: of each label the share, and the mean and the mean "
            "products of its features",
        }

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """The moments, by the cohort's weights."""
        return {"moments": cohort["weight"]}

    def needs_classes(self) -> bool:
        """True: it has a Gaussian for each class."""
        return True

    def most_sent(self, params: Params) -> int:
        """The moments: K (1 + d + d^2) numbers of 8 bytes."""
        classes, width = params[self._layer(params)[0]].shape
        inner = self.inner.most_sent(params)
        return max(8 * classes * (1 + width + width**2), inner)

    def moves_server(self) -> bool:
        """False: clients reply with statistics, not with a change of the model."""
        return False

    def trained_model(self) -> Model | None:
        """None: in these rounds no client trains."""
        return None

    def at(self, t: int) -> Method:
        return self if t > self.after else self.inner.at(t)

    def _layer(self, params: Params) -> tuple[str, ...]:
        """Names of W [K, d] and, if there is one, of b [K]. Raises InputError for other heads."""
        shapes = {k: tuple(v.shape) for k, v in params.items() if k.startswith(self.head)}
        classes = len(self.shares)
        matrices = [k for k, s in shapes.items() if len(s) == 2 and s[0] == classes]
        biases = [k for k, s in shapes.items() if s == (classes,)]
        one = len(matrices) == 1 and len(biases) < 2 and len(matrices) + len(biases) == len(shapes)
        if not one or self.model.fixed.issuperset(matrices):
            raise InputError(
                f"CCVR fits one linear layer of {classes} outputs anew, whose matrix is trained; "
                f"the parameters of {list(self.head)} are {shapes or 'none'}; name the last linear "
                "layer by Setting(head=...)"
            )
        return (matrices[0], *biases)
