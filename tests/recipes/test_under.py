"""Any method under another's weights: the objects built by hand, from files and from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.engine.preflight.method import pals_of
from fedshift.errors import InputError
from fedshift.experiments.config.load import load_with_source
from fedshift.recipes import Setting
from fedshift.recipes.under import under
from fedshift.server.combine import Mean
from fedshift.server.weights import BySize, Pals, Uniform
from fedshift.sweeps.from_file import plan_of
from support.every_method import MAKE
from support.federations import TARGET
from support.small_runs import text_of

FEDPALS = {"weights": "fedpals", "ess": 0.6}


def made(name: str, setting: Setting, **options: Any) -> Method:
    return recipes.recipe(name, options).make(setting, **options)


@pytest.mark.parametrize("name", ["moon", "fedsam", "scaffold", "fedrs", "fednova", "fedadam"])
def test_it_is_the_method_with_another_rule_of_weights(name: str, setting: Setting) -> None:
    plain: Any = getattr(recipes, name)(setting)
    assert made(name, setting, **FEDPALS) == replace(plain, combine=Mean(Pals(TARGET, ess=0.6)))
    assert made(name, setting, weights="size") == replace(plain, combine=Mean(BySize()))
    assert made(name, setting, weights="uniform") == replace(plain, combine=Mean(Uniform()))


def test_a_cap_of_the_setting_bounds_these_weights_too(setting: Setting) -> None:
    capped = replace(setting, cap=0.3)
    (rule, fedpals) = (
        pals_of(one) for one in (made("moon", capped, **FEDPALS), recipes.fedpals(capped, ess=0.6))
    )
    assert rule == fedpals
    assert rule is not None
    assert (rule.cap, rule.strict) == (0.3, False)


def rule_of(algorithm: Any) -> Any:
    return algorithm.combine.weights if hasattr(algorithm, "combine") else rule_of(algorithm.inner)


@pytest.mark.parametrize("name", sorted({*recipes.__all__} - {"Setting"}))
def test_every_method_takes_weights_or_fixes_its_own(name: str, setting: Setting) -> None:
    if name not in MAKE:
        pytest.skip("its rows have other settings")
    plain = MAKE[name](setting)
    fixed = recipes.traits_of(name).fixes_weights
    if fixed:
        with pytest.raises(InputError, match=f"{name} fixes its own weights"):
            recipes.recipe(name, {"weights": "uniform"})
        return
    rule = Pals(TARGET, ess=0.6)
    assert rule_of(under(plain, rule)) == rule
    assert rule_of(plain) != rule


def test_a_method_without_a_mean_is_refused(setting: Setting) -> None:
    for recipe in (recipes.afl, recipes.feddyn, recipes.local_only):
        with pytest.raises(InputError):
            under(recipe(setting), Pals(TARGET, ess=0.6))


def test_a_methods_own_option_keeps_its_meaning() -> None:
    ditto = recipes.recipe("ditto", {"weights": "fedpals"})
    assert list(ditto.options) == ["lam", "weights", "ess", "cap", "fidelity"]
    assert ditto.meanings["lam"].startswith("the pull of the personal model")
    assert not ditto.traits.auto_ess
    assert recipes.recipe("moon", {"weights": "fedpals"}).traits.auto_ess
    assert not recipes.recipe("moon", {"weights": "size"}).traits.auto_ess


# ------------------------------------------------------------------ files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "f.toml"
    path.write_text(text_of("moon").replace('"moon"', '"moon"\nweights = "fedpals"\ness = 0.5'))
    return path


def test_a_file_names_the_weights_beside_the_method(file: Path) -> None:
    config, _ = load_with_source(file, [])
    assert config.method.options == {"weights": "fedpals", "ess": 0.5}
    # Another method on the command line keeps them, and one that fixes its own forgets them.
    changed, _ = load_with_source(file, ["method.name=scaffold"])
    assert changed.method.options == config.method.options
    loaded, _ = load_with_source(file, ["method.name=afl"])
    assert loaded.method.options == {}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["method.name=afl", "method.weights=fedpals"], "afl fixes its own weights; leave out"),
        (["method.weights=fedpal"], 'unknown weights "fedpal"'),
        (["method.weights=3"], 'unknown weights "3"'),
        (["method.weights="], 'unknown key "method.ess" for moon'),
        (["method.weights=size"], 'unknown key "method.ess" for moon'),
        (["method.ess="], "needs ess, as in ess = 0.5 (or lam, as in lam = 10); got neither"),
        (["method.ess=7"], "ess is a fraction of the examples"),
        (["method.weigths=fedpals"], 'Did you mean "weights"?'),
    ],
    ids=str,
)
def test_what_a_file_may_not_say(file: Path, given: list[str], text: str) -> None:
    with pytest.raises(InputError) as refused:
        load_with_source(file, given)
    assert text in str(refused.value)
    assert "method." in str(refused.value)


def test_compare_gives_the_weights_to_the_methods_that_take_them(file: Path) -> None:
    plan, _ = plan_of(file, ["moon", "scaffold", "afl"], [0], [])
    given = {c.label: c.points[0].runs[0].config.method.options for c in plan.contenders}
    both = {"weights": "fedpals", "ess": 0.5}
    assert given == {"moon": both, "scaffold": both, "afl": {}}
    typed, _ = plan_of(file, ["moon", "afl"], [0], ['method.weights="fedpals"', "method.ess=0.25"])
    given = {c.label: c.points[0].runs[0].config.method.options for c in typed.contenders}
    assert given == {"moon": {"weights": "fedpals", "ess": 0.25}, "afl": {}}


# ------------------------------------------------------------------ Python


@pytest.mark.parametrize(("name", "lam"), [("fedprox", True), ("ditto", False)])
def test_fedpals_weights_without_their_ess(name: str, lam: bool, setting: Setting) -> None:
    """Ditto's lam is its own, not that of the weights."""
    made = recipes.recipe(name, {"weights": "fedpals"})
    with pytest.raises(InputError) as refused:
        made.make(setting, weights="fedpals")
    assert str(refused.value).startswith('weights = "fedpals" needs ess, as in ess = 0.5')
    assert ("or lam" in str(refused.value)) == lam
