"""Balanced softmax and FedLC: their losses by closed forms, and when they are FedAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.client.shares import CountAdjusted, CountMargins, LogitSuppression, ShareScaled
from fedshift.data import Batch, ClientData, client_data
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import generator
from support.comparing import same, whole
from support.federations import CLASSES, FEATURES, make_federation

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


def tried(term: Term, counts: tuple[int, ...]) -> tuple[float, Tensor, Tensor, Tensor]:
    """(value, gradient by the logits, logits, labels)."""
    data, z = drawn(counts)
    leaf = z.clone().requires_grad_()
    value = loss_of(term, data, whole(data), leaf)
    (grad,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), grad, z, data.y


def present(z: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    """Probabilities [n, K] of softmax(z + shift) over labels that the client has, else 0."""
    present = torch.tensor(COUNTS) > 0
    p = torch.zeros_like(z)
    p[:, present] = F.softmax((z + shift)[:, present], 1)
    return p


N = torch.tensor(COUNTS, dtype=torch.float64)
SHIFTS = {"balanced": N.clamp(min=1).log(), "margins": -0.7 * N.clamp(min=1) ** -0.25}
TERMS: dict[str, Term] = {"balanced": BALANCED, "margins": CountMargins(K, 0.7)}


@pytest.mark.parametrize("name", TERMS)
def test_the_loss_and_its_gradient(name: str) -> None:
    """softmax(z + shift) - 1_y over the batch's size, labels that the client lacks left out."""
    value, grad, z, y = tried(TERMS[name], COUNTS)
    p = present(z, y, SHIFTS[name])
    assert value == pytest.approx(float(-p[range(len(y)), y].log().mean()), rel=1e-12)
    assert float((grad - (p - F.one_hot(y, K)) / len(y)).abs().max()) < 1e-14
    assert not grad[:, [1, 3]].abs().max() > 1e-20
    plain, *_ = tried(CrossEntropy(), COUNTS)
    assert value != pytest.approx(plain, rel=1e-2)


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


def test_the_margin_is_the_papers() -> None:
    """A label of 16 times as many examples has half the margin: tau n^(-1/4)."""
    data, _ = drawn((16, 1))
    z = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    one = Batch(z, torch.tensor([1]), torch.ones(1).double(), torch.tensor([0]), torch.tensor(1.0))
    value = float(loss_of(CountMargins(2, 2.0), data, one, z))
    assert value == pytest.approx(float(np.log1p(np.exp(2.0 - 1.0))))


@pytest.mark.parametrize("name", TERMS)
def test_equal_counts_are_the_cross_entropy_exactly(name: str) -> None:
    counts = (3,) * K
    one, two = tried(TERMS[name], counts), tried(CrossEntropy(), counts)
    assert one[0] == two[0]
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize("name", ["balanced_softmax", "fedlc"])
def test_clients_of_even_shares_train_as_in_fedavg(
    setting: Setting, federated: Any, name: str
) -> None:
    source = generator(0, "even")
    clients = tuple(
        client_data(torch.randn(n, FEATURES, generator=source), torch.arange(n) % CLASSES, i)
        for i, n in enumerate((10, 25, 15))
    )
    federation = make_federation(setting.model, clients)
    method = getattr(recipes, name)(setting)
    assert same(method, recipes.fedavg(setting), federation) == 0
    assert same(method, recipes.fedavg(setting), federated()) > 1e-3


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


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf")])
def test_margins_out_of_range_are_refused(setting: Setting, tau: float) -> None:
    with pytest.raises(InputError, match="tau must be a positive number"):
        recipes.fedlc(setting, tau=tau)
