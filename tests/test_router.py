"""Scores, routing, refits: one formula for all priors, and fits that equal pooled ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import final
from conftest import SIZES, make_clients
from routing import draw_gaussians, gaussian, routed_federation, routed_model, routed_setting
from scipy.optimize import minimize
from scipy.special import log_softmax
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.fedavg import FedAvg
from fedshift.client.sharing import Share
from fedshift.data import ClientData
from fedshift.errors import InputError, TrainingError
from fedshift.router.head import ClientHead
from fedshift.router.moments import moments, pooled
from fedshift.router.quality import threshold
from fedshift.router.refit import origin_sums, refit_locally
from fedshift.router.route import ABSTAIN, Router
from fedshift.router.score import estimate_prior, posterior, scores

N = len(SIZES)
MODEL = routed_model()
ALGORITHM = recipes.feddrm(routed_setting(MODEL))


@pytest.fixture(scope="module")
def router() -> Router:
    played = final(ALGORITHM, routed_federation(MODEL), 4)
    return Router.of(ALGORITHM, played.server, played.states)


@pytest.fixture(scope="module")
def queries() -> Tensor:
    return torch.cat([c.x for c in make_clients(seed=9)])


def answers(router: Router, x: Tensor) -> Tensor:
    """Every client's class probabilities, one full pass each: [N, B, K]."""
    models = [router.served[i] for i in router.clients]
    return torch.stack([router.model(*m, x)["logits"].double().softmax(1) for m in models])


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------------- scores


def test_the_score_is_the_formula() -> None:
    z, n = drawn((20, 3)), torch.tensor([10.0, 30, 60]).double()
    q, mu = torch.tensor([0.5, 0.2, 0.3]).double(), torch.tensor([0.0, 1.0, -2.0]).double()
    by_hand = z - (n / 100).log() + q.log() - mu
    assert torch.allclose(scores(z, n, q, mu), by_hand, rtol=0, atol=1e-14)
    assert torch.equal(scores(z, n), z)
    density = z - (n / 100).log() - np.log(3)
    assert torch.allclose(scores(z, n, "density"), density, rtol=0, atol=1e-14)
    assert scores(z.float(), n).dtype == torch.float64


def test_another_prior_is_bayes_rule_for_it() -> None:
    """Two Gaussians: from exact logits at the sizes' prior, the posterior under any other one."""
    x = torch.linspace(-3, 3, 31, dtype=torch.float64)
    logs = torch.stack([gaussian(x, -0.5, 1.0), gaussian(x, 1.0, 0.7)], 1)
    n, q = torch.tensor([900.0, 100]).double(), torch.tensor([0.25, 0.75]).double()
    z = logs + (n / 1000).log() + 5 * x[:, None]  # what both share is not identified
    true = (logs.exp() * q) / (logs.exp() * q).sum(1, keepdim=True)
    assert torch.allclose(posterior(z, n, q), true, rtol=0, atol=1e-12)
    assert float((posterior(z, n) - true).abs().max()) > 0.3


def test_the_mix_of_unlabelled_queries_is_found() -> None:
    """Exact posteriors, queries from q = (0.15, 0.6, 0.25); and the optimum's conditions hold."""
    q, n = (0.15, 0.6, 0.25), torch.tensor([500.0, 300, 200]).double()
    means = (-1.5, 0.0, 2.0)
    x = torch.cat(draw_gaussians(means, (1.0,) * 3, [int(20_000 * p) for p in q], seed=2))
    z = torch.stack([gaussian(x, m, 1.0) for m in means], 1) + (n / 1000).log()
    found = estimate_prior(z, n)
    assert float((found - torch.tensor(q)).abs().max()) < 0.015
    ratio = posterior(z, n) / (n / n.sum())
    # Karush-Kuhn-Tucker for a maximum over the simplex: mean of r_i / (w_i mix) is 1 inside.
    gradient = (ratio / (ratio @ found)[:, None]).mean(0)
    assert float((gradient - 1).abs().max()) < 1e-6
    stopped = estimate_prior(z, n, steps=3)
    assert float(((ratio / (ratio @ stopped)[:, None]).mean(0) - 1).abs().max()) > 1e-3


