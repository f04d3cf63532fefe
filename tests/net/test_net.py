"""The net: golden numbers of methods, weights and experiments, and the same bits in every way.

Golden numbers hold to 1e-5 on any processor (weights to 1e-9); bits are compared within this tree.
`play.py --golden` writes `golden.json` anew, for a change that is wanted;
`benchmarks/net.py` compares bits with another commit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
import pytest
from play import GOLDEN, METHODS, Numbers, attempt, digest, groups, play_method, unlike

TOLERANCE = {"weights": 1e-9}
PROBLEMS = 200
GROUPS = ("methods loop", "weights")
# Quick stand-ins for all methods in the default run, of one kind of state each.
FEW = (
    "fedpals",
    "scaffold",
    "ditto",
    "labelset_fedavg",
    "feddisk",
    "FineTune(Ditto) around fedpals",
)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


def cases() -> dict[str, dict[str, Callable[[], Numbers]]]:
    """Group -> name -> what plays it: all that the golden file holds."""
    every = groups(PROBLEMS)
    return {group: every[group] for group in GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_golden_numbers(group: str) -> None:
    golden, plays = json.loads(GOLDEN.read_text())[group], cases()[group]
    assert golden.keys() == plays.keys()
    assert not [part for parts in golden.values() for part in parts if part.startswith("error")]
    tolerance = TOLERANCE.get(group, 1e-5)
    now = {name: digest(attempt(play)) for name, play in plays.items()}
    moved = {name: unlike(now[name], golden[name], tolerance) for name in golden}
    assert {name: parts for name, parts in moved.items() if parts} == {}


def same_bits(a: Numbers, b: Numbers) -> bool:
    """Names, types, shapes and every bit."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes()
        for k in a
    )


@linux
@pytest.mark.parametrize("backend", ["workers", "flower"])
@pytest.mark.parametrize("names", [FEW, pytest.param(METHODS, marks=pytest.mark.slow)],
                         ids=["few", "all"])  # fmt: skip
def test_the_loops_bits(backend: str, names: tuple[str, ...]) -> None:
    if backend == "flower":
        pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    pairs = {name: (play_method(name), play_method(name, backend)) for name in names}
    assert [name for name, (loop, other) in pairs.items() if not same_bits(loop, other)] == []


def test_another_number_is_noticed() -> None:
    """The control."""
    numbers = play_method("fedavg")
    golden = digest(numbers)
    moved = {k: v * (1 + 1e-3) if k == "params/head.weight" else v for k, v in numbers.items()}
    assert unlike(digest(moved), golden, 1e-5) == {"params"}
    turned = numbers | {"params/head.bias": np.flip(numbers["params/head.bias"])}
    assert unlike(digest(turned), golden, 1e-5) == {"params"}
    assert not same_bits(numbers, moved)
