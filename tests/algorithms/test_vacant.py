"""FedVLS: its terms by the authors' steps and by closed forms, and what they leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedshift import recipes
from fedshift.client.distilling import VacantDistillation
from fedshift.client.objectives import Term, View
from fedshift.client.shares import CountAdjusted, LogitSuppression
from fedshift.data import Batch, ClientData, client_data
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.seeds import generator
from fedshift.tree import Params
from support.comparing import same, whole
from support.federations import CLASSES, make_clients, make_federation


class Given(nn.Module):
    """Logits z x + c of inputs x [n, K]: a model received whose logits tests choose by c."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c


def labels_of(counts: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def drawn(y: Tensor, classes: int, name: str) -> Tensor:
    draws = torch.randn(len(y), classes, generator=generator(0, name), dtype=torch.float64)
    return 2 * draws


def tried(term: Term, counts: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(value, gradient by the logits, logits, those of the model received, labels)."""
    y = labels_of(counts)
    z, given = (drawn(y, len(counts), name) for name in ("now", "received"))
    data = client_data(given, y, 0)
    data = data._replace(w=data.w.double())
    leaf = z.clone().requires_grad_()
    value = term(view_of(term, data, whole(data), leaf))
    (grad,) = torch.autograd.grad(value, leaf, allow_unused=False)
    return value.detach(), grad, z, given, y


def view_of(term: Term, data: ClientData, batch: Batch, logits: Tensor) -> View:
    params: Params = {"c": torch.zeros(1, dtype=torch.float64)}
    context = {"anchor": params, "anchor_buffers": {}, **term.remember(params, {}, data)}
    return View(Model(Given()), params, {"logits": logits}, batch, context)


COUNTS = (7, 0, 2, 0, 4, 0)


def test_the_balanced_loss_and_its_gradient() -> None:
    """softmax(z + log max(n, least)) - 1_y, over the batch's size."""
    value, grad, z, _, y = tried(CountAdjusted(6), COUNTS)
    n = torch.tensor(COUNTS).clamp(min=1).double()
    weighed = n * torch.exp(z)
    p = weighed / weighed.sum(1, keepdim=True)
    assert float(value) == pytest.approx(float(-p[range(13), y].log().mean()), rel=1e-12)
    assert float((grad - (p - F.one_hot(y, 6)) / 13).abs().max()) < 1e-15
    # A tiny least leaves absent labels out of the partition.
    few = tried(CountAdjusted(6, 1e-12), COUNTS)
    present = torch.tensor(COUNTS) > 0
    assert float(few[1][:, ~present].abs().max()) < 1e-10
    alone = F.cross_entropy(
        z[:, present] + n[present].log(), torch.searchsorted(present.nonzero()[:, 0], y)
    )
    assert float(few[0]) == pytest.approx(float(alone), rel=1e-9)
    assert float(few[0]) != pytest.approx(float(value), rel=1e-3)


def test_equal_counts_are_the_cross_entropy() -> None:
    value, _, z, _, y = tried(CountAdjusted(4), (3, 3, 3, 3))
    assert float(value) == pytest.approx(float(F.cross_entropy(z, y)), rel=1e-12)
    value, _, z, _, y = tried(CountAdjusted(4), (9, 1, 1, 1))
    assert float(value) != pytest.approx(float(F.cross_entropy(z, y)), rel=1e-3)


def test_the_distillation_is_the_authors() -> None:
    """They cut out the vacant columns; the gradient there is the difference of the shares."""
    value, grad, z, given, y = tried(VacantDistillation(6, 0.7), COUNTS)
    vacant = [1, 3, 5]
    by_steps = nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(z[:, vacant], 1), F.softmax(given[:, vacant], 1)
    )
    assert float(value) == pytest.approx(0.7 * float(by_steps), rel=1e-12)
    apart = F.softmax(z[:, vacant], 1) - F.softmax(given[:, vacant], 1)
    assert float((grad[:, vacant] - 0.7 * apart / len(y)).abs().max()) < 1e-15
    assert not grad[:, [0, 2, 4]].any()
    assert grad.abs().max() > 1e-3


@pytest.mark.parametrize(("counts", "distilled"), [
    ((3, 3, 3), False), ((3, 3, 0), False), ((3, 0, 0), True),
])  # fmt: skip
def test_two_vacant_labels_are_needed(counts: tuple[int, ...], distilled: bool) -> None:
    value, grad, *_ = tried(VacantDistillation(3), counts)
    assert bool(value) == distilled
    assert bool(grad.any()) == distilled


def by_the_authors(z: Tensor, y: Tensor, counts: tuple[int, ...]) -> float:
    """Their suppression, step by step: the label's entries are multiplied by 0, not left out."""
    shares = np.array(counts) / sum(counts)
    total = 0.0
    for c, share in enumerate(shares):
        u = z[:, c].numpy() - np.log(share + 1e-9) + np.log(1 / len(counts) + 1e-9)
        u = u * (y.numpy() != c)
        total += share * (np.log(np.exp(u).sum()) - np.log(len(u)))
    return total


def test_the_suppression_is_the_authors() -> None:
    value, grad, z, _, y = tried(LogitSuppression(6, 0.4), COUNTS)
    assert float(value) == pytest.approx(0.4 * by_the_authors(z, y, COUNTS), rel=1e-7)
    shares = torch.tensor(COUNTS).double() / 13
    u = (z - torch.log(6 * (shares + 1e-9))) * (F.one_hot(y, 6) == 0)
    expected = 0.4 * shares * u.softmax(0) * (F.one_hot(y, 6) == 0)
    assert float((grad - expected).abs().max()) < 1e-15
    assert not grad[:, [1, 3, 5]].any()
    assert grad.min() >= 0  # all other logits are pushed down
    assert grad.max() > 1e-3


def test_large_logits_and_padding_give_numbers() -> None:
    """Rows of weight 0 do not count; a batch of padding alone gives a number as well."""
    y = labels_of(COUNTS)
    z = drawn(y, 6, "now")
    data = client_data(z, y, 0)
    data = data._replace(w=data.w.double())
    term = LogitSuppression(6, 1.0)
    for shift in (0.0, 1e4):
        plain = term(view_of(term, data, whole(data), z + shift))
        extended = torch.cat([z + shift, z[:3] + shift])
        rows = torch.cat([torch.arange(13), torch.zeros(3, dtype=torch.int64)])
        weight = torch.cat([torch.ones(13), torch.zeros(3)]).double()
        batch = Batch(extended, data.y[rows], weight, rows, torch.tensor(13.0))
        assert float((term(view_of(term, data, batch, extended)) - plain).abs()) < 1e-12
        assert float(plain) == pytest.approx(shift or by_the_authors(z, y, COUNTS), rel=1e-3)
    none = batch._replace(w=torch.zeros(16).double(), size=torch.tensor(1.0))
    leaf = extended.clone().requires_grad_()
    value = term(view_of(term, data, none, leaf))
    (grad,) = torch.autograd.grad(value, leaf)
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()


def test_without_both_terms_it_is_balanced_softmax(setting: Setting, federated: Any) -> None:
    balanced = replace(recipes.fedavg(setting), objective=CountAdjusted(CLASSES, least=1e-6))
    assert recipes.fedvls(setting, distill=0.0, suppress=0.0) == balanced
    for on in ({"distill": 1.0, "suppress": 0.0}, {"distill": 0.0, "suppress": 0.1}):
        assert same(recipes.fedvls(setting, **on), balanced, federated()) > 1e-5


def test_clients_of_all_labels_are_not_distilled(setting: Setting) -> None:
    source = generator(0, "all labels")
    clients = tuple(
        client_data(torch.randn(15, c.x.shape[1], generator=source), torch.arange(15) % CLASSES, i)
        for i, c in enumerate(make_clients()[:3])
    )
    federation = make_federation(setting.model, clients)
    without = recipes.fedvls(setting, distill=0.0)
    assert same(recipes.fedvls(setting, distill=5.0), without, federation) == 0
    skewed = make_federation(setting.model)
    assert same(recipes.fedvls(setting, distill=5.0), without, skewed) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distill": -1.0}, r"FedVLS's distill .* \(0 is without distillation\), got -1\.0"),
        ({"suppress": float("inf")}, r"FedVLS's suppress .* \(0 is without suppression\), got inf"),
    ],
)
def test_settings_out_of_range_are_refused(
    setting: Setting, options: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        recipes.fedvls(setting, **options)


def test_a_term_by_itself_is_refused_at_zero() -> None:
    for make in (VacantDistillation, LogitSuppression, CountAdjusted):
        with pytest.raises(InputError, match="must be a positive number, got 0"):
            make(3, 0.0)
