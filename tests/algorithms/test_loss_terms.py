"""Terms of the loss: laws and edges, beside the plain loops of test_references.py."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.decorrelation import Decorrelation
from fedshift.client.distilling import NotTrueDistillation, distilled
from fedshift.client.local import gradient_of
from fedshift.client.objectives import (
    Contrastive,
    CrossEntropy,
    Term,
    View,
)
from fedshift.client.shares import CountAdjusted, CountMargins, LogitSuppression, ShareScaled
from fedshift.data import Batch, ClientData, client_data, label_counts, register
from fedshift.engine.run import Federation, run
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.models.etf import with_etf
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.tree import Params
from support.by_hand import final, max_difference
from support.comparing import same, whole
from support.federations import CLASSES, FEATURES, make_clients, make_federation

COUNTS = (7, 0, 2, 0, 4, 1)
K = len(COUNTS)
# As the recipe has it.
BALANCED = CountAdjusted(K, least=1e-30)


def drawn(counts: tuple[int, ...]) -> tuple[ClientData, Tensor]:
    """A client of so many examples of each label, and logits [n, K] of them."""
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    z = torch.randn(len(y), len(counts), generator=generator(0, "margins"), dtype=torch.float64)
    data = client_data(z, y, 0)
    return data._replace(w=data.w.double()), 3 * z


def loss_of(term: Term, data: ClientData, batch: Batch, logits: Tensor) -> Tensor:
    view = View(Model(nn.Linear(1, 1)), {}, {"logits": logits}, batch, term.remember({}, {}, data))
    return term(view)


TERMS: dict[str, Term] = {"balanced": BALANCED, "margins": CountMargins(K, 0.7)}


@pytest.mark.parametrize("term", [*TERMS.values(), ShareScaled(K), LogitSuppression(K)])
def test_counts_beyond_half_precision(term: Term) -> None:
    """70,000 examples are infinitely many in float16, and 1e-9 is none."""
    data, z = drawn(COUNTS)
    context = {"labels": {"counts": torch.tensor([7e4, 0, 2, 0, 4, 1])}}
    half = whole(data)._replace(w=data.w.half())
    values = [
        term(View(Model(nn.Linear(1, 1)), {}, {"logits": logits}, batch, context))
        for logits, batch in ((z.half(), half), (z, whole(data)))
    ]
    assert float(values[0]) == pytest.approx(float(values[1]), rel=2e-2)


@pytest.mark.parametrize("name", TERMS)
def test_padding_and_a_client_without_examples_give_numbers(name: str) -> None:
    term = TERMS[name]
    data, z = drawn(COUNTS)
    none = data._replace(w=torch.zeros_like(data.w))
    batch = whole(data)._replace(w=torch.zeros_like(data.w))
    leaf = z.clone().requires_grad_()
    value = loss_of(term, none, batch, leaf)
    (grad,) = torch.autograd.grad(value, leaf)
    assert float(value.detach()) == 0
    assert not grad.any()


def test_a_prior_learned_under_uneven_shares_is_taken_out() -> None:
    """Fitted to convergence on two Gaussians of 9 : 1, the border is that of even shares.

    Control: the cross-entropy's is not, and FedLC's margins take a part of it out alone.
    """
    y = torch.repeat_interleave(torch.arange(2), torch.tensor((900, 100)))
    source = generator(0, "borders")
    x = (2.0 * y - 1 + torch.randn(len(y), generator=source)).double()
    data = client_data(x[:, None], y, 0)
    data = data._replace(w=data.w.double())

    def border(term: Term) -> float:
        slope, bias = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
        steps = torch.optim.LBFGS([slope, bias], max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            steps.zero_grad()
            logits = torch.stack([torch.zeros_like(x), slope * x + bias], 1)
            value = loss_of(term, data, whole(data), logits)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        steps.step(loss)  # type: ignore[no-untyped-call]
        return float(-(bias / slope).detach())

    even = border(CountAdjusted(2, 1e-30))
    assert abs(even) < 0.15
    assert border(CrossEntropy()) == pytest.approx(np.log(9) / 2, abs=0.15)
    assert border(CountMargins(2, 1.0)) > even + 0.5


def both(model: Model) -> list[Params]:
    """The model's parameters with two draws of noise, in float64: in training, and received."""
    source = generator(0, "two models")
    params, _ = model.init()
    return [
        {k: v.double() + 0.5 * torch.randn(v.shape, generator=source) for k, v in params.items()}
        for _ in range(2)
    ]


