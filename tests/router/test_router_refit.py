"""Refits of the client head: equal to pooled fits, from sums alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from torch import Tensor

from fedshift.data import ClientData
from fedshift.errors import TrainingError
from fedshift.router.moments import moments, pooled
from fedshift.router.parts import origin_sums
from fedshift.router.route import Router
from fedshift.router.score import ClientHead
from support.federations import SIZES, make_clients
from support.routing import drawn, refit_locally

SAMPLES = tuple(drawn((n, 3), seed=n) + torch.tensor([m, 0.0, -m]) for n, m in
                ((40, 0.0), (25, 1.0), (60, -0.7), (10, 0.4)))  # fmt: skip


def pooled_fit(samples: tuple[Tensor, ...], penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """The multinomial logistic fit on all examples at once, by BFGS with numpy alone."""
    h = np.concatenate([s.numpy() for s in samples])
    who = np.repeat(np.arange(len(samples)), [len(s) for s in samples])
    shape = (len(samples), h.shape[1] + 1)

    def loss(v: np.ndarray) -> tuple[float, np.ndarray]:
        w = v.reshape(shape)
        logs = log_softmax(w[:, 0] + h @ w[:, 1:].T, axis=1)
        slope = np.exp(logs)
        slope[np.arange(len(h)), who] -= 1
        grad = np.column_stack([slope.sum(0), slope.T @ h]) / len(h)
        grad[:, 1:] += 2 * penalty * w[:, 1:]
        value = -logs[np.arange(len(h)), who].mean() + penalty * (w[:, 1:] ** 2).sum()
        return value, grad.ravel()

    solution = minimize(
        loss, np.zeros(shape).ravel(), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    w = solution.x.reshape(shape)
    return w[:, 0] - w[:, 0].mean(), w[:, 1:]


@pytest.mark.parametrize("penalty", [1e-4, 1e-1])
def test_the_refit_is_the_pooled_fit(penalty: float) -> None:
    refit = refit_locally(SAMPLES, penalty=penalty, tolerance=1e-10)
    gamma, xi = pooled_fit(SAMPLES, penalty)
    assert np.abs(refit.head.gamma.numpy() - gamma).max() < 1e-6
    assert np.abs(refit.head.xi.numpy() - xi).max() < 1e-6
    assert refit.gradient < 1e-8
    assert refit.rounds < 90  # some 60; the last ones hang on rounding
    other = refit_locally(SAMPLES, penalty=3 * penalty).head.xi.numpy()
    assert np.abs(other - xi).max() > 1e-4


def test_a_refit_costs_the_same_in_any_coordinates() -> None:
    """Without penalty the fit does not change with h -> A h + b, and nor does its search.

    A has condition 10^4: features that hardly vary and nearly repeat one another.
    """
    e, factor = 12, 10.0 ** torch.linspace(0, -4, 12).double()
    means = drawn((3, e), 1) * 0.5
    plain = [drawn((300, e), 2 + i) + m for i, m in enumerate(means)]
    axes = torch.linalg.qr(drawn((e, e), 7)).Q
    tilted = [(h * factor) @ axes.T + 3.0 for h in plain]
    one, two = (refit_locally(h, penalty=0.0) for h in (plain, tilted))
    assert one.rounds < 60
    assert abs(two.rounds - one.rounds) <= 10
    logits, meant = two.head(torch.cat(tilted)), one.head(torch.cat(plain))
    assert float((logits.softmax(1) - meant.softmax(1)).abs().max()) < 1e-4
    penalised = refit_locally(tilted, penalty=1e-2).head(torch.cat(tilted))
    assert float((penalised.softmax(1) - meant.softmax(1)).abs().max()) > 0.1


def test_a_penalty_that_outweighs_what_hardly_varies_costs_no_rounds() -> None:
    """Features of a barely trained network: some vary 1000 times less than others, some never."""
    scale = torch.tensor([1.0, 0.3, 1e-2, 1e-3, 0.0, 1.0]).double()
    means = drawn((4, 6), 3)
    h = [(drawn((200, 6), i) + m) * scale + 1.0 for i, m in enumerate(means)]
    h = [torch.cat([v, v[:, :1] + 1e-3 * v[:, 5:]], 1) for v in h]
    refit = refit_locally(h)
    assert refit.rounds < 40
    _, xi = pooled_fit(tuple(h), 1e-4)
    assert np.abs(refit.head.xi.numpy() - xi).max() < 1e-3
    assert float(refit.head.xi[:, 4].abs().max()) == pytest.approx(0.0, abs=1e-9)


def test_free_intercepts_give_every_client_its_number() -> None:
    """sum_ij softmax_l(x_ij) = n_l, at any penalty."""
    head = refit_locally(SAMPLES, penalty=1e-2, tolerance=1e-9).head
    totals = head(torch.cat(SAMPLES)).softmax(1).sum(0)
    counts = torch.tensor([float(len(s)) for s in SAMPLES]).double()
    assert float((totals - counts).abs().max()) < 1e-5
    off = replace(head, gamma=head.gamma * 0.9)
    assert float((off(torch.cat(SAMPLES)).softmax(1).sum(0) - counts).abs().max()) > 0.1


def test_what_clients_send_is_a_gradient() -> None:
    head = ClientHead(drawn((4,)), drawn((4, 3), 1))
    gamma, xi = (v.clone().requires_grad_() for v in (head.gamma, head.xi))
    z = gamma + SAMPLES[1] @ xi.T
    loss = torch.nn.functional.cross_entropy(z, torch.ones(25).long(), reduction="sum")
    by_autograd = torch.autograd.grad(loss, (gamma, xi))
    sent = origin_sums(head, SAMPLES[1], 1)
    assert float(sent.loss - loss.detach()) == pytest.approx(0, abs=1e-10)
    assert torch.allclose(sent.gamma, by_autograd[0], rtol=0, atol=1e-10)
    assert torch.allclose(sent.xi, by_autograd[1], rtol=0, atol=1e-10)
    assert not torch.allclose(origin_sums(head, SAMPLES[1], 2).gamma, sent.gamma, atol=1e-2)


def test_a_client_without_examples_is_never_chosen() -> None:
    """The others' fit is the same as without it."""
    empty = (SAMPLES[0], SAMPLES[0][:0], *SAMPLES[1:])
    with_empty, less = (refit_locally(s, tolerance=1e-10).head for s in (empty, SAMPLES))
    others = [0, 2, 3, 4]
    assert float(with_empty.gamma[1]) == -float("inf")
    assert torch.allclose(with_empty.gamma[others], less.gamma, rtol=0, atol=1e-6)
    assert torch.allclose(with_empty.xi[others], less.xi, rtol=0, atol=1e-6)
    head = pooled([moments(h) for h in empty]).head()
    assert float(head(SAMPLES[0]).softmax(1)[:, 1].max()) == 0
    same = pooled([moments(h) for h in SAMPLES]).head()
    assert torch.allclose(head.xi[others], same.xi, rtol=0, atol=1e-10)


