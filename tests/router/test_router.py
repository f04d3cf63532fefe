"""Scores and routing: one formula for all priors, one client, several or all, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.finetune import FineTune
from fedshift.router.quality import threshold
from fedshift.router.route import ABSTAIN, Router
from fedshift.router.score import estimate_prior, posterior, scores
from support.by_hand import final
from support.federations import SIZES, make_clients
from support.routing import (
    draw_gaussians,
    drawn,
    gaussian,
    routed_federation,
    routed_model,
    routed_setting,
)

N = len(SIZES)
MODEL = routed_model()
ALGORITHM = recipes.feddrm(routed_setting(MODEL))


def answers(router: Router, x: Tensor) -> Tensor:
    """Every client's class probabilities, one full pass each: [N, B, K]."""
    models = [router.served[i] for i in router.clients]
    return torch.stack([router.model(*m, x)["logits"].double().softmax(1) for m in models])


def test_the_score_is_the_formula() -> None:
    z, n = drawn((20, 3)), torch.tensor([10.0, 30, 60]).double()
    q = torch.tensor([0.5, 0.2, 0.3]).double()
    by_hand = z - (n / 100).log() + q.log()
    assert torch.allclose(scores(z, n, q), by_hand, rtol=0, atol=1e-14)
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
    prior = estimate_prior(z, n)
    assert float((prior - torch.tensor(q)).abs().max()) < 0.015
    ratio = posterior(z, n) / (n / n.sum())
    # Karush-Kuhn-Tucker for a maximum over the simplex: mean of r_i / (w_i mix) is 1 inside.
    gradient = (ratio / (ratio @ prior)[:, None]).mean(0)
    assert float((gradient - 1).abs().max()) < 1e-6
    stopped = estimate_prior(z, n, steps=3)
    assert float(((ratio / (ratio @ stopped)[:, None]).mean(0) - 1).abs().max()) > 1e-3


def test_a_client_without_queries_gets_no_mass() -> None:
    n = torch.tensor([100.0, 0, 100, 100])
    x = torch.cat(draw_gaussians((-4.0, 4.0), (0.5, 0.5), (200, 200)))
    logs = [gaussian(x, m, 0.5) for m in (-4.0, 9.0, 0.0, 4.0)]
    prior = estimate_prior(torch.stack(logs, 1), n)
    assert torch.allclose(prior, torch.tensor([0.5, 0, 0, 0.5]).double(), rtol=0, atol=1e-6)


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
    best = every[who, torch.arange(len(queries))]
    for mode in ("hard", 1):
        assert float((router.predict(queries, mode) - best).abs().max()) < 1e-6
    assert float((router.predict(queries, 2) - best).abs().max()) > 1e-2


def test_the_mixture_is_bayes_rule(router: Router, queries: Tensor) -> None:
    """P(y | x) = sum_i r_i P_i(y | x); over k clients with r renormalised."""
    every, r = answers(router, queries), router.scores(queries).softmax(1)
    mixed = torch.einsum("bn,nbk->bk", r, every)
    assert float((router.predict(queries, "mixture") - mixed).abs().max()) < 1e-6
    top_two = torch.where(r >= r.sort(1, descending=True).values[:, 1:2], r, 0.0)
    two = torch.einsum("bn,nbk->bk", top_two / top_two.sum(1, keepdim=True), every)
    assert float((router.predict(queries, 2) - two).abs().max()) < 1e-6
    assert float((mixed - two).abs().max()) > 1e-3


def test_all_of_equal_clients_is_any_of_them(router: Router, queries: Tensor) -> None:
    one = router.served[2]
    equal = replace(router, served=dict.fromkeys(range(N), one))
    one_client = MODEL(*one, queries)["logits"].double().softmax(1)
    assert float((equal.predict(queries, "mixture") - one_client).abs().max()) < 1e-6
    assert float((router.predict(queries, "mixture") - one_client).abs().max()) > 1e-2


