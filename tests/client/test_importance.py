"""Importance weights: bounds and sizes, the estimates of a ratio, and weights that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.feddisk import FedDisk, WeighExamples
from fedshift.client.importance import (
    Classified,
    Direct,
    NegativeLogDensity,
    PairEntropy,
    bounded,
    effective_size,
    filled,
    scored,
)
from fedshift.client.local import Local, plan_all
from fedshift.client.objectives import View
from fedshift.data import Batch, ClientData
from fedshift.errors import TrainingError
from fedshift.model import Model, build
from fedshift.models.made import Discriminator, Made
from fedshift.seeds import generator
from fedshift.tree import Parts
from support.federations import FEATURES, make_clients

# ------------------------------------------------------------------ bounds and sizes


def drawn(n: int = 40, spread: float = 3.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(n, generator=generator(seed, "logs"), dtype=torch.float64)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 5.0, 400.0])
@pytest.mark.parametrize("low", [0.01, 0.3, 0.9])
def test_weights_keep_to_both_bounds_and_have_mean_one(spread: float, low: float) -> None:
    logs = drawn(spread=spread)
    mask, least = torch.ones(40).bool(), torch.tensor(low, dtype=torch.float64)
    a = bounded(logs, mask, least, 4.0)
    assert float(a.mean()) == pytest.approx(1.0, abs=1e-12)
    assert low - 1e-12 <= float(a.min()) <= float(a.max()) <= 4.0 + 1e-12
    # Between the bounds they are the ratios, up to one factor.
    free = (a > low + 1e-9) & (a < 4.0 - 1e-9)
    factor = a[free].log() - logs[free]
    assert free.any()
    assert float(factor.max() - factor.min()) < 1e-9
    order = logs.argsort()
    assert (a[order].diff() >= 0).all()
    shifted = bounded(logs + 123.0, mask, least, 4.0)
    assert float((a - shifted).abs().max()) < 1e-9


@pytest.mark.parametrize("high", [1.1, 1.7, 2.2, 3.3])
@pytest.mark.parametrize("low", [0.1, 0.7])
def test_no_weight_is_beyond_its_bound(low: float, high: float) -> None:
    """Not by one bit: 1.1 is 1.100000024 as a float32, and e^(log 3.3) is not 3.3."""
    least = torch.tensor(low, dtype=torch.float64)
    for seed in range(20):
        a = bounded(drawn(spread=5.0, seed=seed), torch.ones(40).bool(), least, high)
        assert float(a.max()) == high
        assert float(a.min()) == low
        assert abs(float(a.mean()) - 1) < 1e-14
    assert float(torch.tensor(1.1).double()) > 1.1  # the control: what the bound was


def test_ratios_beyond_the_largest_float_are_weights_too() -> None:
    """Hundreds of nats apart, as log densities of images are: e^d overflows, its clip does not."""
    near = torch.tensor([-900.0, -900.1, -900.2, -900.3], dtype=torch.float64)
    logs = torch.cat([near, torch.tensor([0.0], dtype=torch.float64), near[:3] - 900])
    a = bounded(logs, torch.ones(8).bool(), torch.tensor(0.25, dtype=torch.float64), 4.0)
    free = (8 - 4.0 - 3 * 0.25) * near.softmax(0)  # what the bounds leave to the four between them
    assert a[:4].tolist() == pytest.approx(free.tolist(), rel=1e-12)
    assert a[4:].tolist() == [4.0] + [0.25] * 3
    for seed in range(200):
        a = bounded(drawn(12, 800.0, seed), torch.ones(12).bool(), torch.tensor(0.1), 3.0)
        assert float(a.mean()) == pytest.approx(1.0, abs=1e-6)


def test_wide_bounds_give_the_plain_ratio() -> None:
    """The control: the same logs within tight bounds are something else."""
    logs = drawn(spread=1.0)
    mask = torch.ones(40).bool()
    plain = logs.exp() / logs.exp().mean()
    wide = bounded(logs, mask, torch.tensor(1e-6), 1e6)
    assert float((wide - plain).abs().max()) < 1e-12
    assert float((bounded(logs, mask, torch.tensor(0.2), 2.0) - plain).abs().max()) > 0.1


def test_equal_ratios_and_one_client_give_exactly_one() -> None:
    mask = torch.ones(7).bool()
    for value in (0.0, -611.3, 0.1):
        a = bounded(torch.full((7,), value), mask, torch.tensor(0.3), 10.0)
        assert a.tolist() == [1.0] * 7
    alone = bounded(drawn(7), mask, torch.tensor(1.0), 10.0)
    assert alone.tolist() == [1.0] * 7
    assert bounded(drawn(7), mask, torch.tensor(0.999), 10.0).tolist() != [1.0] * 7


def test_padding_has_no_weight_and_no_say() -> None:
    logs, mask = drawn(12), torch.arange(12) < 9
    a = bounded(logs, mask, torch.tensor(0.1), 5.0)
    alone = bounded(logs[:9], mask[:9], torch.tensor(0.1), 5.0)
    assert torch.equal(a[:9], alone)
    assert not a[9:].any()


def test_effective_sizes() -> None:
    assert float(effective_size(torch.full((6,), 0.3))) == pytest.approx(6.0)
    assert float(effective_size(torch.tensor([1.0, 0.0, 0.0]))) == 1.0
    # One of weight 10 among 90 of weight 0.1, times any factor: (10 + 9)^2 / (100 + 0.9).
    w = torch.cat([torch.tensor([10.0]), torch.full((90,), 0.1)])
    assert float(effective_size(3 * w)) == pytest.approx(361 / 100.9)


# ------------------------------------------------------------------ terms and ratios


def view(out: dict[str, Tensor], w: Tensor) -> View:
    y = torch.zeros(len(w)).long()
    batch = Batch(torch.zeros(len(w), 1), y, w, y, torch.tensor(float(len(w))))
    return View(Model(torch.nn.Identity()), {}, out, batch, {})


def test_losses_are_their_equations() -> None:
    w, q = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([-3.0, -1.0, -50.0])
    assert float(NegativeLogDensity()(view({"log_density": q}, w))) == pytest.approx(5.0 / 3)
    z = torch.tensor([[0.5, -1.0], [2.0, 0.3], [9.0, 9.0]])
    h = z.sigmoid()
    expected = (w * -(h[:, 0].log() + (1 - h[:, 1]).log()) / 2).sum() / 3
    assert float(PairEntropy()(view({"logits": z}, w))) == pytest.approx(float(expected), rel=1e-5)


def densities() -> tuple[Model, dict[str, Tensor], dict[str, Tensor]]:
    model = build(lambda: Made((FEATURES,), (12,), seed=1, low=-3.0, high=3.0), 1)
    p, _ = model.init()
    source = generator(0, "own")
    q = {k: v + 0.3 * torch.randn(v.shape, generator=source) for k, v in p.items()}
    return model, p, q


def test_the_direct_ratio_is_the_difference_of_logs() -> None:
    model, p, q = densities()
    data = make_clients()[3]
    for temper in (1.0, 0.25):
        got, loss = Direct(temper)(model, (p, q), data, {})
        logs = [model(params, {}, data.x)["log_density"] for params in (p, q)]
        assert torch.allclose(got, temper * (logs[0] - logs[1]).double(), atol=1e-5)
        assert float(loss) == pytest.approx(-float(logs[1].mean()), rel=1e-5)
        _, padded = Direct(temper)(model, (p, q), filled(data), {})
        assert float(padded) == pytest.approx(float(loss))


def classified(epochs: int) -> Classified:
    net = build(lambda: Discriminator(FEATURES, 20), 0)
    return Classified(net, Local(lr=0.05, epochs=epochs, batch=20, optimizer="adam"))


def ratio_of(
    estimate: Classified, model: Model, p: Any, q: Any, data: ClientData
) -> tuple[Tensor, Tensor]:
    plans = plan_all(estimate.phases(), data, 1, 0, int(data.id))
    return estimate(model, (p, q), data, plans)


def test_the_classifier_starts_at_one_and_learns_to_tell() -> None:
    model, p, q = densities()
    data = make_clients(sizes=(80,))[0]
    estimate = classified(6)
    ratio, loss = ratio_of(estimate, model, p, q, data)
    same, level = ratio_of(estimate, model, p, p, data)
    assert float(loss) < 0.6 < math.log(2)
    assert float(ratio.mean()) < -0.5  # what only q's network says is taken for q's
    assert float(same.abs().max()) < 0.05  # sampling error of nothing but rounding
    assert float(level) == pytest.approx(math.log(2), abs=1e-3)
    tempered, _ = ratio_of(replace(estimate, temper=0.5), model, p, q, data)
    assert torch.equal(tempered, 0.5 * ratio)


def test_no_row_is_scored_by_the_network_that_saw_it() -> None:
    """Changing one even row moves the scores of odd rows, and of even rows its own alone."""
    model, p, q = densities()
    data = make_clients(sizes=(40,))[0]
    other = data._replace(x=data.x.index_fill(0, torch.tensor([6]), 2.5))
    estimate = classified(2)
    one, two = (ratio_of(estimate, model, p, q, d)[0] for d in (data, other))
    moved = (one != two).nonzero().flatten()
    assert set(moved[moved % 2 == 0].tolist()) <= {6}
    assert (moved % 2 == 1).sum() > 15


def test_blocks_do_not_change_scores() -> None:
    model, p, _ = densities()
    x = torch.randn(600, FEATURES)
    assert torch.allclose(scored(model, p, x)["log_density"], model(p, {}, x)["log_density"])


def test_the_check_is_the_share_of_the_clients_own_examples() -> None:
    weigh = WeighExamples(FedDisk(FedAvg(densities()[0]), densities()[0], least_ess=0.5))
    nothing = torch.zeros(2)
    sizes = {"n": torch.tensor([10.0, 30.0]), "ess": nothing, "estimated": nothing}
    server = {"importance": sizes}

    def fold(ess: float) -> Parts:
        cohort = {"id": torch.tensor([1]), "weight": torch.ones(1)}
        worth = torch.tensor([ess])
        return weigh.server_update(
            server, {"cohort": cohort, "report": {"ess": worth, "estimated": worth}}, 0
        )

    assert fold(15.0)["importance"]["ess"].tolist() == [0.0, 15.0]
    words = r"client 1: .* 30 examples, .* are worth 14.9 \(50 %\)"
    with pytest.raises(TrainingError, match=words):
        fold(14.9)
