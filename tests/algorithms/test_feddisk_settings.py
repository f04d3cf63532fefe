"""FedDisk: its refusals, and how options reach it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedshift import recipes
from fedshift.client.importance import Classified, Direct
from fedshift.client.schedules import Cosine
from fedshift.data import client_data
from fedshift.engine.run import run
from fedshift.errors import InputError, TrainingError
from fedshift.model import Model
from fedshift.models.made import Made, MixtureMade
from fedshift.recipes import Setting
from support.by_hand import final, max_difference
from support.densities import direct, fast, weighed


@pytest.mark.slow
def test_degenerate_weights_are_refused(inputs: Setting, federated: Any) -> None:
    narrow = direct(inputs, density_epochs=4, least_ess=0.95, low=-3.0, high=3.0)
    algorithm = replace(fast(narrow), span=None)
    with pytest.raises(TrainingError) as caught:
        weighed(algorithm, federated())
    text = str(caught.value)
    assert text.startswith("client ")
    assert "importance weights of its" in text
    assert "less than least_ess = 0.95 allows" in text
    assert "(density_rounds), lower least_ess" in text  # options of both methods, these first
    assert "in feddisk lower temper or most" in text
    assert "bounds" not in text
    assert weighed(replace(algorithm, least_ess=0.0), federated()).t == 3


def test_inputs_that_the_density_would_clip_are_refused(inputs: Setting, federated: Any) -> None:
    federation = federated()
    x = federation.clients[0].x
    outside = int((x.abs() > 1).sum()) / x.numel()
    message = (
        rf"client 0: {100 * outside:.0f} % of its inputs' values lie outside \[low, high\] = "
        r"\[-1, 1\], where the density clips them; give low and high"
    )
    given: dict[str, Any] = {"density_rounds": 1, "hidden": (4,)}
    algorithm = recipes.feddisk(inputs, density="bernoulli", **given)
    for refused in (algorithm, recipes.made(inputs, **given)):
        with pytest.raises(InputError, match=message):
            final(refused, federation, 1)
    assert final(recipes.feddisk(inputs, **given), federation, 1).t == 1  # mixtures reach further
    assert final(replace(algorithm, span=None), federation, 1).t == 1
    for outliers, ones in ((40, 100), (41, 0)):  # of 800 values: up to 5 % are clipped
        few = torch.where(torch.arange(800) < outliers, 2.0, 0.5).reshape(100, 8)
        data = client_data(few, torch.zeros(100).long(), 2)
        if ones:
            state = algorithm.init_client(federation.params, {}, data)
            assert state["importance"]["a"].sum() == ones
            continue
        with pytest.raises(InputError, match="client 2: 5 % of"):
            algorithm.init_client(federation.params, {}, data)
        padded = data._replace(w=(torch.arange(100) >= 6).to(data.w))
        algorithm.init_client(federation.params, {}, padded)  # padding is not looked at


def test_inputs_that_mixtures_cannot_follow_are_refused(inputs: Setting, federated: Any) -> None:
    """Raw numbers at the default range, whose weights had nothing to do with the true ratio."""
    given: dict[str, Any] = {"density_rounds": 1, "hidden": (4,)}
    clients = federated().clients

    def moved(scale: float, shift: float, **more: Any) -> None:
        raw = [c._replace(x=scale * c.x + shift) for c in clients]
        final(recipes.feddisk(inputs, **given, **more), federated(tuple(raw)), 1)

    message = (
        r"client 0: 100 % of its inputs' values lie more than 5 times as far out as "
        r"\[low, high\] = \[-1, 1\], where the density cannot follow; give low and high that span"
    )
    with pytest.raises(InputError, match=message):
        moved(1.0, 50.0)
    with pytest.raises(InputError, match="times as far out"):
        moved(100.0, 0.0)
    moved(1.0, 50.0, low=46.0, high=54.0)
    moved(100.0, 0.0, low=-300.0, high=300.0)


def test_two_values_at_the_ends_of_the_range_are_inside(inputs: Setting, federated: Any) -> None:
    """Standardised values of tables, which no rounding may put outside."""
    source = torch.Generator().manual_seed(3)
    for _ in range(20):
        low, high = torch.rand(2, generator=source).sub(0.5).mul(7).sort().values
        two = (float(low), float(high))
        method = recipes.feddisk(replace(inputs, two_values=two), hidden=(4,), density_rounds=1)
        data = federated().clients[0]
        data = data._replace(x=torch.where(data.x > 0, high, low))
        method.init_client(federated().params, {}, data)


def test_settings_out_of_range_are_refused(inputs: Setting, normed: Model) -> None:
    for options, message in (
        ({"density_rounds": 0}, "density_rounds must be a whole number of 1 or more, got 0"),
        ({"weighing_rounds": 0}, "weighing_rounds must be a whole number of 1 or more, got 0"),
        ({"density_epochs": 0}, "density_epochs must be a whole number of 1 or more, got 0"),
        ({"ratio_epochs": 0}, "ratio_epochs must be a whole number of 1 or more, got 0"),
        ({"hidden": (0,)}, r"hidden must be widths of layers.*such as \(500,\); got \(0,\)"),
        ({"hidden": 8}, "hidden must be a tuple, each a whole number, got 8"),
        ({"hidden": ("a",)}, 'each a whole number, got a tuple with the text "a"'),
        ({"most": 1.0}, "the largest weight must be finite and above 1, got most = 1.0"),
        ({"most": float("inf")}, "must be finite and above 1, got most = inf"),
        ({"useful": -0.1}, r"useful is a share in \[0, 1\), got -0.1"),
        ({"density": "mixtur"}, 'unknown density of feddisk.*Did you mean "mixture"'),
        ({"least_ess": 1.0}, r"least_ess is a share in \[0, 1\), got 1.0"),
        ({"temper": 0.0}, "temper must be above 0 and at most 1, got 0.0"),
        ({"temper": 1.5, "estimator": "classifier"}, "temper must be above 0 and at most 1, got"),
        ({"estimator": "clasifier"}, 'unknown estimator of feddisk.*Did you mean "classifier"'),
        ({"ordering": "reversed"}, "unknown ordering of MADE"),
        ({"low": 2.0, "high": 1.0}, "low must be below high"),
        ({"high": float("inf")}, "high = inf: low must be below high, and both finite"),
        ({"mu": -1.0}, "MOON's mu must be a number of 0 or more"),
    ):
        for setting in (inputs, replace(inputs, shape=None)):
            with pytest.raises(InputError, match=message):
                direct(setting, **options)
    with pytest.raises(InputError, match="FedDisk's weighing must be at least 1, got 0"):
        replace(direct(inputs), weighing=0)
    with pytest.raises(InputError, match="the density has buffers; masks and the like"):
        replace(direct(inputs), density=normed)


def test_options_reach_the_method(inputs: Setting) -> None:
    given = recipes.feddisk(
        inputs, estimator="classifier", density_epochs=3, ratio_epochs=7, mu=0.5, tau=0.2, most=4.0,
    )  # fmt: skip
    assert (given.local.epochs, given.most) == (3, 4.0)
    assert isinstance(given.ratio, Classified)
    assert given.ratio.local.epochs == 7
    assert given.inner == recipes.moon(inputs, mu=0.5, tau=0.2)
    default = recipes.feddisk(inputs)
    assert (default.rounds, default.weighing, default.most) == (20, 1, 10.0)
    assert (default.least_ess, default.useful) == (0.15, 0.3)
    assert (default.local.epochs, default.local.batch) == (1, 100)
    assert default.local.lr == Cosine(1e-3, 20)
    assert default.inner == recipes.fedavg(inputs)


def test_the_ratio_by_default_is_direct_and_not_tempered(inputs: Setting) -> None:
    assert recipes.feddisk(inputs).ratio == Direct(1.0)
    report = recipes.made(inputs)
    assert isinstance(report.ratio, Classified)
    assert (report.ratio.temper, report.useful, report.local.lr) == (1.0, 0.0, 1e-3)
    assert report.span == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "two", "density", "kind"),
    [
        ((8,), None, "auto", MixtureMade),
        ((8,), (0.0, 1.0), "auto", Made),
        ((1, 3, 3), None, "auto", Made),
        ((1, 3, 3), None, "mixture", MixtureMade),
        ((8,), None, "bernoulli", Made),
    ],
)
def test_the_kind_of_density_follows_the_inputs(
    inputs: Setting, shape: tuple[int, ...], two: Any, density: Any, kind: type
) -> None:
    setting = replace(inputs, shape=shape, two_values=two)
    # The two values are the range of a binary density, and another one is refused.
    span: dict[str, Any] = {} if two else {"low": -2.0, "high": 2.0}
    made = recipes.feddisk(setting, density=density, **span)
    net = made.network().net
    assert type(net) is kind
    assert (net.low, net.high) == (two or (-2.0, 2.0))
    assert made.span == (net.low, net.high)
    assert made.reach == (5.0 if kind is MixtureMade else 1.0)
    # Of grey values the likelihood is no density, and the rate stays as in the report.
    falls = kind is MixtureMade or two is not None
    assert made.local.lr == (Cosine(1e-3, 20) if falls else 1e-3)


def test_without_the_shape_of_inputs_nothing_starts(setting: Setting, federated: Any) -> None:
    """The recipe can be listed and its options checked; a run is refused before its first round."""
    algorithm = recipes.feddisk(setting)
    message = r"no density network: .* Setting\(..., shape=\(1, 28, 28\)\)"
    with pytest.raises(InputError, match=message):
        next(run(algorithm, federated(), 30))


def test_a_shape_that_is_not_the_inputs_is_refused(inputs: Setting, federated: Any) -> None:
    """Before training, and not in torch's words alone."""
    given: dict[str, Any] = {"density_rounds": 1, "hidden": (4,), "low": -8.0, "high": 8.0}
    with pytest.raises(InputError, match=r"client 0: FedDisk's density .* shape=\(8,\)\), that of"):
        final(recipes.feddisk(replace(inputs, shape=(3,)), **given), federated(), 1)
    assert final(recipes.feddisk(replace(inputs, shape=(2, 4)), **given), federated(), 1).t == 1


def test_the_first_densities_belong_to_the_settings_seed(inputs: Setting) -> None:
    a, b, c = (direct(replace(inputs, seed=k)).network().init()[0] for k in (0, 0, 1))
    assert max_difference(a, b) == 0
    assert max_difference(a, c) > 1e-3
    nets = [direct(replace(inputs, seed=k), ordering="random").network().net for k in (0, 0, 1)]
    orders = [tuple(net.degrees[0]) for net in nets if isinstance(net, MixtureMade)]
    assert orders[0] == orders[1] != orders[2]  # and so do the masks