def a_client() -> ClientData:
    """Labels 1, 2 and 3 of 5, in float64."""
    data = make_clients()[1]
    return data._replace(x=data.x.double(), w=data.w.double())


def view_at(model: Model, now: Params, received: Params, batch: Batch, logits: Tensor) -> View:
    context = {"anchor": received, "anchor_buffers": {}}
    return View(model, now, {"logits": logits}, batch, context)


def test_labels_that_are_left_out_may_be_far_away(mlp: Model) -> None:
    """Neither a huge logit of the label nor an empty choice of labels gives NaN."""
    (now, received), data = both(mlp), a_client()
    z = mlp(now, {}, data.x)["logits"].detach()
    far = (z + 1e6 * F.one_hot(data.y, CLASSES)).requires_grad_()
    view = view_at(mlp, now, received, whole(data), far)
    value = NotTrueDistillation()(view)
    near = NotTrueDistillation()(view_at(mlp, now, received, whole(data), z))
    assert float((value - near).detach().abs()) < 1e-14
    for few in (0, 1):  # no label, and one
        mask = torch.arange(CLASSES) < few
        none = distilled(view, mask, 1.0)
        (grad,) = torch.autograd.grad(none.sum(), far)
        assert not none.any()
        assert not grad.any()
    assert distilled(view, torch.arange(CLASSES) < 2, 1.0).any()


def test_with_two_labels_it_is_fedavg() -> None:
    """One other label has the share 1 whatever its logit."""
    gaps = []
    for classes in (2, 3):
        model = build(lambda k=classes: Mlp((FEATURES,), (10,), k), seed=1)
        clients = [client_data(c.x, c.y % classes, i) for i, c in enumerate(make_clients())]
        federation = Federation(clients, *model.init(), register(clients, classes), Seeds.of(0))
        target = tuple([1 / classes] * classes)
        setting = Setting(model, target)
        gaps.append(same(recipes.fedntd(setting), recipes.fedavg(setting), federation))
    assert gaps[0] == 0
    assert gaps[1] > 1e-5


def test_the_model_received_is_used_in_evaluation_mode(normed: Model) -> None:
    """Its running statistics matter, none change, and no gradient reaches it."""
    federation = make_federation(normed)
    data, params, buffers = federation.clients[3], federation.params, federation.buffers
    watched = {k: v.clone().requires_grad_() for k, v in params.items()}
    values = []
    for shift in (0, 2):
        other = {k: v + shift if v.is_floating_point() else v for k, v in buffers.items()}
        before = {k: v.clone() for k, v in other.items()}
        out, _ = normed.train(params, buffers, data.x)
        context = {"anchor": watched, "anchor_buffers": other}
        value = NotTrueDistillation()(View(normed, params, out, whole(data), context))
        assert not value.requires_grad
        assert max_difference(before, other) == 0
        values.append(float(value))
    assert abs(values[0] - values[1]) > 1e-4


class Given(nn.Module):
    """Logits z x + c of inputs x [n, K]: a model received whose logits tests choose by c."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c


def labels_of(counts: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def logits_for(y: Tensor, classes: int, name: str) -> Tensor:
    draws = torch.randn(len(y), classes, generator=generator(0, name), dtype=torch.float64)
    return 2 * draws


def view_given(term: Term, data: ClientData, batch: Batch, logits: Tensor) -> View:
    params: Params = {"c": torch.zeros(1, dtype=torch.float64)}
    context = {"anchor": params, "anchor_buffers": {}, **term.remember(params, {}, data)}
    return View(Model(Given()), params, {"logits": logits}, batch, context)


VACANT = (7, 0, 2, 0, 4, 0)


def by_the_authors(z: Tensor, y: Tensor, counts: tuple[int, ...]) -> float:
    """Their suppression, step by step: the label's entries are multiplied by 0, not left out."""
    shares = np.array(counts) / sum(counts)
    total = 0.0
    for c, share in enumerate(shares):
        u = z[:, c].numpy() - np.log(share + 1e-9) + np.log(1 / len(counts) + 1e-9)
        u = u * (y.numpy() != c)
        total += share * (np.log(np.exp(u).sum()) - np.log(len(u)))
    return total


