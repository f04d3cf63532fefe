"""Clients that no weighing round draws, estimated and true log weights, and idle options."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import recipes
from fedshift.algorithms.weighing import (
    Estimate,
    centred,
    compare_log_weights,
    rounds_for_all,
    unweighed,
)
from fedshift.engine.run import draw_cohort
from fedshift.errors import InputError, NeedlessWarning, TrainingError
from fedshift.recipes import Setting
from support.by_hand import final, max_difference
from support.densities import direct, weighed
from support.federations import SIZES

# ------------------------------------------------------------------ weighing rounds


def share_complete(clients: int, drawn: int, rounds: int, runs: int = 400) -> float:
    """Share of runs of which every client is drawn in the first rounds."""
    seen = [
        len(
            {i for t in range(1, rounds + 1) for i in draw_cohort(clients, drawn, t, seed).tolist()}
        )
        for seed in range(runs)
    ]
    return sum(n == clients for n in seen) / runs


def test_so_many_rounds_draw_all_clients_in_95_percent_of_runs() -> None:
    """By the engine's own cohorts; the mean number of rounds, 5.5, is the control."""
    assert rounds_for_all(1, 2, 1 / 3) == 11
    left_out = 3 * (2 / 3) ** 11 - 3 * (1 / 3) ** 11  # inclusion and exclusion
    assert left_out < 0.05 < 3 * (2 / 3) ** 9 - 3 * (1 / 3) ** 9
    assert share_complete(3, 1, 11) > 0.94
    assert share_complete(3, 1, 6) == pytest.approx(1 - 0.26, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "drawn"), [(10, 2), (20, 10), (30, 3)])
