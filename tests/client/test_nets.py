"""The first layer in two steps at a time: one step after the other but for rounding."""

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
from fedshift.kernels.products import products
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.chains import MOST, REFUSED, gap
from support.every_method import MAKE, Make
from support.federations import CLASSES, FEATURES, TARGET, double, make_federation


@pytest.fixture(autouse=True)
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On every processor and in float64; how many steps were taken together."""
    found: list[int] = []
    together = Nets.together

    def noted(self: Nets, batch: int) -> int:
        found.append(together(self, batch))
        return found[-1]

    monkeypatch.setattr(module, "by_onednn", lambda a, columns: True)
    monkeypatch.setattr(Nets, "together", noted)
    return found


def setting_of(hidden: tuple[int, ...] = (10, 7), **local: object) -> Setting:
    """Batches that do not divide the clients' sizes, so that some have an odd number of steps."""
    model = build(lambda: Mlp((FEATURES,), hidden, CLASSES), seed=1)
    return Setting(model, TARGET, Local(**{"lr": 0.3, "batch": 12, **local}))  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [k for k in MAKE if k not in REFUSED])
def test_every_method(name: str, pairs: list[int]) -> None:
    setting = setting_of()
    federation = double(make_federation(setting.model))
    most = 1e-12 * MOST.get(name, 1e-6) / 1e-6
    assert gap(MAKE[name], setting, federation, Stacked(dense=True)) < most
    assert set(pairs) <= {1, 2}
    assert 2 in pairs or name != "fedavg"


@pytest.mark.few(3)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("hidden", [(10, 7), ()], ids=["two hidden layers", "none"])
def test_any_number_of_steps(hidden: tuple[int, ...], steps: int, pairs: list[int]) -> None:
    setting = setting_of(hidden, steps=steps, epochs=None)
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, Stacked(dense=True)) < 1e-12
    assert set(pairs) == {2}


def test_layers_without_a_bias(pairs: list[int]) -> None:
    def net() -> nn.Module:
        first = nn.Linear(FEATURES, 10, bias=False)
        return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(10, CLASSES, bias=False))

    setting = replace(setting_of(), model=build(net, seed=1))
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, Stacked(dense=True)) < 1e-12
    assert set(pairs) == {2}


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
    """Trained at once as by the loop, but for rounding."""
    setting = setting_of(**local)
    federation = double(make_federation(setting.model))
    assert gap(make, setting, federation, Stacked(dense=True)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("what", [*MOVES, "bias stays"])
def test_what_else_moves_the_layer_is_taken_step_by_step(what: str, pairs: list[int]) -> None:
    make, local = MOVES.get(what, (recipes.fedavg, {"frozen": ("body.1.bias",)}))
    check(make, local)
    assert set(pairs) == {1}


def test_where_each_has_a_first_layer_of_its_own() -> None:
    """From the second round on."""
    setting = replace(setting_of(), head=("body.1.",))
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedper, setting, federation, Stacked(dense=True)) < 1e-12


def test_another_product_is_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(module, "products", lambda a, b, *first: products(a, b.roll(1, 0), *first))
    setting = setting_of()
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, Stacked(dense=True)) > 1e-4


@pytest.mark.parametrize("kept", [0.0, 1.0], ids=["all", "the bias alone"])
def test_what_a_step_changes_for_the_next_is_needed(
    kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons above can fail."""
    cross = module._cross

    def less(before: Tensor, x: Tensor, bias: bool) -> Tensor:
        return kept * cross(before, x, False)

    monkeypatch.setattr(module, "_cross", less)
    setting = setting_of()
    federation = double(make_federation(setting.model))
    assert gap(recipes.fedavg, setting, federation, Stacked(dense=True)) > 1e-4


def test_the_equation() -> None:
    """z_s of `FirstLayer` are those of a layer that is moved after each step."""
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    w, b, x = drawn(3, 4, 6), drawn(3, 4, 1), drawn(3, 10, 6)
    deltas, rate = [drawn(3, 4, 5), drawn(3, 4, 5)], torch.ones(3, 1, 1, dtype=torch.float64)
    recipe = module.Recipe((module.Layer("w", "b", False),), ("w", "b"), 0.0, 0.0, {}, ())
    at = {"w": w.clone(), "b": b.clone()}
    first = module.FirstLayer(Nets(recipe, at, {}, {}), x, 5)
    for s, z in enumerate(first):
        batch = x[:, 5 * s : 5 * s + 5]
        torch.testing.assert_close(z, w @ batch.transpose(1, 2) + b)
        first.step(deltas[s], rate)
        w, b = w + deltas[s] @ batch, b + deltas[s].sum(-1, keepdim=True)
    torch.testing.assert_close(at, {"w": w, "b": b})
