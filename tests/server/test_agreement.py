"""Disagreement of one classifier with several: losses, their zeros and gradients there."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedshift.server.agreement import disagreement, kl, mse, pairwise, restricted, seen_by
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
            if kind == "kl":
                mass = sum(float(q[b, y]) for _, y in slots)
                terms = [
                    float(p[k, b, s]) * math.log(float(p[k, b, s]) / float(q[b, y]) * mass)
                    for s, y in slots
                ]
            elif kind == "mse":
                terms = [float(p[k, b, s] - q[b, y]) ** 2 for s, y in slots]
            else:
                terms = [
                    float(p[k, b, s] * q[b, v] - p[k, b, r] * q[b, y]) ** 2
                    for s, y in slots
                    for r, v in slots
                ]
            total += float(WEIGHTS[k]) * sum(terms) / q.shape[0]
    return total


def compared_form(kind: str, z: Tensor) -> Tensor:
    """The form of logits z [7, 5] that a loss compares with the clients' answers."""
    return restricted(z, LABELS) if kind == "kl" else seen_by(z.softmax(1), LABELS)


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_the_losses_are_their_definitions(kind: Any) -> None:
    """The pairwise one by its identity, 2 (||p||^2 ||q||^2 - (p . q)^2), against both loops."""
    p, z = opinions(), drawn(7, 5, seed=2)
    q = z.softmax(1)
    loss = float(disagreement(kind, p, compared_form(kind, z), WEIGHTS))
    assert abs(loss - by_loops(kind, p, q)) < 1e-15
    assert abs(loss - by_loops(kind, opinions(seed=3), q)) > 1e-4
    other = "pairwise" if kind == "mse" else "mse"
    assert abs(loss - by_loops(other, p, q)) > 1e-2


def restriction(q: Tensor) -> Tensor:
    """h(y|x) / h(Y_k|x): subset consistency, what clients of one true h would say."""
    on_labels = seen_by(q, LABELS)
    return on_labels / on_labels.sum(2, keepdim=True)


def test_where_the_losses_are_zero() -> None:
    """Pairwise: at restrictions. MSE: only at equal models. And both trivial cases of the pair."""
    q = drawn(7, 5, seed=2).softmax(1)
    on_labels = seen_by(q, LABELS)
    assert abs(float(pairwise(restriction(q), on_labels, WEIGHTS))) < 1e-15
    assert float(mse(restriction(q), on_labels, WEIGHTS)) > 1e-2
    everything = torch.arange(5).expand(3, -1)
    assert float(mse(q.expand(3, -1, -1), seen_by(q, everything), WEIGHTS)) == 0
    assert abs(float(pairwise(q.expand(3, -1, -1), seen_by(q, everything), WEIGHTS))) < 1e-15
    # Trivial: all mass on labels that a client does not know; a single label is a pair of none.
    assert float(pairwise(opinions(), torch.zeros(3, 7, 3).double(), WEIGHTS)) == 0
    assert float(mse(opinions(), torch.zeros(3, 7, 3).double(), WEIGHTS)) > 0.3
    alone = torch.tensor([0.0, 0.0, 1.0]).double()
    assert abs(float(pairwise(opinions(), on_labels, alone))) < 1e-15


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


# --------------------------------------------------------------------------- restricted KL


def shares(z: Tensor, labels: Tensor) -> Tensor:
    """h|k (y|x) of logits z [B, K]: the softmax of Y_k alone, 0 where the label is -1."""
    return restricted(z, labels).exp().masked_fill((labels < 0)[:, None], 0)


