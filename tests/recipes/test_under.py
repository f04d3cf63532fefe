"""Any method under another's weights: the objects built by hand, from files and from Python."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import fedshift as fs
from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.engine.preflight.method import pals_of
from fedshift.errors import InputError
from fedshift.experiments.config.load import load_with_source
from fedshift.recipes import Setting
from fedshift.recipes.under import under
from fedshift.server.combine import Mean
from fedshift.server.robust import Geometric
from fedshift.server.weights import BySize, Pals, Uniform
from fedshift.sweeps.from_file import plan_of
from support.by_hand import final, max_difference
from support.custom_tasks import hospitals
from support.every_method import MAKE
from support.federations import TARGET
from support.small_runs import text_of

FEDPALS = {"weights": "fedpals", "ess": 0.6}


def made(name: str, setting: Setting, **options: Any) -> Algorithm:
    return recipes.recipe(name, options).make(setting, **options)


@pytest.mark.parametrize("name", ["moon", "fedsam", "scaffold", "fedrs", "fednova", "fedadam"])
def test_it_is_the_method_with_another_rule_of_weights(name: str, setting: Setting) -> None:
    plain: Any = getattr(recipes, name)(setting)
    assert made(name, setting, **FEDPALS) == replace(plain, combine=Mean(Pals(TARGET, ess=0.6)))
    assert made(name, setting, weights="size") == replace(plain, combine=Mean(BySize()))
    assert made(name, setting, weights="uniform") == replace(plain, combine=Mean(Uniform()))


def test_the_contracts_rows_play_these_objects_in_every_way(setting: Setting) -> None:
    assert made("moon", setting, **FEDPALS) == MAKE["fedpals + moon"](setting)
    closest: dict[str, Any] = {"weights": "fedpals", "lam": 0.0}
    assert made("scaffold", setting, **closest) == MAKE["scaffold + fedpals"](setting)


def test_fedpals_is_fedavg_under_its_weights(setting: Setting, federated: Any) -> None:
    """With mu it is FedProx under them, bit for bit; without them FedProx is another method."""
    assert made("fedavg", setting, **FEDPALS) == recipes.fedpals(setting, ess=0.6)
    pulled = recipes.fedpals(setting, lam=5.0, mu=0.1, cap=0.4)
    options: dict[str, Any] = {"weights": "fedpals", "lam": 5.0, "mu": 0.1, "cap": 0.4}
    under_pals = made("fedprox", setting, **options)
    assert under_pals == pulled
    ours, theirs, plain = (
        final(one, federated()).server["params"]
        for one in (under_pals, pulled, recipes.fedprox(setting, mu=0.1))
    )
    assert max_difference(ours, theirs) == 0
    assert max_difference(ours, plain) > 1e-4


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


def usual(algorithm: Any) -> bool:
    """Whether a method's weights are those of its structure."""
    if not hasattr(algorithm, "combine"):
        return hasattr(algorithm, "inner") and usual(algorithm.inner)
    if isinstance(algorithm.combine, Geometric):
        return True
    default = next(f.default for f in fields(algorithm) if f.name == "combine")
    return bool(algorithm.combine == default) and not getattr(algorithm, "fisher", False)


@pytest.mark.parametrize("name", sorted({*recipes.__all__} - {"Setting"}))
def test_every_method_takes_weights_or_fixes_its_own(name: str, setting: Setting) -> None:
    if name not in MAKE:
        pytest.skip("its rows have other settings")
    plain = MAKE[name](setting)
    fixed = recipes.traits_of(name).fixes_weights
    assert usual(plain) != fixed, f"{name}: `@method(Traits(fixes_weights={not fixed}))` is true"
    if fixed:
        with pytest.raises(InputError, match=f"{name} fixes its own weights"):
            recipes.recipe(name, {"weights": "uniform"})
        return
    rule = Pals(TARGET, ess=0.6)
    assert rule_of(under(plain, rule)) == rule
    assert rule_of(plain) != rule


def test_a_method_without_a_mean_is_refused(setting: Setting) -> None:
    with pytest.raises(InputError, match="Afl has no mean of its clients to be weighed"):
        under(recipes.afl(setting), BySize())


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


def test_an_option_without_its_weights_says_whose_it_is(file: Path) -> None:
    with pytest.raises(InputError, match=r'weights = "fedpals" has ess'):
        load_with_source(file, ["method.weights="])


def test_compare_gives_the_weights_to_the_methods_that_take_them(file: Path) -> None:
    plan, _ = plan_of(file, ["moon", "scaffold", "afl"], [0], [])
    given = {c.label: c.points[0].runs[0].config.method.options for c in plan.contenders}
    both = {"weights": "fedpals", "ess": 0.5}
    assert given == {"moon": both, "scaffold": both, "afl": {}}
    typed, _ = plan_of(file, ["moon", "afl"], [0], ['method.weights="fedpals"', "method.ess=0.25"])
    given = {c.label: c.points[0].runs[0].config.method.options for c in typed.contenders}
    assert given == {"moon": {"weights": "fedpals", "ess": 0.25}, "afl": {}}


# ------------------------------------------------------------------ Python

QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "backend": "loop", "progress": False}


@pytest.mark.slow
def test_fit_takes_the_key_as_an_option_of_the_method() -> None:
    task = hospitals()
    one = fs.fit(task, "linear", method="fedprox", mu=0.1, weights="fedpals", ess=0.5, **QUICK)
    two = fs.fit(task, "linear", method=fs.method("fedpals", mu=0.1, ess=0.5), **QUICK)
    three = fs.fit(
        task, "linear", method=fs.method("fedprox", mu=0.1, weights="fedpals", ess=0.5), **QUICK
    )
    plain = fs.fit(task, "linear", method="fedprox", mu=0.1, **QUICK)
    models = [(r.folder / "model.safetensors").read_bytes() for r in (one, two, three, plain)]
    assert models[0] == models[1] == models[2]
    assert models[0] != models[3]


def test_ess_is_chosen_where_none_is_given() -> None:
    chosen = fs.fit(hospitals(), "linear", method="fedsam", weights="fedpals", **QUICK)
    assert chosen.summary.selection is not None
    assert len(chosen.summary.selection.candidates) > 1


def test_what_python_may_not_say() -> None:
    with pytest.raises(InputError, match="afl fixes its own weights"):
        fs.method("afl", weights="fedpals")
    with pytest.raises(InputError, match=r'moon has no option "ess".*weights = "fedpals" has ess'):
        fs.method("moon", ess=0.5)
    with pytest.raises(InputError, match='unknown weights "fedpal".*Did you mean "fedpals"'):
        fs.method("moon", weights="fedpal")


@pytest.mark.parametrize(("name", "lam"), [("fedprox", True), ("ditto", False)])
def test_fedpals_weights_without_their_ess(name: str, lam: bool, setting: Setting) -> None:
    """Ditto's lam is its own, not that of the weights."""
    made = recipes.recipe(name, {"weights": "fedpals"})
    with pytest.raises(InputError) as refused:
        made.make(setting, weights="fedpals")
    assert str(refused.value).startswith('weights = "fedpals" needs ess, as in ess = 0.5')
    assert ("or lam" in str(refused.value)) == lam
