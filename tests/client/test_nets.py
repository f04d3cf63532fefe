"""The first layer with two steps at a time: the same as one by one, up to rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.client.dense import nets as module
from fedshift.client.dense.nets import Nets
from fedshift.client.local import Local
from fedshift.engine.stacking.stacked import Stacked
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.chains import MOST, REFUSED, gap, may_refuse, with_other_labels
from support.every_method import MAKE, Make
from support.federations import CLASSES, FEATURES, TARGET, double, make_federation


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken together on every processor, and in float64."""
    monkeypatch.setattr(module, "by_onednn", lambda a, columns: True)


def setting_of(hidden: tuple[int, ...] = (10, 7), **local: object) -> Setting:
    """Batches that do not divide the clients' sizes, so that some have an odd number of steps."""
    model = build(lambda: Mlp((FEATURES,), hidden, CLASSES), seed=1)
    return Setting(model, TARGET, Local(**{"lr": 0.3, "batch": 12, **local}))  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [k for k in MAKE if k not in REFUSED])
def test_every_method(name: str) -> None:
    setting = setting_of()
    federation = double(make_federation(setting.model))
    most = 1e-12 * MOST.get(name, 1e-6) / 1e-6
    with may_refuse(name):
        assert gap(MAKE[name], setting, federation, Stacked(dense=True)) < most


@pytest.mark.few(3)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("hidden", [(10, 7), ()], ids=["two hidden layers", "none"])
def test_any_number_of_steps(hidden: tuple[int, ...], steps: int) -> None:
    setting = setting_of(hidden, steps=steps, epochs=None)
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, Stacked(dense=True)) < 1e-12


def test_layers_without_a_bias() -> None:
    def net() -> nn.Module:
        first = nn.Linear(FEATURES, 10, bias=False)
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(10, CLASSES, bias=False))

    setting = replace(setting_of(), model=build(net, seed=1))
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, Stacked(dense=True)) < 1e-12


# What moves the first layer's weight otherwise than by its gradient alone, or not at all.
MOVES: dict[str, tuple[Make, dict[str, object]]] = {
    "momentum": (recipes.fedavg, {"momentum": 0.5}),
    "decay": (recipes.fedavg, {"decay": 0.1}),
    "proximal": (recipes.fedprox, {}),
    "shift": (recipes.scaffold, {}),
    "weight stays": (recipes.fedavg, {"frozen": ("body.1.weight",)}),
    "layer stays": (recipes.fedavg, {"frozen": ("body.1",)}),
}


def check(make: Make, local: dict[str, object]) -> None:
    """Train at once and by the loop: the same up to rounding."""
    setting = setting_of(**local)
    federation = double(make_federation(setting.model))
    assert gap(make, setting, federation, Stacked(dense=True)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("what", [*MOVES, "bias stays"])
def test_with_what_else_moves_the_layer(what: str) -> None:
    make, local = MOVES.get(what, (recipes.fedavg, {"frozen": ("body.1.bias",)}))
    check(make, local)


def test_steps_are_taken_together_where_gradients_alone_move_the_layer() -> None:
    """Two at a time; one where anything else moves its weight or its bias, or either stays."""
    layer = module.Layer("w", "b", False)
    plain = module.Recipe((layer,), ("w", "b"), 0.0, 0.0, {}, ())

    def together(recipe: module.Recipe) -> int:
        at = {"w": torch.zeros(3, 4, 6), "b": torch.zeros(3, 4, 1)}
        named = {f"{what} {k}": v for k, v in at.items() for what in ("anchor", "shift")}
        return Nets.of(recipe, at, named).together(5)

    assert together(plain) == 2
    assert together(replace(plain, layers=(layer._replace(bias=None),), moving=("w",))) == 2
    for change in (
        {"momentum": 0.5}, {"decay": 0.1}, {"pulled": {"w": 0.1}}, {"pulled": {"b": 0.1}},
        {"shifted": ("w",)}, {"moving": ("w",)}, {"moving": ("b",)},
    ):  # fmt: skip
        assert together(replace(plain, **change)) == 1  # type: ignore[arg-type]


def test_where_each_has_a_first_layer_of_its_own() -> None:
    """From the second round on."""
    setting = replace(setting_of(), head=("body.1.",))
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedper, setting, federation, Stacked(dense=True)) < 1e-12


def test_another_batch_is_another_result() -> None:
    """The comparison can fail."""
    setting = setting_of()
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, with_other_labels(Stacked(dense=True))) > 1e-4


def test_the_equation() -> None:
    """z_s of `FirstLayer` are those of a layer that is moved after each step.

    The controls: without the first step, or with its part of the weight alone, the second differs.
    """
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    w, b, x = drawn(3, 4, 6), drawn(3, 4, 1), drawn(3, 10, 6)
    deltas, rate = [drawn(3, 4, 5), drawn(3, 4, 5)], torch.ones(3, 1, 1, dtype=torch.float64)
    recipe = module.Recipe((module.Layer("w", "b", False),), ("w", "b"), 0.0, 0.0, {}, ())
    at = {"w": w.clone(), "b": b.clone()}
    before = {"w": w, "b": b}
    first = module.FirstLayer(Nets(recipe, at, {}, {}), x, 5)
    for s, z in enumerate(first):
        batch = x[:, 5 * s : 5 * s + 5]
        torch.testing.assert_close(z, w @ batch.transpose(1, 2) + b)
        if s:
            for weight, bias in ((before["w"], before["b"]), (w, before["b"]), (before["w"], b)):
                assert float((z - weight @ batch.transpose(1, 2) - bias).abs().max()) > 0.1
        first.step(deltas[s], rate)
        w, b = w + deltas[s] @ batch, b + deltas[s].sum(-1, keepdim=True)
    torch.testing.assert_close(at, {"w": w, "b": b})
