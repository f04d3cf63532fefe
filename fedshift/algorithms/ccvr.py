"""CCVR: after the last round of training the server fits the classifier to virtual features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask
from fedshift.algorithms.defaults import Around
from fedshift.arguments import check_fields, check_positive
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
class Ccvr(Around):
    """Rounds 1, ..., `after` are `inner`'s; in later ones the head is fitted anew by the server.

        client   E_i[1{y = c}], E_i[1{y = c} f], E_i[1{y = c} f f^T] of its features f, [K, d, d]
        server   their means by the cohort's weights a_i: a Gaussian for each label
                 `virtual` features of each label are drawn, and (W, b) <- softmax regression on
                 them, label c counting `shares`_c

    f is what the head is given, by the model received, in evaluation mode. Labels that no client of
    the cohort has are left out, and shares made to sum to 1 without them; where none is left, the
    head stays. Only sums over clients are used.

    shares   [K]: 1/K each as in the paper, or the target's, for which the head then is right
    ridge    of the regression, `fedshift.server.virtual.refitted`
    head     name prefixes of the last linear layer

    Luo et al. 2021, "No fear of heterogeneity: classifier calibration for federated learning with
    non-IID data" (CCVR), arXiv 2106.05001. Ours: shares in place of as many draws of each label,
    the regression to its minimum, a covariance divided by n. Raises InputError for settings out of
    range, and before round 1 for a model without "features", or whose head is no linear layer.
    """

    inner: Algorithm
    after: int
    shares: tuple[float, ...]
    virtual: int = 500
    ridge: float = 1e-3
    head: tuple[str, ...] = ("head.",)

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive("CCVR's ridge", self.ridge)
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
        self._layer(params)
        return server

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        check_features(self.model, self.head, params, buffers, data)
        return self.inner.init_client(params, buffers, data)

    def phases(self) -> Mapping[str, Local]:
        return {"statistics": WHOLE}

    def trains(self, weights: Tensor) -> Tensor:
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
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
        if not shares.sum() > 0:
            return {}
        old = server["params"]
        names = self._layer(old)
        fixed = None
        if not set(names[1:]) - self.model.fixed:  # none, or one that stays as it is
            fixed = old[names[1]] if names[1:] else torch.zeros(len(shares))
        virtual = drawn(*gaussians(**moments), self.virtual, seed)
        fitted = refitted(virtual, shares / shares.sum(), self.ridge, fixed)
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
        """Its Gaussians are of classes."""
        return True

    def most_sent(self, params: Params) -> int:
        """The moments: K (1 + d + d^2) numbers of 8 bytes."""
        classes, width = params[self._layer(params)[0]].shape
        inner = ask(self.inner, Capabilities.most_sent, params)
        return max(8 * classes * (1 + width + width**2), inner)

    def moves_server(self) -> bool:
        """It does not: clients reply with statistics, and not with a change of the model."""
        return False

    def trained_model(self) -> Model | None:
        """None: in these rounds no client trains."""
        return None

    def at(self, t: int) -> Algorithm:
        return self if t > self.after else self.inner.at(t)

    def _layer(self, params: Params) -> tuple[str, ...]:
        """The names of W [K, d] and, if there is one, of b [K]. InputError for another head."""
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