def test_nothing_is_refused_at_coverage_1(router: Router, queries: Tensor) -> None:
    clients = make_clients()
    with_moments = router.with_moments(clients)
    plain = router.route(queries, k=2)
    open_ = with_moments.route(queries, k=2, min_posterior=0.0, max_novelty=float("inf"))
    assert torch.equal(plain.clients, open_.clients)
    assert torch.equal(plain.probabilities, open_.probabilities)


def test_ambiguous_and_new_queries_are_refused(router: Router, queries: Tensor) -> None:
    with_moments = router.with_moments(make_clients())
    plain = router.route(queries, k=2)
    middle = float(plain.probabilities[:, 0].median())
    strict = with_moments.route(queries, k=2, min_posterior=middle)
    unsure = plain.probabilities[:, 0] < middle
    assert 0 < int(unsure.sum()) < len(queries)
    assert bool((strict.clients[unsure] == ABSTAIN).all())
    assert torch.equal(strict.clients[~unsure], plain.clients[~unsure])
    assert torch.equal(strict.probabilities, plain.probabilities)
    far = with_moments.novelty(queries)
    limit = -threshold(-far, 0.7)
    near = with_moments.route(queries, max_novelty=limit).clients[:, 0]
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


def test_a_client_that_has_left_makes_its_queries_new(router: Router) -> None:
    """In any order of the calls, and as if the client had never had an example."""
    clients = make_clients()
    x, with_moments = clients[3].x, router.with_moments(clients)
    empty = clients[3]._replace(x=x[:0], y=clients[3].y[:0], w=clients[3].w[:0])
    without_it = [*clients[:3], empty, *clients[4:]]
    orders = (
        with_moments.without(3), router.without(3).with_moments(clients),
        router.without(3).from_moments(clients), router.from_moments(clients).without(3),
        router.with_moments(without_it),
    )  # fmt: skip
    assert float(orders[0].novelty(x).median()) > float(with_moments.novelty(x).median())
    for gone in orders[1:]:
        assert torch.equal(gone.novelty(x), orders[0].novelty(x))
    assert not torch.equal(with_moments.novelty(x), orders[0].novelty(x))


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["refitted", "from_moments"])
def test_clients_that_left_are_in_no_later_fit(router: Router, queries: Tensor, fit: str) -> None:
    """Nor does it change the odds of an earlier one."""
    clients = make_clients()
    wild = [c._replace(x=100 * c.x + 7) if i == 3 else c for i, c in enumerate(clients)]
    one, two = (getattr(router.without(3), fit)(c) for c in (clients, wild))
    assert torch.equal(one.scores(queries), two.scores(queries))
    assert one.sizes.tolist() == [n if i != 3 else 0 for i, n in enumerate(SIZES)]
    whole = getattr(router, fit)(clients)
    expected = whole.scores(queries).index_fill(1, torch.tensor(3), -torch.inf).softmax(1)
    assert torch.allclose(whole.without(3).scores(queries).softmax(1), expected, rtol=1e-10, atol=0)
    assert not torch.allclose(one.scores(queries).softmax(1), expected)


def test_clients_that_cannot_be_routed_to_have_no_prior(router: Router, queries: Tensor) -> None:
    """The prior's share of such a client goes to the others, in proportion."""
    gone, q = router.without(3), torch.tensor([0.2, 0.1, 0.1, 0.4, 0.1, 0.1], dtype=torch.float64)
    left = q.index_fill(0, torch.tensor(3), 0.0) / 0.6
    assert torch.allclose(gone.scores(queries, q), gone.scores(queries, left), rtol=0, atol=1e-12)
    even = torch.tensor([0.2, 0.2, 0.2, 0.0, 0.2, 0.2])
    same = gone.scores(queries, even) - gone.scores(queries, "density")
    assert float(same[:, [0, 1, 2, 4, 5]].abs().max()) < 1e-6
    assert not torch.allclose(router.scores(queries, q), router.scores(queries, left))


