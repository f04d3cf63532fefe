"""Pages of methods: each says how clients are weighed, as the method does it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.engine.run import start
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import make_federation
from support.routing import routed_model, routed_setting

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in (ROOT / "docs/methods").glob("*.md") if p.name != "README.md")
NAMED = [name for name in MAKE if name in recipes.__all__]


def weights_rows(page: str) -> list[str]:
    """The rows "weights" of a page's tables."""
    return re.findall(r"^\| weights \| (.+) \|$", page, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_page_says_how_clients_are_weighed(page: Path) -> None:
    assert len(weights_rows(page.read_text())) == 1


def kind(weights: Tensor, n: Tensor) -> str:
    """The kind of a method's weights, in the words of the pages."""
    if float((weights - n / n.sum()).abs().max()) < 1e-12:
        return "sample size"
    return "uniform" if float((weights - 1 / len(n)).abs().max()) < 1e-12 else "target|rule"


def weighed(algorithm: Method) -> str:
    """The kind of the weights in round 1, of six clients of 7 to 40 examples."""
    federation = make_federation(algorithm.model)
    server, stage = start(algorithm, federation).server, algorithm.at(1)
    return kind(stage.weigh(server, torch.arange(6)), federation.table["n"])


@pytest.mark.parametrize("name", NAMED)
def test_the_row_is_what_the_method_does(name: str, setting: Setting) -> None:
    if recipes.recipe(name).traits.router:
        setting = routed_setting(routed_model())
    (row,) = weights_rows((ROOT / recipes.recipe(name).page).read_text())
    assert re.search(weighed(MAKE[name](setting)), row)


def test_other_weights_would_be_seen(setting: Setting) -> None:
    kinds = {name: weighed(MAKE[name](setting)) for name in ("fedavg", "scaffold", "fedpals")}
    assert len(set(kinds.values())) == 3
    (row,) = weights_rows((ROOT / "docs/methods/scaffold.md").read_text())
    assert not re.search(kinds["fedavg"], row)
    assert weights_rows("| weighs | by sample size |") == []