def test_large_logits_and_padding_give_numbers() -> None:
    """Rows of weight 0 do not count; a batch of padding alone gives a number as well."""
    y = labels_of(VACANT)
    z = logits_for(y, 6, "now")
    data = client_data(z, y, 0)
    data = data._replace(w=data.w.double())
    term = LogitSuppression(6, 1.0)
    for shift in (0.0, 1e4):
        plain = term(view_given(term, data, whole(data), z + shift))
        extended = torch.cat([z + shift, z[:3] + shift])
        rows = torch.cat([torch.arange(13), torch.zeros(3, dtype=torch.int64)])
        weight = torch.cat([torch.ones(13), torch.zeros(3)]).double()
        batch = Batch(extended, data.y[rows], weight, rows, torch.tensor(13.0))
        assert float((term(view_given(term, data, batch, extended)) - plain).abs()) < 1e-12
        assert float(plain) == pytest.approx(shift or by_the_authors(z, y, VACANT), rel=1e-3)
    none = batch._replace(w=torch.zeros(16).double(), size=torch.tensor(1.0))
    leaf = extended.clone().requires_grad_()
    value = term(view_given(term, data, none, leaf))
    (grad,) = torch.autograd.grad(value, leaf)
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()


def batch_of(w: Tensor, size: float) -> Batch:
    n = len(w)
    labels = torch.zeros(n, dtype=torch.int64)
    return Batch(torch.zeros(n, 1), labels, w, torch.arange(n), torch.tensor(size))


def value(term: Decorrelation, model: Model, features: Tensor, w: Tensor | None = None) -> Tensor:
    ones = torch.ones(len(features), dtype=torch.float64)
    weights = ones if w is None else w
    batch = batch_of(weights, float((weights != 0).sum()))
    return term(View(model, {}, {"features": features, "logits": features}, batch, {}))


def features_for(n: int, d: int) -> Tensor:
    """Features that depend on one another, of unequal scales and means."""
    source = generator(0, "features")
    mixing = torch.randn(d, d, generator=source, dtype=torch.float64)
    draws = torch.randn(n, d, generator=source, dtype=torch.float64)
    return draws @ mixing * torch.linspace(0.5, 3.0, d) + torch.arange(d)


def test_padding_and_importances(mlp: Model) -> None:
    """In the correlations, rows of weight 0 are absent and one of weight 2 counts twice."""
    z = features_for(8, 3)
    plain = value(Decorrelation(), mlp, z[:6])
    padded = value(Decorrelation(), mlp, z, torch.tensor([1.0] * 6 + [0.0] * 2).double())
    assert float((plain - padded).abs()) < 1e-15
    twice = value(Decorrelation(), mlp, torch.cat([z, z[:1]]))
    heavy = value(Decorrelation(), mlp, z, torch.tensor([2.0] + [1.0] * 7).double())
    assert float((twice - heavy).abs()) < 1e-15
    assert float((twice - value(Decorrelation(), mlp, z)).abs()) > 1e-4


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_one_example_or_a_dead_feature_gives_numbers(mlp: Model, scale: Any) -> None:
    term = Decorrelation(1.0, scale)
    for z in (
        features_for(1, 4),
        torch.zeros(6, 4).double(),
        features_for(6, 4) * torch.tensor([1.0, 0, 1, 1]),
    ):
        leaf = z.clone().requires_grad_()
        got = value(term, mlp, leaf)
        (grad,) = torch.autograd.grad(got, leaf)
        assert torch.isfinite(got)
        assert torch.isfinite(grad).all()
    assert float(value(term, mlp, features_for(1, 4))) == 0
    assert float(value(term, mlp, 10 * features_for(6, 1))) == pytest.approx(
        float(scale == "paper")
    )


def models(model: Model, count: int) -> list[Params]:
    """The model's parameters with different noise, in float64."""
    source = generator(0, "models")
    params, _ = model.init()
    return [
        {k: v.double() + 0.3 * torch.randn(v.shape, generator=source) for k, v in params.items()}
        for _ in range(count)
    ]


def test_other_models_are_used_in_evaluation_mode_with_their_own_buffers(normed: Model) -> None:
    """z_g and z_p depend on those models' running statistics, and change no statistics."""
    federation = make_federation(normed)
    data = federation.clients[3]
    params, buffers = federation.params, federation.buffers
    term = Contrastive()
    other = {k: v + 2 if v.is_floating_point() else v for k, v in buffers.items()}

    def loss(previous: Params) -> tuple[Tensor, Params]:
        context = {
            "anchor": params,
            "anchor_buffers": buffers,
            **term.remember(params, previous, data),
        }
        before = {k: v.clone() for k, v in previous.items()}
        out, after = normed.train(params, buffers, data.x)
        value = term(View(normed, params, out, whole(data), context))
        assert all(torch.equal(previous[k], v) for k, v in before.items())
        return value, after

    same_, after = loss(buffers)
    assert float(same_) == pytest.approx(math.log(2), abs=1e-6)
    assert abs(float(loss(other)[0]) - math.log(2)) > 1e-3
    _, plain = normed.train(params, buffers, data.x)
    assert max_difference(after, plain) == 0
    z = normed(params, buffers, data.x)["features"]
    assert not torch.equal(z, normed.train(params, buffers, data.x)[0]["features"])


