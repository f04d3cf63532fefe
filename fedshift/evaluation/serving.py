"""Serving with local models: clients answer their own queries, or those of all clients.

Shapes: M clients, n pooled test examples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.router.answers import Answers
from fedshift.sketch import sketched
from fedshift.tree import Params

Ties = Literal["smallest", "probability"]


@sketched
@dataclass(frozen=True, eq=False)
class Served:
    """The outputs of every client's model on the test examples of all clients.

    probabilities [M, n, K], labels y [n], origin [n] (the client, 0..M-1, that a test example
    comes from), client_logits [n, M] of the router, or None for a network without a router.
    """

    probabilities: Tensor
    y: Tensor
    origin: Tensor
    client_logits: Tensor | None

    @property
    def labels(self) -> Tensor:
        """The label that each model predicts, [M, n]; the smallest of equally likely ones."""
        return self.probabilities.argmax(2)

    def routed(self, client: Tensor) -> Tensor:
        """The label [n] that a query gets from the model of the client it is sent to.

        client [n]: the client of each query.
        """
        return self.labels[client, torch.arange(len(self.y))]

    def mixed(self, share: Tensor) -> Tensor:
        """The most likely label of a mixture: argmax_y sum_i r_i(x) P_i(y | x).

        share: r [n, M], whose rows sum to 1.
        """
        mixture = torch.einsum("nm,mnk->nk", share.to(self.probabilities.dtype), self.probabilities)
        return mixture.argmax(1)

    def voted(self, ties: Ties = "smallest") -> Tensor:
        """The label that most models predict.

        ties: "smallest" takes the smallest label among the most frequent (chosen: the paper is
        silent, and the authors' torch.mode promises nothing); "probability" the one of largest
        summed probability.
        """
        votes = F.one_hot(self.labels, self.probabilities.shape[2]).sum(0)
        if ties == "smallest":
            return votes.argmax(1)
        if ties != "probability":
            raise InputError(f'ties = "{ties}"; allowed: "smallest", "probability"')
        # Labels with fewer votes cannot win: -1 is below any sum of probabilities.
        tied = votes == votes.amax(1, keepdim=True)
        return self.probabilities.sum(0).masked_fill(~tied, -1.0).argmax(1)


def serve(
    model: Model,
    served: Sequence[tuple[Params, Params]],
    tests: Sequence[Examples],
    *,
    batch: int = 1000,
) -> Served:
    """Run every client's (parameters, buffers) on the pooled tests, in blocks of `batch`.

    The router is taken from the first client's model: it is shared, so all have the same. Raises
    InputError unless there is one test set per client and at least one example.
    """
    if len(served) != len(tests) or not sum(map(len, tests)):
        raise InputError(
            f"{len(served)} models and {len(tests)} test sets with {sum(map(len, tests))} examples;"
            " give one test set per client, not all of them empty"
        )
    x, y = torch.cat([t.x for t in tests]), torch.cat([t.y for t in tests])
    origin = torch.repeat_interleave(
        torch.arange(len(tests)), torch.tensor([len(t) for t in tests])
    )
    groups = by_model(served)
    answers = Answers(model, served[0], {ids[0]: served[ids[0]] for ids in groups})
    parts, client_logits = dict[int, list[Tensor]](), list[Tensor]()
    for block in torch.split(x, batch):
        seen = answers.see(block)
        client_logits += [seen.out["client_logits"]] if "client_logits" in seen.out else []
        for first, *_ in groups:
            with torch.no_grad():
                z = seen.ask(first, slice(None)) if first else seen.out["logits"]
            parts.setdefault(first, []).append(z.softmax(1))
    each = {i: torch.cat(parts[ids[0]]) for ids in groups for i in ids}
    probabilities = torch.stack([each[i] for i in range(len(served))])
    return Served(probabilities, y, origin, torch.cat(client_logits) if client_logits else None)


def by_model(pairs: Sequence[tuple[Params, Params]]) -> list[list[int]]:
    """The indices of the pairs, in groups that hold the same tensors."""
    groups, known = dict[tuple[int, ...], list[int]](), dict[tuple[int, int], tuple[int, ...]]()
    for i, (params, buffers) in enumerate(pairs):
        # By the identities of the tensors: to compare their values could take as long as a pass.
        key = (id(params), id(buffers))
        if key not in known:
            known[key] = tuple(id(v) for v in (*params.values(), *buffers.values()))
        groups.setdefault(known[key], []).append(i)
    return list(groups.values())


def accuracy(given: Tensor, truth: Tensor) -> float:
    """The share of equal entries; given, truth [n]. NaN without entries."""
    return float((given == truth).double().mean())


def own_accuracy(served: Served) -> Tensor:
    """Each client's accuracy on its own test examples, [M] float64; NaN if it has none."""
    right = (served.routed(served.origin) == served.y).double()
    clients = served.probabilities.shape[0]
    hits = torch.bincount(served.origin, weights=right, minlength=clients)
    return hits / torch.bincount(served.origin, minlength=clients)


def average_accuracy(accuracies: Tensor, sizes: Tensor) -> float:
    """sum_i w_i acc_i, w_i = n_i / N over the clients that have test examples.

    accuracies [M] as from `own_accuracy`, sizes n [M] the clients' training examples. Wang et al.
    2026 (FedDRM), arXiv 2509.23049, Section 4: weights are training sizes. With test sets in
    proportion to n it equals the accuracy of sending every query to where it comes from.
    """
    defined = ~accuracies.isnan()
    weights = sizes.double()[defined]
    return float((accuracies[defined] * weights).sum() / weights.sum())


def by_client_and_class(served: Served, classes: int) -> tuple[Tensor, Tensor]:
    """(correct [M, K], total [M, K]) of each client's model on its own examples, by label."""
    clients = served.probabilities.shape[0]
    cell = served.origin * classes + served.y
    right = served.routed(served.origin) == served.y
    total = torch.bincount(cell, minlength=clients * classes)
    correct = torch.bincount(cell[right], minlength=clients * classes)
    return correct.reshape(clients, classes), total.reshape(clients, classes)