def test_a_client_without_queries_gets_no_mass() -> None:
    n = torch.tensor([100.0, 0, 100, 100])
    x = torch.cat(draw_gaussians((-4.0, 4.0), (0.5, 0.5), (200, 200)))
    logs = [gaussian(x, m, 0.5) for m in (-4.0, 9.0, 0.0, 4.0)]
    found = estimate_prior(torch.stack(logs, 1), n)
    assert torch.allclose(found, torch.tensor([0.5, 0, 0, 0.5]).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ("uniform", 'unknown prior "uniform"; allowed: density, posterior'),
        (torch.tensor([0.5, 0.5]), r"a prior of shape \(2,\) for 3 clients"),
        (torch.tensor([0.5, 0.5, 0.5]), r"sum to 1, got \[0.5, 0.5, 0.5\]"),
        (torch.tensor([0.0, 0.0, 1.0]), r"give mass to one of \[0, 1\]"),
    ],
)
def test_wrong_priors_are_refused(prior: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scores(drawn((4, 3)), torch.tensor([1.0, 1.0, 0.0]), prior)


def test_wrong_sizes_and_prices_are_refused() -> None:
    z = drawn((4, 3))
    with pytest.raises(InputError, match=r"client logits \(4, 3\) for sizes \(2,\)"):
        scores(z, torch.ones(2))
    with pytest.raises(InputError, match=r"not all 0, got \[0, 0, 0\]"):
        scores(z, torch.zeros(3))
    with pytest.raises(InputError, match=r"prices must be 3 finite numbers, got \[inf, 0, 0\]"):
        scores(z, torch.ones(3), prices=torch.tensor([float("inf"), 0.0, 0.0]))
    with pytest.raises(InputError, match="no queries to estimate a prior from"):
        estimate_prior(z[:0], torch.ones(3))


# ------------------------------------------------------------------------------------------ routing


def test_the_best_clients_come_first(router: Router, queries: Tensor) -> None:
    clients, probabilities = router.route(queries, k=3)
    r = router.scores(queries).softmax(1)
    assert clients.shape == probabilities.shape == (len(queries), 3)
    assert torch.equal(probabilities, r.gather(1, clients))
    assert torch.equal(probabilities, r.sort(1, descending=True).values[:, :3])
    assert torch.equal(router.route(queries).clients[:, 0], clients[:, 0])
    z = MODEL(*router.shared, queries)["client_logits"]
    assert torch.equal(clients[:, 0], z.argmax(1))


def test_hard_is_the_best_client_alone(router: Router, queries: Tensor) -> None:
    every = answers(router, queries)
    who = router.route(queries).clients[:, 0]
    own = every[who, torch.arange(len(queries))]
    for mode in ("hard", 1):
        assert float((router.predict(queries, mode) - own).abs().max()) < 1e-6
    assert float((router.predict(queries, 2) - own).abs().max()) > 1e-2


def test_the_mixture_is_bayes_rule(router: Router, queries: Tensor) -> None:
    """P(y | x) = sum_i r_i P_i(y | x); over k clients with r renormalised."""
    every, r = answers(router, queries), router.scores(queries).softmax(1)
    mixed = torch.einsum("bn,nbk->bk", r, every)
    assert float((router.predict(queries, "mixture") - mixed).abs().max()) < 1e-6
    kept = torch.where(r >= r.sort(1, descending=True).values[:, 1:2], r, 0.0)
    two = torch.einsum("bn,nbk->bk", kept / kept.sum(1, keepdim=True), every)
    assert float((router.predict(queries, 2) - two).abs().max()) < 1e-6
    assert float((mixed - two).abs().max()) > 1e-3


def test_all_of_equal_clients_is_any_of_them(router: Router, queries: Tensor) -> None:
    one = router.served[2]
    equal = replace(router, served=dict.fromkeys(range(N), one))
    own = MODEL(*one, queries)["logits"].double().softmax(1)
    assert float((equal.predict(queries, "mixture") - own).abs().max()) < 1e-6
    assert float((router.predict(queries, "mixture") - own).abs().max()) > 1e-2


def test_prices_move_the_choice_and_not_the_probabilities(router: Router, queries: Tensor) -> None:
    plain = router.route(queries, k=N)
    busiest = int(plain.clients[:, 0].mode().values)
    prices = torch.zeros(N)
    prices[busiest] = 50.0
    priced = router.route(queries, k=N, prices=prices)
    assert set(priced.clients[:, -1].tolist()) == {busiest}
    one = torch.zeros(len(queries), N).double().scatter(1, plain.clients, plain.probabilities)
    two = torch.zeros(len(queries), N).double().scatter(1, priced.clients, priced.probabilities)
    assert torch.equal(one, two)
    assert torch.equal(router.route(queries, prices=torch.full((N,), 3.0)).clients[:, 0],
                       plain.clients[:, 0])  # fmt: skip
    others = replace(router, sizes=router.sizes.index_fill(0, torch.tensor(busiest), 0.0))
    gone = others.predict(queries) - router.predict(queries, prices=prices)
    assert float(gone.abs().max()) < 1e-12


def test_nothing_is_refused_at_coverage_1(router: Router, queries: Tensor) -> None:
    clients = make_clients()
    known = router.with_moments(clients)
    plain = router.route(queries, k=2)
    open_ = known.route(queries, k=2, min_posterior=0.0, max_novelty=float("inf"))
    assert torch.equal(plain.clients, open_.clients)
    assert torch.equal(plain.probabilities, open_.probabilities)


def test_ambiguous_and_new_queries_are_refused(router: Router, queries: Tensor) -> None:
    known = router.with_moments(make_clients())
    plain = router.route(queries, k=2)
    middle = float(plain.probabilities[:, 0].median())
    strict = known.route(queries, k=2, min_posterior=middle)
    unsure = plain.probabilities[:, 0] < middle
    assert 0 < int(unsure.sum()) < len(queries)
    assert bool((strict.clients[unsure] == ABSTAIN).all())
    assert torch.equal(strict.clients[~unsure], plain.clients[~unsure])
    assert torch.equal(strict.probabilities, plain.probabilities)
    far = known.novelty(queries)
    limit = -threshold(-far, 0.7)
    near = known.route(queries, max_novelty=limit).clients[:, 0]
    assert torch.equal(near == ABSTAIN, far > limit)
    assert torch.equal(near[far <= limit], plain.clients[far <= limit, 0])
    assert 0.2 < float((near == ABSTAIN).double().mean()) <= 0.3


def test_a_client_that_has_left_changes_no_odds(router: Router, queries: Tensor) -> None:
    gone = router.without(3)
    assert gone.clients == [0, 1, 2, 4, 5]
    assert 3 not in gone.route(queries, k=5).clients
    full, less = (r.scores(queries).softmax(1) for r in (router, gone))
    assert torch.allclose(full[:, 4] / full[:, 1], less[:, 4] / less[:, 1], rtol=1e-10, atol=0)
    assert float(less[:, 3].max()) == 0
    with pytest.raises(InputError, match=r"client 3 cannot be routed to; there are \[0, 1, 2"):
        gone.without(3)
    only = replace(router, sizes=torch.eye(N)[2])
    with pytest.raises(InputError, match="client 2 is the last one"):
        only.without(2)


def test_a_client_that_joins_has_a_row_from_moments(router: Router) -> None:
    """A head from moments does not use the network's own N columns, so that it can have N + 1."""
    new = make_clients(seed=12, sizes=(50,))[0]
    grown = replace(
        router,
        served={**router.served, N: router.served[0]},
        sizes=torch.cat([router.sizes, torch.ones(1)]),
    ).from_moments([*make_clients(), new])
    assert grown.clients == list(range(N + 1))
    assert grown.sizes.tolist() == [*SIZES, 50]
    assert (grown.route(new.x).clients == N).double().mean() > 0.5
    assert not (router.route(new.x).clients == N).any()


def test_who_never_took_part_is_not_routed_to() -> None:
    played = final(ALGORITHM, routed_federation(MODEL), 1, cohort=3)
    router = Router.of(ALGORITHM, played.server, played.states)
    assert router.clients == played.cohort.tolist()
    x = make_clients()[0].x
    assert set(router.route(x, k=3).clients.flatten().tolist()) == set(router.clients)
    with pytest.raises(InputError, match="k = 4 clients of 3; give 1 to all of them"):
        router.route(x, k=4)


def test_blocks_do_not_matter(router: Router, queries: Tensor) -> None:
    many = torch.cat([queries] * 12)
    assert len(many) > 1000
    told = router.predict(many, 2).reshape(12, len(queries), -1)
    assert float((told - router.predict(queries, 2)).abs().max()) < 1e-6


def test_a_router_that_cannot_be_built_says_why(router: Router, queries: Tensor) -> None:
    played = final(ALGORITHM, routed_federation(MODEL), 1)
    with pytest.raises(InputError, match="no client has taken part yet"):
        Router.of(ALGORITHM, played.server, {})
    private = FedAvg(MODEL, share=Share(("head.", "router.")))
    alone = final(private, routed_federation(MODEL), 1)
    with pytest.raises(InputError, match='"router.branch.0.0.weight" stays on the clients'):
        Router.of(private, alone.server, alone.states)
    plain = routed_model(None)
    setting = routed_setting(plain)
    head = final(recipes.fedper(setting), routed_federation(plain), 1)
    without = Router.of(recipes.fedper(setting), head.server, head.states)
    with pytest.raises(InputError, match='routing needs "client_logits"'):
        without.route(queries)
    with pytest.raises(InputError, match='this needs "client_features", and the model returns'):
        without.features(queries)
    with pytest.raises(InputError, match="novelty needs the clients' moments"):
        router.novelty(queries)
    with pytest.raises(InputError, match='unknown mode .* "sfot"; allowed: hard, mixture'):
        router.predict(queries, "sfot")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no queries; give at least one"):
        router.predict(queries[:0])
    with pytest.raises(InputError, match="2 clients given, the router tells 6 apart"):
        router.refitted(make_clients()[:2])


# ------------------------------------------------------------------------------------------- refits

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

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="BFGS", options={"gtol": 1e-9})
    w = found.x.reshape(shape)
    return w[:, 0] - w[:, 0].mean(), w[:, 1:]