def test_the_previous_model_is_the_clients_own_last_one(setting: Setting, federated: Any) -> None:
    algorithm, federation = recipes.moon(setting), federated()
    rounds = list(run(algorithm, federation, 3, cohort=2))
    seen = set()
    for before, played in pairwise(rounds):
        for i in played.trained:
            previous = played.states[i]["previous"]
            assert max_difference(previous, federation.params) > 1e-3
            assert max_difference(previous, played.server["params"]) > 1e-4
            seen.add(i)
        for i in set(before.states) - set(played.trained):
            assert max_difference(played.states[i]["previous"], before.states[i]["previous"]) == 0
    never = set(range(6)) - seen - set(rounds[0].trained)
    assert never
    fresh = algorithm.init_client(federation.params, {}, federation.clients[min(never)])
    assert max_difference(fresh["previous"], federation.params) == 0


@pytest.fixture
def etf(setting: Setting) -> Setting:
    """The setting with an ETF as classifier."""
    model = build(lambda: with_etf(Mlp((FEATURES,), (10,), CLASSES)), seed=1)
    return replace(setting, model=model)


def balanced_clients(sizes: tuple[int, ...]) -> tuple[ClientData, ...]:
    """Clients that have equally many examples of every class."""
    source = generator(0, "balanced")
    return tuple(
        client_data(torch.randn(n, FEATURES, generator=source), torch.arange(n) % CLASSES, i)
        for i, n in enumerate(sizes)
    )


def frozen_scale(etf: Setting) -> Setting:
    return replace(etf, local=replace(etf.local, frozen=("head.scale",)))


def test_equal_counts_are_fedavg_but_for_rounding(etf: Setting) -> None:
    federation = make_federation(etf.model, balanced_clients((10, 25, 15)))
    assert same(recipes.fedetf(etf), recipes.fedavg(etf), federation) < 1e-5
    skewed = make_federation(etf.model, make_clients())
    assert same(recipes.fedetf(etf), recipes.fedavg(etf), skewed) > 1e-2


def test_equal_shares_are_fedavg_of_a_fixed_temperature(etf: Setting) -> None:
    federation = make_federation(etf.model, balanced_clients((10, 25, 15)))
    plain = recipes.fedavg(frozen_scale(etf))
    assert same(recipes.fedgela(etf), plain, federation) == 0
    assert same(recipes.fedgela(etf), recipes.fedavg(etf), federation) > 1e-5
    skewed = make_federation(etf.model, make_clients())
    assert same(recipes.fedgela(etf), plain, skewed) > 1e-3


def test_scaled_logits_are_a_classifier_with_scaled_rows(etf: Setting) -> None:
    """The gradient of the body is cross-entropy's under rows K S_c v_c."""
    model: Model = etf.model
    data = make_clients()[1]
    data = data._replace(x=data.x.double(), w=data.w.double())
    params = {k: v.double() for k, v in model.init()[0].items()}
    term = ShareScaled(CLASSES)
    memory = term.remember(params, {}, data)
    shares = label_counts(data, CLASSES) / len(data.y)
    assert torch.equal(memory["labels"]["counts"], label_counts(data, CLASSES))
    rows = params | {"head.weight": CLASSES * shares[:, None] * params["head.weight"]}
    names = [k for k in params if k.startswith(("body.", "head.project."))]

    def grad(objective: Any, at: dict[str, torch.Tensor], context: Any) -> dict[str, torch.Tensor]:
        moving = {k: at[k] for k in names}
        frozen = {k: v for k, v in at.items() if k not in names}
        return gradient_of(model, objective, frozen, {}, whole(data), context)(moving).grad

    one, two = grad(term, params, memory), grad(CrossEntropy(), rows, {})
    assert max(float((one[k] - two[k]).abs().max()) for k in names) < 1e-14
    plain = grad(CrossEntropy(), params, {})
    assert max(float((one[k] - plain[k]).abs().max()) for k in names) > 1e-3


def test_directions_and_temperature_stay(etf: Setting) -> None:
    federation = make_federation(etf.model)
    after = final(recipes.fedgela(etf), federation).server["params"]
    for name in ("head.weight", "head.scale"):
        assert torch.equal(after[name], federation.params[name])
    assert not torch.equal(after["head.project.weight"], federation.params["head.project.weight"])