def test_a_refit_that_does_not_end_says_so() -> None:
    with pytest.raises(TrainingError, match="stands at gradient .* after .* rounds; give more"):
        refit_locally(SAMPLES, rounds=2)


@pytest.mark.slow
def test_a_refit_lowers_the_loss_of_the_origin(router: Router) -> None:
    """At penalty 0 it is the smallest that any head on these features has."""
    clients = make_clients()

    def loss(r: Router) -> float:
        logs = [-r.scores(c.x).log_softmax(1)[:, i].sum() for i, c in enumerate(clients)]
        return float(sum(logs)) / sum(SIZES)

    best = loss(router.refitted(clients, penalty=1e-6))
    assert best < loss(router) - 1e-2
    assert best < loss(router.from_moments(clients))
    assert loss(router.from_moments(clients)) != loss(router)


@pytest.mark.slow
def test_padding_is_not_part_of_a_refit(router: Router) -> None:
    clients = make_clients()
    long = tuple(
        ClientData(
            torch.cat([c.x, torch.full((5, 8), 1e3)]),
            torch.cat([c.y, torch.zeros(5).long()]),
            torch.cat([c.w, torch.zeros(5)]),
            c.id,
        )
        for c in clients
    )
    for one, two in ((router.refitted(clients), router.refitted(long)),
                     (router.from_moments(clients), router.from_moments(long))):  # fmt: skip
        assert one.head is not None
        assert two.head is not None
        assert float((one.head.xi - two.head.xi).abs().max()) < 1e-5
        assert torch.equal(one.sizes, two.sizes)