def test_no_client_of_probability_0_is_listed(router: Router, queries: Tensor) -> None:
    """A prior that rules clients out leaves places empty."""
    q = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0, 0.0])
    clients, probabilities = router.route(queries, k=N, prior=q)
    assert set(clients[:, :3].flatten().tolist()) == {0, 2, 3}
    assert bool((clients[:, 3:] == ABSTAIN).all())
    assert bool(((clients == ABSTAIN) == (probabilities == 0)).all())
    assert not bool((router.route(queries, k=N).clients == ABSTAIN).any())


def test_a_client_that_joins_has_a_row_from_moments(router: Router) -> None:
    """A head from moments does not use the network's own N columns, so that it can have N + 1."""
    new = make_clients(seed=12, sizes=(50,))[0]._replace(id=torch.tensor(N))
    grown = replace(
        router,
        served={**router.served, N: router.served[0]},
        sizes=torch.cat([router.sizes, torch.ones(1)]),
    ).from_moments([*make_clients(), new])
    assert grown.clients == list(range(N + 1))
    assert grown.sizes.tolist() == [*SIZES, 50]
    assert (grown.route(new.x).clients == N).double().mean() > 0.5
    assert not (router.route(new.x).clients == N).any()


def test_clients_that_never_took_part_are_not_routed_to() -> None:
    played = final(ALGORITHM, routed_federation(MODEL), 1, cohort=3)
    router = Router.of(ALGORITHM, played.server, played.states)
    assert router.clients == played.cohort.tolist()
    x = make_clients()[0].x
    assert set(router.route(x, k=3).clients.flatten().tolist()) == set(router.clients)


def test_fine_tuned_clients_are_routed_by_the_server(queries: Tensor) -> None:
    """Clients then answer with whole models of their own, and the router stays the common one."""
    setting = routed_setting(MODEL)
    tuned = FineTune(recipes.feddrm_shared_head(setting), 2, setting.local)
    played = final(tuned, routed_federation(MODEL), 4)
    router = Router.of(tuned.at(4), played.server, played.states)
    common = MODEL(played.server["params"], {}, queries)
    assert torch.equal(router.logits(queries), common["client_logits"])
    at_client = MODEL(*router.served[0], queries)
    assert not torch.equal(at_client["client_logits"], common["client_logits"])
    every = answers(router, queries)
    who = router.route(queries).clients[:, 0]
    routed = every[who, torch.arange(len(queries))]
    assert float((router.predict(queries) - routed).abs().max()) < 1e-6


def test_blocks_do_not_matter(router: Router, queries: Tensor) -> None:
    many = torch.cat([queries] * 12)
    assert len(many) > 1000
    predicted = router.predict(many, 2).reshape(12, len(queries), -1)
    assert float((predicted - router.predict(queries, 2)).abs().max()) < 1e-6


def test_a_router_that_was_never_trained_can_be_refitted(queries: Tensor) -> None:
    """Its branch is random, and yet a refit finds clients better than chance."""
    method = recipes.fedavg(routed_setting(MODEL))
    played = final(method, routed_federation(MODEL), 1)
    raw = Router.of(method, played.server, played.states, untrained=True)
    origin = torch.repeat_interleave(torch.arange(N), torch.tensor(SIZES))

    def right(r: Router) -> float:
        return float((r.route(queries).clients[:, 0] == origin).double().mean())

    assert right(raw) < 0.3
    assert right(raw.refitted(make_clients())) > right(raw) + 0.1


def test_numbers_of_any_kind_do(router: Router, queries: Tensor) -> None:
    assert torch.equal(router.route(queries, np.int64(2)).clients, router.route(queries, 2).clients)
    q = [0.1, 0.2, 0.3, 0.1, 0.1, 0.2]
    predicted = router.predict(queries, 2, prior=torch.tensor(q, dtype=torch.float64))
    for kind in (list, tuple, np.array):
        assert torch.equal(router.predict(queries, 2, prior=kind(q)), predicted)
    assert not torch.equal(router.predict(queries, 2), predicted)