def test_so_do_those_of_other_cohorts(clients: int, drawn: int) -> None:
    rounds = rounds_for_all(1, clients - drawn, drawn / clients)
    assert share_complete(clients, drawn, rounds) > 0.93
    assert share_complete(clients, drawn, rounds // 2) < 0.9


def test_at_least_one_round_more_is_named() -> None:
    assert rounds_for_all(4, 1, 1.0) == 5  # a reply was lost
    assert rounds_for_all(4, 1, 0.999) == 5
    # From where a run stands the bound is on those that are left.
    assert rounds_for_all(12, 1, 1 / 3) == 12 + 8
    assert (2 / 3) ** 8 < 0.05 < (2 / 3) ** 7


def warnings_of(method: Any, federation: Any, cohort: int | None = None) -> tuple[list[str], int]:
    """The warnings of clients that are left out, and how many are."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NeedlessWarning)
        last = weighed(method, federation, cohort)
    texts = [text for one in caught if "weighing round" in (text := str(one.message))]
    return texts, len(unweighed(last.server["importance"]))


def test_python_is_warned_once_at_the_end_of_weighing(inputs: Setting, federated: Any) -> None:
    """It is silent with the number of rounds that it names, with all clients, and in a control."""
    clients, federation = len(SIZES), federated()

    def method(rounds: int, **more: Any) -> Any:
        return direct(inputs, density_rounds=1, weighing_rounds=rounds, **more)

    (text,), left = warnings_of(method(2), federation, 2)
    needed = rounds_for_all(2, left, 2 / clients)
    assert text.startswith(f"{left} of {clients} clients were in no weighing round, and all")
    assert f"give weighing_rounds = {needed}, so that all are drawn in 95 % of runs" in text
    assert text.endswith(f"and {needed - 2} more rounds to the run")
    assert warnings_of(method(needed), federation, 2) == ([], 0)
    assert warnings_of(method(1), federation) == ([], 0)
    texts, left = warnings_of(method(1, estimator="equal"), federation, 2)
    assert (texts, left) == ([], clients - 2)


def test_clients_without_examples_have_none_to_weigh() -> None:
    n = torch.tensor([5.0, 0.0, 7.0], dtype=torch.float64)
    assert unweighed({"n": n, "ess": torch.tensor([4.0, 0.0, 0.0])}) == [2]
    assert unweighed({"n": n, "ess": torch.tensor([4.0, 0.0, 1.0])}) == []


# ------------------------------------------------------------------ slope


def follows(slope: float, noise: float = 0.0) -> Estimate:
    source = np.random.default_rng(0)
    true = [source.normal(size=50) + 3.0, source.normal(size=80)]
    estimated = [slope * t + noise * source.normal(size=len(t)) - 7.0 for t in true]
    return Estimate(centred(true), centred(estimated))


def test_the_slope_is_that_of_least_squares() -> None:
    of = follows(0.9, noise=0.5)
    (slope,), *_ = np.linalg.lstsq(of.true[:, None], of.estimated)
    assert of.slope == pytest.approx(slope, rel=1e-12)
    assert of.slope != pytest.approx(0.9, abs=1e-3)
    # Each client's constant cancels: the same without a shift between them.
    assert follows(0.9).slope == pytest.approx(0.9, rel=1e-12)
    assert follows(0.9).correlation == pytest.approx(1.0)


def test_slopes_beyond_the_bounds_name_a_cure() -> None:
    for right in (0.81, 1.0, 1.19):
        figures = f"with slope {right:.2f} and correlation 1.00"
        assert follows(right).sentence().endswith(figures)
    for little in (0.79, 0.05, -1.0):
        assert "below 0.8 they do too little. Fit for more rounds" in follows(little).sentence()
    assert follows(1.25).sentence().endswith("take feddisk with temper 0.80 times as large")
    assert "above 1.2 they do too much" in follows(1.25).sentence()


def test_a_temper_as_named_puts_the_slope_right() -> None:
    """The ratio is multiplied by temper, so that 1 / slope of it has the slope 1."""
    of = follows(1.6, noise=0.1)
    times = float(of.sentence().rpartition("temper ")[2].split()[0])
    assert Estimate(of.true, times * of.estimated).slope == pytest.approx(1.0, abs=0.01)


def test_weights_that_are_all_alike_have_no_slope() -> None:
    of = follows(1.0)
    assert Estimate(of.true, 0 * of.true).sentence() == ""
    assert Estimate(1e-9 * of.true, of.estimated).sentence() == ""


def test_python_can_ask_for_the_slope_of_a_run(inputs: Setting, federated: Any) -> None:
    """Of true weights it is 1; of those of half the ratio, half; weights of 1 have none."""
    source = torch.Generator().manual_seed(4)
    ratios = tuple(0.2 * torch.randn(n, generator=source, dtype=torch.float64) for n in SIZES)
    federation = federated()

    def slope(scale: float, **options: Any) -> float | None:
        setting = replace(inputs, log_ratios=tuple(scale * r for r in ratios))
        last = weighed(direct(setting, estimator="true", **options), federation)
        estimate = compare_log_weights(last.server, last.states, federation.clients, ratios)
        return None if estimate is None else estimate.slope

    assert slope(1.0) == pytest.approx(1.0, abs=1e-12)
    assert slope(0.5) == pytest.approx(0.5, abs=0.02)
    assert slope(1.0, useful=0.999) is None
    last = weighed(direct(inputs), federation)
    with pytest.raises(InputError, match="give log_ratios one for each example of each client"):
        compare_log_weights(last.server, last.states, federation.clients, ratios[:1])


# ------------------------------------------------------------------ options without effect


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["true", "equal", "direct"])
def test_options_that_are_refused_would_change_nothing(
    estimator: str, inputs: Setting, federated: Any
) -> None:
    """Epochs and order of densities leave a control's bits, and not those of the direct ratio."""
    source = torch.Generator().manual_seed(4)
    ratios = tuple(torch.randn(n, generator=source, dtype=torch.float64) for n in SIZES)
    setting = replace(inputs, log_ratios=ratios)
    plain = direct(setting, estimator=estimator, least_ess=0.0)
    for option, field in (({"density_epochs": 3}, "local"), ({"ordering": "random"}, "density")):
        other = direct(setting, estimator="direct", least_ess=0.0, **option)
        changed = replace(plain, **{field: getattr(other, field)})
        a, b = (final(m, federated(), 5).server for m in (plain, changed))
        assert (max_difference(a["params"], b["params"]) == 0) == (estimator != "direct")
        assert max_difference(a["density"], b["density"]) > 0  # the option is at work
        if estimator != "direct":
            with pytest.raises(InputError, match=f"{next(iter(option))} is for densities that"):
                direct(setting, estimator=estimator, **option)


def test_the_kind_of_density_decides_what_is_refused_in_controls_too(
    inputs: Setting, federated: Any
) -> None:
    """So it is no idle option there."""
    given: dict[str, Any] = {"estimator": "equal", "density_rounds": 1, "hidden": (4,)}
    assert final(recipes.feddisk(inputs, density="mixture", **given), federated(), 1).t == 1
    with pytest.raises(InputError, match="where the density clips them"):
        final(recipes.feddisk(inputs, density="bernoulli", **given), federated(), 1)


def test_a_temperature_without_its_term_is_refused(inputs: Setting) -> None:
    with pytest.raises(InputError, match=r"tau is the temperature of MOON's term, and with mu=0"):
        recipes.feddisk(inputs, tau=0.2)
    assert recipes.feddisk(inputs, tau=0.5).inner == recipes.fedavg(inputs)
    assert recipes.feddisk(inputs, mu=0.1, tau=0.2).inner == recipes.moon(inputs, mu=0.1, tau=0.2)


@pytest.mark.parametrize("option", [{"most": 2.0}, {"useful": 0.7}, {"least_ess": 0.9}])
def test_bounds_on_weights_of_one_are_refused(
    option: dict[str, float], inputs: Setting, federated: Any
) -> None:
    """They leave the control's bits, and not those of ratios that differ."""
    (name,) = option
    with pytest.raises(InputError, match=f"^{name} is a bound on weights that differ, and with"):
        recipes.feddisk(inputs, estimator="equal", **option)
    recipes.feddisk(inputs, estimator="equal", useful=0.0, least_ess=0.0)  # they ask nothing
    wide = tuple(3.0 * torch.arange(n, dtype=torch.float64) / n for n in SIZES)
    setting = replace(inputs, log_ratios=wide)

    def end(estimator: str, **more: float) -> Any:
        plain = direct(setting, estimator=estimator, least_ess=0.0)
        return final(replace(plain, **more), federated(), 3)

    weights = [end("equal", **more).states[0]["importance"]["a"] for more in ({}, option)]
    assert torch.equal(*weights)
    if name == "least_ess":
        with pytest.raises(TrainingError, match="less than least_ess = 0.9 allows"):
            end("true", **option)
        return
    weights = [end("true", **more).states[0]["importance"]["a"] for more in ({}, option)]
    assert not torch.equal(*weights)


def test_a_least_share_that_useful_forestalls_is_refused(inputs: Setting) -> None:
    """Weights worth less than useful are 1 before least_ess is asked."""
    for least, useful in ((0.2, 0.3), (0.3, 0.3), (0.5, 0.6)):
        with pytest.raises(
            InputError, match=f"least_ess={least} ends no run where useful={useful}"
        ):
            recipes.feddisk(inputs, least_ess=least, useful=useful)
    for least, useful in ((0.5, 0.3), (0.2, 0.0), (0.15, 0.3), (0.05, 0.3)):
        assert recipes.feddisk(inputs, least_ess=least, useful=useful).least_ess == least


def test_a_range_beside_that_of_two_values_is_refused(inputs: Setting) -> None:
    two = replace(inputs, two_values=(0.0, 1.0))
    with pytest.raises(InputError, match='all inputs are 0 or 1, which density="auto" takes for'):
        recipes.feddisk(two, low=-5.0, high=9.0)
    assert recipes.feddisk(two, low=0.0, high=1.0).span == (0.0, 1.0) == recipes.feddisk(two).span
    assert recipes.feddisk(two, density="bernoulli", low=-5.0, high=9.0).span == (-5.0, 9.0)
