"""Refits report their calibration on held-out examples, and choose by it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.data import ClientData, client_data
from fedshift.router.calibration import Calibration, HeldOut, figures, tempered
from fedshift.router.parts import FOLDS, Here, Part, folds_of, held_out_sums
from fedshift.router.quality import calibration_error
from fedshift.router.route import Router
from fedshift.router.score import ClientHead, posterior
from support.federations import SIZES, make_clients
from support.routing import drawn, routed_model

SAMPLES = [drawn((n, 3), seed=n) + torch.tensor([m, 0.0, -m]) for n, m in
           ((40, 0.0), (25, 1.0), (60, -0.7), (1, 0.4))]  # fmt: skip


def of(router: Router, inputs: list[Tensor]) -> tuple[float, float]:
    """(mean loss of the origin, ECE) on these clients' inputs, all at once."""
    belief = posterior(router.logits(torch.cat(inputs)), router.sizes)
    origin = torch.repeat_interleave(torch.arange(len(inputs)), torch.tensor([*map(len, inputs)]))
    loss = -belief[torch.arange(len(origin)), origin].log().mean()
    return float(loss), calibration_error(belief, origin)


def test_clients_sums_give_the_pooled_figures() -> None:
    heads = [ClientHead(drawn((4,), s), drawn((4, 3), s + 1)) for s in (0, 5)]
    sums = [held_out_sums(torch.stack([one(h) for one in heads]), i) for i, h in enumerate(SAMPLES)]
    h, each = torch.cat(SAMPLES), torch.tensor([len(s) for s in SAMPLES])
    origin = torch.repeat_interleave(torch.arange(4), each)
    for head, figure in zip(heads, figures(sums), strict=True):
        belief = head(h).softmax(1)
        assert figure.examples == 126
        assert figure.error == pytest.approx(calibration_error(belief, origin), abs=1e-12)
        loss = float(-belief[torch.arange(126), origin].log().mean())
        assert figure.loss == pytest.approx(loss, abs=1e-12)
    assert figures(sums)[0] != figures(sums[:3])[0]


def test_every_example_is_held_out_once_but_a_clients_only_one() -> None:
    marked = [torch.arange(float(len(h)))[:, None] for h in SAMPLES]
    here = Here(marked, marked, 0)
    assert folds_of(Part(here).sizes) == list(range(FOLDS))
    parts = [tuple(here.part(k, held_out=out) for out in (True, False)) for k in range(FOLDS)]
    for i, n in enumerate((40, 25, 60)):
        assert sorted(v for out, _ in parts for v in out.features[i][:, 0].tolist()) == [*range(n)]
        for held_out, fit in parts:
            whole = torch.cat([held_out.features[i], fit.features[i]])
            assert sorted(whole[:, 0].tolist()) == list(range(n))
            assert held_out.logits is not None
            assert torch.equal(held_out.logits[i], held_out.features[i])
    assert all(len(out.features[3]) == 0 and len(fit.features[3]) == 1 for out, fit in parts)
    first = parts[0][0].features[0]
    other, alone = Here(marked, None, 1), Here(marked[:1], None, 0)
    assert not torch.equal(other.part(0, held_out=True).features[0], first)
    assert torch.equal(alone.part(0, held_out=True).features[0], first)


def test_many_examples_take_fewer_folds() -> None:
    assert len(folds_of(torch.tensor([9000.0, 1100.0]))) == 1


def test_a_temperature_flattens_density_ratios_and_leaves_sizes() -> None:
    head, n = ClientHead(drawn((3,)), drawn((3, 2), 1)), torch.tensor([10.0, 70, 20]).double()
    h, offset = drawn((6, 2), 2), (n / 100).log()
    flat = tempered(head, n, 4.0)(h) - offset
    assert torch.allclose(flat, (head(h) - offset) / 4, rtol=0, atol=1e-12)
    assert tempered(head, n, 1.0) is head
    endless = tempered(head, n, 1e9)(h).softmax(1)
    assert torch.allclose(endless, (n / 100).expand(6, 3), rtol=0, atol=1e-6)
    absent = ClientHead(head.gamma.index_fill(0, torch.tensor(1), -torch.inf), head.xi)
    scores = tempered(absent, torch.tensor([10.0, 0, 20]), 2.0)(h)
    assert bool((scores[:, 1] == -torch.inf).all())
    assert bool(scores[:, [0, 2]].isfinite().all())


def gaussian_clients(sizes: tuple[int, ...], seed: int, gap: float = 0.5) -> list[ClientData]:
    source = torch.Generator().manual_seed(seed)
    means = gap * torch.randn(len(sizes), 8, generator=torch.Generator().manual_seed(3))
    return [
        client_data(means[i] + torch.randn(n, 8, generator=source), torch.zeros(n).long(), i)
        for i, n in enumerate(sizes)
    ]


