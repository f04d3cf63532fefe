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
from play import GOLDEN, METHODS, attempt, digest, groups, play_method, unlike
from specs import SLOW, SPECS, Numbers, doors, one_door, play_spec

PROBLEMS = 200
# Quick stand-ins for all methods in the default run, of one kind of state each.
FEW = ("scaffold", "labelset_fedavg + kl", "FineTune(Ditto) around fedpals")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")
slow = pytest.mark.slow


def cases() -> dict[str, dict[str, Callable[[], Numbers]]]:
    """Group -> name -> what plays it: all that the golden file holds."""
    every = groups(PROBLEMS)
    specs = {name: every[f"specs {one_door(name)}"][name] for name in SPECS}
    return {"methods loop": every["methods loop"], "weights": every["weights"], "specs": specs}


def moved(group: str, without: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """The names whose numbers are not the golden ones, with the parts at fault."""
    golden, plays = json.loads(GOLDEN.read_text())[group], cases()[group]
    assert golden.keys() == plays.keys()
    assert not [part for parts in golden.values() for part in parts if part.startswith("error")]
    names = [name for name in golden if name not in without]
    parts = {name: unlike(digest(attempt(plays[name])), golden[name], group) for name in names}
    return {name: odd for name, odd in parts.items() if odd}


def test_methods() -> None:
    assert moved("methods loop") == {}


@linux
def test_experiments() -> None:
    assert moved("specs", without=SLOW) == {}


@linux
@slow
def test_slow_experiments() -> None:
    assert moved("specs", without=tuple(SPECS.keys() - {*SLOW})) == {}


def test_weights() -> None:
    """Weights that are certified are the golden ones; of nearly equal clients, others may be."""
    odd = moved("weights")
    unsure = {name for name, parts in odd.items() if "certified" in parts}
    assert odd.keys() == unsure
    assert len([name for name in unsure if " near " in name]) <= 0.3 * PROBLEMS / 3
    assert len([name for name in unsure if " near " not in name]) <= 0.01 * PROBLEMS


def same_bits(a: Numbers, b: Numbers) -> bool:
    """Names, types, shapes and every bit."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes()
        for k in a
    )


@linux
@pytest.mark.parametrize("backend", ["workers", "flower"])
@pytest.mark.parametrize("names", [FEW, pytest.param(METHODS, marks=slow)], ids=["few", "all"])
def test_the_loops_bits(backend: str, names: tuple[str, ...]) -> None:
    if backend == "flower":
        pytest.importorskip("flwr", reason="Flower is not installed (extra flower)")
    pairs = {name: (play_method(name), play_method(name, backend)) for name in names}
    assert [name for name, (loop, other) in pairs.items() if not same_bits(loop, other)] == []


@linux
@pytest.mark.parametrize(
    "name", [n if n == "scaffold, cohorts" else pytest.param(n, marks=slow) for n in SPECS]
)
def test_all_doors_lead_to_the_same_bits(name: str) -> None:
    first, *others = doors(name)
    whole = play_spec(name, first)
    assert [door for door in others if not same_bits(whole, play_spec(name, door))] == []


@slow
@pytest.mark.parametrize("name", ["scaffold, cohorts", "BatchNorm", "feddisk"])
def test_flowers_simulation(name: str) -> None:
    """The same bits of the model."""
    pytest.importorskip("ray", reason="Flower's simulation is not installed (extra flower)")
    here, there = play_spec(name, "python"), play_spec(name, "flower")
    tensors = [k for k in here if "safetensors" in k]
    assert same_bits({k: here[k] for k in tensors}, {k: there[k] for k in tensors})


def test_another_number_is_noticed() -> None:
    """The control."""
    numbers = play_method("fedavg")
    golden = digest(numbers)
    other = {k: v * (1 + 1e-3) if k == "params/head.weight" else v for k, v in numbers.items()}
    assert unlike(digest(other), golden) == {"params"}
    turned = numbers | {"params/head.bias": np.flip(numbers["params/head.bias"])}
    assert unlike(digest(turned), golden) == {"params"}
    assert not same_bits(numbers, other)
