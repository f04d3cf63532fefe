"""FEDSHIFT_PLAIN=1: documented parts of torch alone give the same results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import vmap

from fedshift.kernels import torch_private
from fedshift.kernels.torch_private import EARLIER, SWITCH, plain, supported

HERE = Path(__file__).parents[1]
SetPlain = Callable[[bool], None]


def python(*arguments: str, **variables: str) -> str:
    """The output of a new process, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


# Of the contract, what compares numbers of training: the rest is of order, files and names, which
# do not know how a product is computed.
PLAIN = "not contract or centralised or padded or twice"


@pytest.mark.slow
def test_the_laws_hold_without_shortcuts() -> None:
    """And so do the contract and the promises of dense training: every case, whatever its marks."""
    names = "laws contract stateless slopes dense"
    files = [str(next(HERE.rglob(f"test_{name}.py"))) for name in names.split()]
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-k", PLAIN, "-x")
    made = python(*options, "-m", "slow or not slow", *files, FEDSHIFT_PLAIN="1")
    (cases,) = re.findall(r"^collected (\d+) items", made, re.M)
    (chosen,) = re.findall(r" / (\d+) selected", made)
    assert 350 < int(chosen) < int(cases)
    assert re.findall(r"(\d+) passed", made.splitlines()[-1]) == [chosen]


CODE = """
import torch
from torch import nn
del nn.modules.module._has_any_global_hook, nn.modules.dropout._DropoutNd
del nn.modules.batchnorm._BatchNorm, torch._C._functorch.is_functorch_wrapped_tensor
from fedshift.algorithms.fedavg import FedAvg
from fedshift.data import client_data, register
from fedshift.engine.run import Federation, run
from fedshift.model import Model
from fedshift.seeds import Seeds
net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
model = Model(net)
torch.manual_seed(0)
clients = [client_data(torch.randn(8, 4), torch.arange(8) % 3, i) for i in range(3)]
federation = Federation(clients, *model.init(), register(clients, 3), Seeds.of(0))
*_, last = run(FedAvg(model), federation, 2)
print("done", sum(v.isfinite().all().item() for v in last.server["params"].values()))
"""


@pytest.mark.slow
def test_a_torch_without_its_private_names_is_enough() -> None:
    assert python("-c", CODE) == "done 4\n"


TRIED = (
    "run_backward", "linear_pointwise", "log_softmax_backward", "threshold_backward",
    "max_pool_backward",
)  # fmt: skip
OTHER_ARGUMENTS = """
import torch
def other(*, only_by_name): raise AssertionError
for space, name in (("mkldnn", "_linear_pointwise"), ("aten", "_log_softmax_backward_data"),
                    ("aten", "threshold_backward"), ("aten", "max_pool2d_with_indices_backward")):
    setattr(getattr(torch.ops, space), name, type("Operator", (), {"default": other}))
"""


@pytest.mark.slow
def test_a_torch_whose_private_names_take_other_arguments_is_enough() -> None:
    from_here = "from fedshift.kernels import torch_private as private\n"
    look_up = f"print(any(map(private.supported, {TRIED[1:]})))\nfrom torch import nn\n"
    train = CODE[CODE.index("from fedshift.algorithms") :]
    assert python("-c", OTHER_ARGUMENTS + from_here + look_up + train) == "False\ndone 4\n"


def test_names_are_found_wherever_they_are_first_needed(set_plain: SetPlain) -> None:
    """Each is called once before it is used, and the result must not depend on the context."""

    def all_supported() -> bool:
        set_plain(False)
        return all(map(supported, TRIED))

    inside = list[bool]()
    vmap(lambda v: (inside.append(all_supported()), v)[1])(torch.ones(2))
    for block in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with block:
            inside.append(all_supported())
    torch.set_default_dtype(torch.float64)
    try:
        inside.append(all_supported())
    finally:
        torch.set_default_dtype(torch.float32)
    assert inside == [True] * 5


def test_every_name_is_there_and_goes_by_the_switch(set_plain: SetPlain) -> None:
    set_plain(False)
    assert all(map(supported, torch_private._NAMES))
    set_plain(True)
    assert not any(map(supported, torch_private._NAMES))


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_switches_turn_all_off(
    name: str, monkeypatch: pytest.MonkeyPatch, set_plain: SetPlain
) -> None:
    monkeypatch.setenv(f"FEDSHIFT_{name}", "0")
    set_plain(False)
    assert plain()
    assert os.environ[SWITCH] == "0"


def test_fallbacks_give_the_same_numbers(set_plain: SetPlain) -> None:
    torch.manual_seed(0)
    z, given = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    log, out = z.log_softmax(1), z.relu()
    images = torch.randn(2, 3, 6, 7)
    pooled, place = nn.functional.max_pool2d(images, 2, return_indices=True)
    back = torch.randn(pooled.shape)
    x, w = torch.randn(7, 4), torch.randn(5, 4)

    def numbers() -> list[torch.Tensor]:
        return [
            torch_private.log_softmax_backward(given, log, 1),
            torch_private.relu_backward(given, out),
            torch_private.max_pool_backward(back, images, place),
            torch_private.onednn_linear(x, w),
        ]

    set_plain(False)
    private = numbers()
    set_plain(True)
    for one, other in zip(private, numbers(), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(private[1], given)


@pytest.mark.parametrize("off", [False, True], ids=["private", "public"])
def test_what_tensors_and_modules_are(set_plain: SetPlain, off: bool) -> None:
    set_plain(off)
    inside = list[bool]()

    def note(v: torch.Tensor) -> torch.Tensor:
        inside.append(torch_private.within_vmap(v))
        return v

    x = torch.ones(2, 3)
    vmap(note)(x)
    for v in (x, x.to("meta"), x.to_sparse(), nn.Parameter(x)):
        note(v)
    assert inside == [True, False, False, False, False]
    assert torch_private.is_dropout(nn.Dropout2d())
    assert torch_private.is_batch_norm(nn.BatchNorm1d(2))
    assert not torch_private.is_batch_norm(nn.GroupNorm(1, 2))
    assert not torch_private.is_dropout(nn.ReLU())
    module = nn.ReLU()
    assert not torch_private.has_hooks(module)
    module.register_forward_hook(lambda *_: None)
    assert torch_private.has_hooks(module)


FRESH = """
import torch
from fedshift.randomness import states
before = states()
from fedshift import FedAvg, Federation, Model, run
from fedshift.data import client_data, register
from fedshift.engine.stacking.stacked import Stacked
from fedshift.seeds import Seeds
from torch import nn
source = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
assert before.moved(states()) == {"torch"}  # the layers' first weights: the control
before, model = states(), Model(net)
x, y = torch.rand(8, 4, generator=source), torch.arange(8) % 3
clients = [client_data(x, y, i) for i in range(3)]
federation = Federation(clients, *model.init(), register(clients, 3), Seeds.of(0))
for trained_by in (None, Stacked(), Stacked(dense=True)):
    list(run(FedAvg(model), federation, 2, **({"backend": trained_by} if trained_by else {})))
print("moved", sorted(before.moved(states())))
"""


@pytest.mark.slow
def test_a_new_process_keeps_its_state() -> None:
    """Also where a private name is looked up for the first time."""
    assert "moved []" in python("-c", FRESH)
