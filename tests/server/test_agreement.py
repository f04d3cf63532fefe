"""How far one classifier is from several: the two losses, their zeros and their gradients there."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedshift.server.agreement import disagreement, mse, pairwise, seen_by
from support.normals import drawn

LABELS = torch.tensor([[0, 3, -1], [4, 1, 2], [2, -1, -1]])
WEIGHTS = torch.tensor([0.5, 0.3, 0.2]).double()


def opinions(seed: int = 1) -> Tensor:
    """Clients' probabilities [3, 7, 3] over LABELS."""
    z = drawn(3, 7, 3, seed=seed).masked_fill((LABELS < 0)[:, None], -torch.inf)
    return z.softmax(2)


def by_loops(kind: str, p: Tensor, q: Tensor) -> float:
    """The definitions, label by label and pair by pair; q [7, 5] over all labels."""
    total = 0.0
    for k, labels in enumerate(LABELS.tolist()):
        slots = [(s, y) for s, y in enumerate(labels) if y >= 0]
        for b in range(q.shape[0]):
            if kind == "mse":
                terms = [(p[k, b, s] - q[b, y]) ** 2 for s, y in slots]
            else:
                terms = [
                    (p[k, b, s] * q[b, v] - p[k, b, r] * q[b, y]) ** 2
                    for s, y in slots
                    for r, v in slots
                ]
            total += float(WEIGHTS[k]) * float(sum(terms)) / q.shape[0]
    return total


@pytest.mark.parametrize("kind", ["mse", "pairwise"])
def test_the_losses_are_their_definitions(kind: Any) -> None:
    """The pairwise one by its identity, 2 (||p||^2 ||q||^2 - (p . q)^2), against both loops."""
    p, q = opinions(), drawn(7, 5, seed=2).softmax(1)
    found = float(disagreement(kind, p, seen_by(q, LABELS), WEIGHTS))
    assert abs(found - by_loops(kind, p, q)) < 1e-15
    assert abs(found - by_loops(kind, opinions(seed=3), q)) > 1e-4
    other = "pairwise" if kind == "mse" else "mse"
    assert abs(found - by_loops(other, p, q)) > 1e-2


def restriction(q: Tensor) -> Tensor:
    """h(y|x) / h(Y_k|x): subset consistency, what clients of one true h would say."""
    seen = seen_by(q, LABELS)
    return seen / seen.sum(2, keepdim=True)


def test_where_the_losses_are_zero() -> None:
    """Pairwise: at restrictions. MSE: only at equal models. And both trivial cases of the pair."""
    q = drawn(7, 5, seed=2).softmax(1)
    seen = seen_by(q, LABELS)
    assert abs(float(pairwise(restriction(q), seen, WEIGHTS))) < 1e-15
    assert float(mse(restriction(q), seen, WEIGHTS)) > 1e-2
    everything = torch.arange(5).expand(3, -1)
    assert float(mse(q.expand(3, -1, -1), seen_by(q, everything), WEIGHTS)) == 0
    assert abs(float(pairwise(q.expand(3, -1, -1), seen_by(q, everything), WEIGHTS))) < 1e-15
    # Trivial: all mass on labels that a client does not know; a single label is a pair of none.
    assert float(pairwise(opinions(), torch.zeros(3, 7, 3).double(), WEIGHTS)) == 0
    assert float(mse(opinions(), torch.zeros(3, 7, 3).double(), WEIGHTS)) > 0.3
    alone = torch.tensor([0.0, 0.0, 1.0]).double()
    assert abs(float(pairwise(opinions(), seen, alone))) < 1e-15


def test_mse_is_biased_at_the_truth_and_pairwise_is_not() -> None:
    """At subset consistency MSE pulls h(Y_k|x) up; the pairwise loss has no gradient there."""
    z = drawn(7, 5, seed=2).requires_grad_()
    p = restriction(z.detach().softmax(1))
    for loss, low, high in ((pairwise, 0.0, 1e-15), (mse, 1e-3, 1.0)):
        (grad,) = torch.autograd.grad(loss(p, seen_by(z.softmax(1), LABELS), WEIGHTS), z)
        assert low <= float(grad.abs().max()) <= high
    only = torch.tensor([1.0, 0.0, 0.0]).double()  # client 0, of labels 0 and 3
    (grad,) = torch.autograd.grad(mse(p, seen_by(z.softmax(1), LABELS), only), z)
    assert bool((grad[:, [1, 2, 4]] > 0).all())  # a step lowers what is outside Y_k


def test_a_label_of_few_holders_can_take_all_without_pairwise_loss() -> None:
    """h(a|x) = 1 has loss 0 if all holders of a are sure of it; else not, and never for MSE."""
    labels = torch.tensor([[0, 1], [2, 3], [2, 4]])
    sure = torch.tensor([[[1.0, 0.0]], [[0.3, 0.7]], [[0.9, 0.1]]])  # client 0 holds 0, alone
    winner = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    weights = torch.full((3,), 1 / 3)

    def loss(kind: Literal["mse", "pairwise"], p: Tensor) -> float:
        return float(disagreement(kind, p, seen_by(winner, labels), weights))

    assert loss("pairwise", sure) == 0.0
    assert loss("mse", sure) > 0.1
    unsure = sure.clone()
    unsure[0] = torch.tensor([[0.5, 0.5]])
    assert loss("pairwise", unsure) > 0.1
