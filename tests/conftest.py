"""Fixtures of all rooms, and settings needed before torch computes."""

from __future__ import annotations

import support.poison  # before anything can import an unpickler
import support.processor  # noqa: F401 - before anything is computed

# isort: split
import gc
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from zlib import crc32

import pytest
import torch

from fedshift.client.local import Local
from fedshift.engine.run import Federation
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.federations import CLASSES, FEATURES, TARGET, Normed, make_federation
from support.routing import routed_model
from support.sources import nodes_of


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collected objects live to the end: looking through them for garbage wastes time."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def forgotten_sources() -> Iterator[None]:
    """Free the package's syntax trees after each file: their memory slows later tests."""
    yield
    nodes_of.cache_clear()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`few(n)`: n cases of a test, other ones for each test, stay quick; the rest are slow."""
    families: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            families.setdefault((str(item.path), item.name.partition("[")[0]), []).append(item)
    for (_, name), cases in families.items():
        few = cases[0].get_closest_marker("few")
        assert few is not None
        n, first = few.args[0], crc32(name.encode())
        quick = {(first + i * len(cases) // n) % len(cases) for i in range(n)}
        for i, case in enumerate(cases):
            if i not in quick:
                case.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run sets torch's threads for the whole process; each test starts with one again."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def mlp(request: pytest.FixtureRequest) -> Model:
    """FEATURES-10-CLASSES, from a fixed seed; in files marked `routed`, with a client branch."""
    if request.node.get_closest_marker("routed"):
        return routed_model()
    return build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)


@pytest.fixture
def normed() -> Model:
    """The network with BatchNorm."""
    return build(Normed, seed=2)


@pytest.fixture
def setting(mlp: Model) -> Setting:
    """Two local epochs with batches that do not divide the clients' sizes."""
    return Setting(mlp, TARGET, Local(lr=0.1, epochs=2, batch=8))


@pytest.fixture
def inputs(setting: Setting) -> Setting:
    """The setting with the shape of an input."""
    return replace(setting, shape=(FEATURES,))


@pytest.fixture
def federated(mlp: Model) -> Callable[..., Federation]:
    """`make_federation` bound to the small model."""
    return lambda *args, **kwargs: make_federation(mlp, *args, **kwargs)