@pytest.mark.parametrize("penalty", [1e-4, 1e-1])
def test_the_refit_is_the_pooled_fit(penalty: float) -> None:
    found = refit_locally(SAMPLES, penalty=penalty, tolerance=1e-10)
    gamma, xi = pooled_fit(SAMPLES, penalty)
    assert np.abs(found.head.gamma.numpy() - gamma).max() < 1e-6
    assert np.abs(found.head.xi.numpy() - xi).max() < 1e-6
    assert found.gradient < 1e-8
    assert found.rounds < 60
    other = refit_locally(SAMPLES, penalty=3 * penalty).head.xi.numpy()
    assert np.abs(other - xi).max() > 1e-4


def test_free_intercepts_give_every_client_its_number() -> None:
    """sum_ij softmax_l(x_ij) = n_l, at any penalty."""
    head = refit_locally(SAMPLES, penalty=1e-2, tolerance=1e-9).head
    told = head(torch.cat(SAMPLES)).softmax(1).sum(0)
    counts = torch.tensor([float(len(s)) for s in SAMPLES]).double()
    assert float((told - counts).abs().max()) < 1e-5
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
    """The others' fit is what it is without it."""
    empty = (SAMPLES[0], SAMPLES[0][:0], *SAMPLES[1:])
    found, less = (refit_locally(s, tolerance=1e-10).head for s in (empty, SAMPLES))
    kept = [0, 2, 3, 4]
    assert float(found.gamma[1]) == -float("inf")
    assert torch.allclose(found.gamma[kept], less.gamma, rtol=0, atol=1e-6)
    assert torch.allclose(found.xi[kept], less.xi, rtol=0, atol=1e-6)
    head = pooled([moments(h) for h in empty]).head()
    assert float(head(SAMPLES[0]).softmax(1)[:, 1].max()) == 0
    same = pooled([moments(h) for h in SAMPLES]).head()
    assert torch.allclose(head.xi[kept], same.xi, rtol=0, atol=1e-10)


