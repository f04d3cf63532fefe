"""Modules that have moved are still imported from where they were, with a warning."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

from fedshift.algorithms import steps
from fedshift.client import local

NAMES = ("context_of", "train_locally", "train_phases")
MOVED = [
    ("fedshift.engine.rounds", "fedshift.engine.run", ("Federation", "Round", "run")),
    ("fedshift.engine.gate", "fedshift.engine.checks.gate", ("Gate",)),
    ("fedshift.engine.workers", "fedshift.engine.processes.pool", ("workers",)),
    ("fedshift.engine.stacked", "fedshift.engine.stacking.stacked", ("Stacked",)),
    ("fedshift.engine.levers", "fedshift.engine.trainers", ("dense", "channels_last")),
    ("fedshift.engine.shelf", "fedshift.engine.storage.client_states", ("Shelf",)),
]


@pytest.mark.parametrize(("old", "new", "names"), MOVED, ids=[old for old, *_ in MOVED])
def test_the_former_path_warns_and_gives_the_same(
    old: str, new: str, names: tuple[str, ...]
) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        former = import_module(old)
    assert former is import_module(new)
    assert all(hasattr(former, name) for name in names)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_moved_warns_and_is_the_same(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"is fedshift.client.local.{name} now"):
        assert getattr(steps, name) is getattr(local, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        steps.__getattr__("nothing")