@pytest.mark.slow
def test_a_refit_reports_what_fresh_examples_would_show(router: Router) -> None:
    """Features that were never trained on these clients, so that held-out examples are fair."""
    clients = gaussian_clients((300, 80, 150, 200, 60, 120), 0)
    fresh = [c.x for c in gaussian_clients((3000, 800, 1500, 2000, 600, 1200), 1)]
    for fit in (router.refitted, router.from_moments):
        made = fit(clients)
        calibration = made.calibration
        assert calibration is not None
        assert calibration.after.examples == 910
        loss, error = of(made, fresh)
        assert calibration.after.loss == pytest.approx(loss, abs=0.05)
        assert calibration.after.error == pytest.approx(error, abs=0.06)
        assert calibration.before is not None
        before, _ = of(replace(router, sizes=made.sizes), fresh)
        assert calibration.before.loss == pytest.approx(before, abs=0.15)
        assert calibration.before.loss > calibration.after.loss + 0.2


@pytest.mark.slow
def test_the_choice_beats_the_first_of_the_grid_on_fresh_examples(router: Router) -> None:
    """Few examples of much overlap: a small penalty fits their noise."""
    clients = gaussian_clients((12, 9, 14, 10, 8, 11), 0, gap=0.2)
    fresh = [c.x for c in gaussian_clients((1200, 900, 1400, 1000, 800, 1100), 1, gap=0.2)]
    chosen, fixed = router.refitted(clients), router.refitted(clients, penalty=1e-4)
    assert of(chosen, fresh)[0] < of(fixed, fresh)[0] - 0.1
    assert of(chosen, fresh)[1] < of(fixed, fresh)[1] - 0.1
    assert chosen.calibration is not None
    assert fixed.calibration is not None
    assert chosen.calibration.after.loss < fixed.calibration.after.loss


def test_inputs_that_are_held_apart_are_used_and_nothing_else(router: Router) -> None:
    clients = make_clients()
    fresh = [c.x for c in make_clients(seed=5)]
    made = router.refitted(clients, fresh=fresh, penalty=1e-2)
    assert made.calibration is not None
    for r, measured in ((made, made.calibration.after), (router, made.calibration.before)):
        assert measured is not None
        assert measured[:3] == pytest.approx((sum(SIZES), *of(r, fresh)), abs=1e-2)
    assert made.head is not None
    plain = router.refitted(clients, penalty=1e-2).head
    assert plain is not None
    assert torch.equal(made.head.xi, plain.xi)


@pytest.mark.slow
def test_what_makes_the_error_worse_is_not_recommended(router: Router) -> None:
    """Where held-out examples agree with the router, it is kept."""
    other = gaussian_clients((300, 80, 150, 200, 60, 120), 0)
    good, fits = router.calibrated(other), [router.refitted(other), router.from_moments(other)]
    least = min(fits, key=lambda r: r.calibration.after.loss if r.calibration else np.inf)
    assert good.calibration is not None
    assert good.calibration.better
    assert good.calibration == least.calibration
    clients = make_clients()
    x = torch.cat([c.x for c in clients])
    who = router.route(x).clients[:, 0]
    agreeing = [x[who == i] for i in range(len(SIZES))]
    same_router = router.calibrated(clients, fresh=agreeing)
    assert same_router.calibration is not None
    assert not same_router.calibration.better
    assert same_router.head is router.head
    assert torch.equal(same_router.scores(x), router.scores(x))
    assert "keep the router that it was made from" in str(same_router.calibration)


def test_the_figures_are_put_in_a_sentence() -> None:
    was, now = HeldOut(90, 0.9, 0.08), HeldOut(90, 0.8, 0.03)
    calibration = Calibration(was, now, 0.01, 1.5)
    assert str(calibration) == (
        "held-out calibration error 0.030, loss 0.800 nats; before 0.080 and 0.900, 90 examples "
        "(strength 0.01, temperature 1.5): use this refit"
    )
    assert Calibration(None, now, 0.01, 1.0).better
    assert not Calibration(now, was, 0.01, 1.0).better
    assert not Calibration(was, now._replace(error=0.09), 0.01, 1.0).better
    assert not Calibration(was, now._replace(loss=np.nan), 0.01, 1.0).better


def test_a_gain_that_chance_can_make_is_not_enough() -> None:
    """Mean 0.1, standard error (sd^2 / 90)^(1/2): three of them are 0.1 at sd = 0.316."""
    was, now = HeldOut(90, 0.9, 0.08), HeldOut(90, 0.8, 0.03)
    for sd, better in ((0.31, True), (0.32, False)):
        assert Calibration(was, now._replace(square=sd**2 + 0.01), 0.01, 1.0).better is better


def test_clients_sums_give_the_spread_of_the_change() -> None:
    z, before = drawn((2, 30, 4)), drawn((30, 4), 7)
    sums = held_out_sums(z, 2, before)
    change = z.log_softmax(2)[..., 2] - before.log_softmax(1)[:, 2]
    assert torch.allclose(sums.square, change.square().sum(1), rtol=1e-12, atol=0)
    assert float(held_out_sums(before[None], 2, before).square) == 0


def test_a_network_without_client_logits_has_no_figures_before() -> None:
    """A router for one client more than the network has columns for."""
    model = routed_model(len(SIZES) - 1)
    pair = model.init()
    grown = Router(model, pair, dict.fromkeys(range(len(SIZES)), pair), torch.ones(len(SIZES)))
    made = grown.from_moments(make_clients())
    assert made.calibration is not None
    assert made.calibration.before is None
    assert str(made.calibration).startswith("held-out calibration error")