def test_a_refit_that_does_not_end_says_so() -> None:
    with pytest.raises(TrainingError, match="stands at gradient .* after .* rounds; give more"):
        refit_locally(SAMPLES, rounds=2)
    with pytest.raises(InputError, match="penalty must be 0 or more, got -1"):
        refit_locally(SAMPLES, penalty=-1.0)


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


def test_a_refit_on_other_counts_brings_its_own_sizes(router: Router) -> None:
    """The head's intercepts hold log n of the data it was fitted to; the prior must match."""
    some = tuple(c._replace(x=c.x[: 2 + i], y=c.y[: 2 + i], w=c.w[: 2 + i])
                   for i, c in enumerate(make_clients()))  # fmt: skip
    assert router.refitted(some).sizes.tolist() == [2, 3, 4, 5, 6, 7]
    assert router.without(2).from_moments(some).sizes.tolist() == [2, 3, 0, 5, 6, 7]
    assert router.with_moments(some).sizes.tolist() == list(SIZES)


# ------------------------------------------------------------------------------------------ moments


def test_moments_give_linear_discriminant_analysis() -> None:
    """xi = S^-1 mu, gamma = -mu' S^-1 mu / 2 + log n/N, S with 1 % of its mean variance added."""
    found = pooled([moments(h) for h in SAMPLES])
    head = found.head()
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
    assert np.abs(found.novelty(h).numpy() - np.min(gaps, axis=1)).max() < 1e-9
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


def test_moments_that_cannot_be_used_are_refused() -> None:
    flat = [moments(torch.ones(5, 2)), moments(torch.ones(4, 2) * 2)]
    with pytest.raises(InputError, match="covariance is singular at loading=0.01"):
        pooled(flat)
    with pytest.raises(InputError, match="no client has examples"):
        pooled([moments(torch.zeros(0, 2))])
    with pytest.raises(InputError, match="loading must be 0 or more, got -0.1"):
        pooled(flat, loading=-0.1)
