"""The backend `winograd`: rounds of the loop but for rounding, and networks that it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from fedshift import recipes
from fedshift.client import winograd as form
from fedshift.client.local import Local
from fedshift.client.winograd import Winograd
from fedshift.data import client_data, register
from fedshift.engine.backends import Forgiving, loop
from fedshift.engine.checks.replies import failure
from fedshift.engine.levers import channels_last, winograd
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import Federation, run
from fedshift.engine.stacked import Stacked
from fedshift.errors import InputError, UnfitError
from fedshift.experiments.config import Network
from fedshift.experiments.engines import Way, backend_of
from fedshift.experiments.networks import network
from fedshift.model import build
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.tree import Parts, sub
from support.convolutions import apart
from support.federations import CLASSES, TARGET, make_federation, one_job
from support.photographs import images
from support.rounds import last

pytestmark = pytest.mark.usefixtures("narrow")


class Deep(nn.Module):
    """A convolution of each kind: the first is torch's, the others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 64, 3, padding=1)
        self.two = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.three = nn.Conv2d(64, 64, 5, padding=2)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x).relu()).relu()
        return self.head(self.three(x).mean((2, 3)))


def deep(dtype: torch.dtype) -> tuple[Federation, Setting]:
    source = generator(0, "deep")
    clients = [
        client_data(
            torch.randn(n, 1, 8, 8, generator=source).to(dtype),
            torch.randint(CLASSES, (n,), generator=source), i,
        )
        for i, n in enumerate((9, 6))
    ]  # fmt: skip
    model = build(Deep, 1)
    params = {k: v.to(dtype) for k, v in model.init()[0].items()}
    federation = Federation(clients, params, {}, register(clients, CLASSES), Seeds.of(0))
    return federation, Setting(model, TARGET, Local(lr=0.1, batch=5))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_a_round_is_the_loops_but_for_rounding(dtype: torch.dtype, most: float) -> None:
    """And on workers that of one process bit for bit."""
    federation, setting = deep(dtype)
    algorithm = recipes.fedavg(setting)
    plain = last(run(algorithm, federation, 2)).server["params"]
    other = last(run(algorithm, federation, 2, backend=winograd(loop))).server["params"]
    gaps, moved = sub(other, plain), sub(plain, federation.params)
    apart = max(float(gaps[k].norm() / moved[k].norm()) for k in gaps)
    assert 0 < apart < most
    with workers(federation.clients, 2) as team:
        spread = last(run(algorithm, federation, 2, backend=winograd(team))).server["params"]
    assert all(torch.equal(spread[k], other[k]) for k in other)


def test_a_network_without_such_convolutions_is_refused() -> None:
    """By the lever and by the name that users give; a network without any goes on."""
    federation, setting = images(3, torch.float32)
    algorithm = recipes.fedavg(setting)
    with pytest.raises(UnfitError, match="winograd is for convolutions of step 1"):
        last(run(algorithm, federation, 1, backend=winograd(loop)))
    with pytest.raises(InputError, match="winograd"):
        backend_of("winogard")


def test_networks_without_convolutions_are_refused(setting: Setting) -> None:
    algorithm, federation = recipes.fedavg(setting), make_federation(setting.model)
    with pytest.raises(UnfitError, match="this training has none"):
        last(run(algorithm, federation, 1, backend=winograd(loop)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "size", "some"),
    [("lenet", 28, False), ("lenet", 32, False), ("lenet-moon", 32, False), ("lenet-gn", 28, True),
     ("lenet-gn", 32, False), ("lenet-gn", 64, False), ("lenet-gn-small", 28, False),
     ("resnet18-gn", 32, True), ("resnet18-projected", 32, True), ("resnet50", 32, True)],
)  # fmt: skip
def test_the_librarys_networks(
    name: Literal["lenet"], size: int, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have such convolutions, as docs/running.md says."""
    model = network(Network(name=name), (3, size, size), CLASSES, 0)
    with Winograd() as mode, torch.no_grad():
        model(*model.init(), torch.zeros(2, 3, size, size))
    assert bool(mode.computed) == some
    monkeypatch.setattr(form, "faster", lambda: True)
    with Winograd() as mode, torch.no_grad():
        model(*model.init(), torch.zeros(2, 3, size, size))
    assert bool(mode.computed) == name.startswith("resnet")


class InPlace(Deep):
    """What a convolution gives is changed where it lies."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x).relu_()
        y = self.two(x)
        y += x
        return self.head(y.relu_().mean((2, 3)))


def test_what_a_convolution_gives_may_be_changed_in_place() -> None:
    federation, setting = deep(torch.float32)
    algorithm = recipes.fedavg(replace(setting, model=build(InPlace, 1)))
    plain = last(run(algorithm, federation, 1)).server["params"]
    other = last(run(algorithm, federation, 1, backend=winograd(loop))).server["params"]
    assert 0 < max(apart(other[k], plain[k]) for k in plain) < 1e-4


@dataclass(frozen=True)
class Fails:
    """A client's work that ends after its first convolution."""

    def __call__(self, message: Parts, state: Parts, data: Any, plans: Any) -> Any:
        conv2d(data.x, torch.ones(2, 1, 3, 3))
        raise ValueError("these data cannot be used")


def test_a_client_that_fails_is_not_a_network_that_does_not_fit() -> None:
    federation, setting = deep(torch.float32)
    (reply,) = winograd(loop)(Forgiving(Fails()), [one_job(recipes.fedavg(setting), federation)])
    assert failure(reply.update) == "these data cannot be used"


@pytest.mark.parametrize("named", [loop, None], ids=["by the lever", "by the name"])
def test_the_name_is_both_levers(named: Any) -> None:
    """Bit for bit: channels lie last, and convolutions are in this form."""
    federation, setting = deep(torch.float32)
    algorithm = recipes.fedavg(setting)
    own = winograd(channels_last(loop)) if named else Way("winograd").alone()
    right = last(run(algorithm, federation, 1, backend=winograd(channels_last(loop))))
    found = last(run(algorithm, federation, 1, backend=own)).server["params"]
    assert all(torch.equal(found[k], v) for k, v in right.server["params"].items())
    for other in (winograd(loop), channels_last(loop)):
        params = last(run(algorithm, federation, 1, backend=other)).server["params"]
        assert not all(torch.equal(found[k], v) for k, v in params.items())


def test_stacked_clients_are_refused() -> None:
    federation, setting = deep(torch.float32)
    with pytest.raises(InputError, match="clients cannot be stacked"):
        last(run(recipes.fedavg(setting), federation, 1, backend=winograd(Stacked())))