@pytest.mark.slow
def test_a_refit_on_other_counts_brings_its_own_sizes(router: Router) -> None:
    """The head's intercepts hold log n of the data it was fitted to; the prior must match."""
    some = tuple(c._replace(x=c.x[: 2 + i], y=c.y[: 2 + i], w=c.w[: 2 + i])
                   for i, c in enumerate(make_clients()))  # fmt: skip
    assert router.refitted(some).sizes.tolist() == [2, 3, 4, 5, 6, 7]
    assert router.without(2).from_moments(some).sizes.tolist() == [2, 3, 0, 5, 6, 7]
    assert router.with_moments(some).sizes.tolist() == list(SIZES)


def test_moments_give_linear_discriminant_analysis() -> None:
    """xi = S^-1 mu, gamma = -mu' S^-1 mu / 2 + log n/N, S with 1 % of its mean variance added."""
    summed = pooled([moments(h) for h in SAMPLES])
    head = summed.head()
    parts = [s.numpy() for s in SAMPLES]
    within = sum((p - p.mean(0)).T @ (p - p.mean(0)) for p in parts) / sum(map(len, parts))
    loaded = within + 0.01 * np.trace(within) / 3 * np.eye(3)
    for i, p in enumerate(parts):
        xi = np.linalg.solve(loaded, p.mean(0))
        gamma = -0.5 * p.mean(0) @ xi + np.log(len(p) / 135)
        assert np.abs(head.xi[i].numpy() - xi).max() < 1e-10
        assert float(head.gamma[i]) == pytest.approx(gamma, abs=1e-10)
    h = drawn((7, 3), 5)
    gaps = [[(v - p.mean(0)) @ np.linalg.solve(loaded, v - p.mean(0)) for p in parts]
            for v in h.numpy()]  # fmt: skip
    assert np.abs(summed.novelty(h).numpy() - np.min(gaps, axis=1)).max() < 1e-9
    plain = pooled([moments(h) for h in SAMPLES], loading=0.0).head()
    assert float((plain.xi - head.xi).abs().max()) > 1e-4


def test_gaussian_clients_of_one_covariance_are_recovered() -> None:
    """Then linear discriminant analysis is Bayes' rule, and the refit estimates the same."""
    factor = torch.tensor([[1.0, 0.0], [0.6, 0.5]]).double()
    means = torch.tensor([[0.0, 0.0], [1.0, -0.5]]).double()
    sizes = (30_000, 20_000)
    h = [m + drawn((n, 2), seed=n) @ factor.T for m, n in zip(means, sizes, strict=True)]
    true = torch.linalg.solve(factor @ factor.T, means[1] - means[0])
    for head in (pooled([moments(v) for v in h], 0.0).head(), refit_locally(h, penalty=0.0).head):
        assert float((head.xi[1] - head.xi[0] - true).abs().max()) < 0.1
    loaded = pooled([moments(v) for v in h], 1.0).head()
    assert float((loaded.xi[1] - loaded.xi[0] - true).abs().max()) > 0.3


def test_a_duplicated_client_splits_its_mass() -> None:
    """Each half gets half, the others keep what they had; for moments and for the refit."""
    twice = torch.cat([SAMPLES[1], SAMPLES[1]])
    one = (SAMPLES[0], twice, SAMPLES[2])
    two = (SAMPLES[0], SAMPLES[1], SAMPLES[1], SAMPLES[2])
    h = drawn((9, 3), 8)
    fits = (
        lambda v: pooled([moments(x) for x in v]).head(),
        lambda v: refit_locally(v, penalty=0.0, tolerance=1e-10).head,
    )
    for fit, tolerance in zip(fits, (1e-10, 1e-6), strict=True):
        whole, halves = fit(one)(h).softmax(1), fit(two)(h).softmax(1)
        assert float((halves[:, 1] - whole[:, 1] / 2).abs().max()) < tolerance
        assert float((halves[:, 1] - halves[:, 2]).abs().max()) < tolerance
        assert float((halves[:, [0, 3]] - whole[:, [0, 2]]).abs().max()) < tolerance