def test_the_gradient_of_restricted_kl_is_the_difference_on_each_clients_labels() -> None:
    """(1/B) sum_k w_k (h|k - h_k) in the logits of Y_k: by autograd and by finite differences."""
    z, p = drawn(7, 5, seed=2).requires_grad_(), opinions()
    (grad,) = torch.autograd.grad(kl(p, restricted(z, LABELS), WEIGHTS), z)
    want, differences = torch.zeros(7, 5).double(), shares(z.detach(), LABELS) - p
    for k, labels in enumerate(LABELS.tolist()):
        for s, y in enumerate(labels):
            if y >= 0:
                want[:, y] += WEIGHTS[k] * differences[k, :, s] / 7
    assert float((grad - want).abs().max()) < 1e-16
    step, numeric = 1e-6, torch.zeros(7, 5).double()
    for b in range(7):
        for y in range(5):
            up, down = z.detach().clone(), z.detach().clone()
            up[b, y] += step
            down[b, y] -= step
            ends = [kl(p, restricted(v, LABELS), WEIGHTS) for v in (up, down)]
            numeric[b, y] = (ends[0] - ends[1]) / (2 * step)
    assert float((grad - numeric).abs().max()) < 1e-9
    assert float(grad.abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["mse", "pairwise", "kl"])
def test_absent_labels_get_no_gradient_from_restricted_kl_alone(kind: Any) -> None:
    labels = torch.tensor([[0, 3, -1], [4, 0, 3], [3, -1, -1]])  # no client has 1 or 2
    z = drawn(7, 5, seed=2).requires_grad_()
    p = drawn(3, 7, 3, seed=1).masked_fill((labels < 0)[:, None], -torch.inf).softmax(2)
    q = restricted(z, labels) if kind == "kl" else seen_by(z.softmax(1), labels)
    (grad,) = torch.autograd.grad(disagreement(kind, p, q, WEIGHTS), z)
    assert (float(grad[:, [1, 2]].abs().max()) == 0) == (kind == "kl")
    assert float(grad[:, [0, 3, 4]].abs().min()) > 0


@pytest.mark.slow
def test_the_truth_is_the_fixed_point_of_restricted_kl() -> None:
    """Perfect clients, label sets in a chain 0-1-2-3-4: the truth is the one minimum; else not."""
    truth, start = drawn(6, 5, seed=2), drawn(6, 5, seed=3)
    chain = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]])
    apart = torch.tensor([[0, 1], [1, 2], [3, 4]])  # two parts: no client knows their masses
    for labels, connected in ((chain, True), (apart, False)):
        p, w = shares(truth, labels), torch.full((len(labels),), 0.25).double()
        at = truth.clone().requires_grad_()
        (grad,) = torch.autograd.grad(kl(p, restricted(at, labels), w), at)
        assert float(grad.abs().max()) < 1e-16
        z = start.clone()
        for _ in range(3000):
            z.requires_grad_()
            (grad,) = torch.autograd.grad(kl(p, restricted(z, labels), w), z)
            z = z.detach() - 40 * grad
        assert float(kl(p, restricted(z, labels), w)) < 1e-12
        gap = float((z.softmax(1) - truth.softmax(1)).abs().max())
        assert (gap < 1e-6) == connected


def test_where_all_know_all_labels_it_is_the_public_kl() -> None:
    everything = torch.arange(5).expand(3, -1)
    p, z = drawn(3, 7, 5, seed=1).softmax(2), drawn(7, 5, seed=2)
    terms = (p * (p.log() - z.log_softmax(1))).sum(2).mean(1)
    loss = kl(p, restricted(z, everything), WEIGHTS)
    assert abs(float(loss - (WEIGHTS * terms).sum())) < 1e-15
    fewer = kl(p[:, :, :4], restricted(z, everything[:, :4]), WEIGHTS)
    assert abs(float(fewer - loss)) > 1e-2


def test_labels_and_clients_that_say_nothing_to_restricted_kl() -> None:
    """One label alone, one client without any, and certainty: no term, and no NaN."""
    labels = torch.tensor([[2, -1, -1], [-1, -1, -1], [0, 1, 3]])
    p = torch.tensor([[1.0, 0, 0], [0.2, 0.3, 0.5], [1.0, 0, 0]])[:, None].double()
    z, w = drawn(1, 5, seed=2).requires_grad_(), torch.tensor([0.5, 0.0, 0.5]).double()
    loss = kl(p, restricted(z, labels), w)
    (grad,) = torch.autograd.grad(loss, z)
    surprise = -z.detach()[:, [0, 1, 3]].log_softmax(1)[0, 0]
    assert float(loss.detach()) == pytest.approx(0.5 * float(surprise))
    assert bool(torch.isfinite(grad).all())
    assert grad[0, [2, 4]].tolist() == [0, 0]
