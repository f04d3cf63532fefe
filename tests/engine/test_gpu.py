"""Training on a CUDA GPU: the loop's numbers up to rounding, and equal bits for equal seeds.

`test_device` says what can be said without one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.client.local import Local
from fedshift.engine.backends import Backend, loop
from fedshift.engine.device import on
from fedshift.engine.run import Round, run
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import UnfitError
from fedshift.kernels.elsewhere import outputs_on
from fedshift.randomness import states
from fedshift.recipes import Setting
from fedshift.tree import Parts, flatten
from support.drawing import dropout, federated, leaky, numpy_noise, torch_noise, unforeseen
from support.every_method import MAKE, ROUNDS
from support.federations import TARGET, make_federation
from support.rounds import different, everything, last
from support.routing import routed_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOML = """
name = "gpu"
[data]
name = "gaussians"
[shift]
kind = "natural"
clients = 2
[model]
name = "mlp"
[method]
name = "fedavg"
[training]
rounds = 2
lr = 0.1
"""
WITHIN = {"loop": lambda: loop, "stacked": Stacked}


def played(name: str, seed: int = 0, backend: Backend = loop) -> Round:
    # FedDecorr divides by a feature's deviation over the batch. Of four examples it may be next to
    # nothing, and then a change of 1e-7 in the first weights is one of 6 % after these rounds.
    batch = 8 if name.startswith("feddecorr") else 4
    setting = Setting(routed_model(), TARGET, Local(lr=0.1, batch=batch))
    federation = make_federation(setting.model, seed=seed)
    return last(run(MAKE[name](setting), federation, ROUNDS, backend=backend))


def relative_difference(a: Parts, b: Parts) -> float:
    """The largest difference of two states, relative to the largest number of its tensor."""
    one, two = flatten(a), flatten(b)
    assert one.keys() == two.keys()
    pairs = ((v.double(), two[k].double()) for k, v in one.items() if v.numel())
    return max(float((v - w).abs().max() / v.abs().max().clamp(min=1.0)) for v, w in pairs)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("name", sorted(MAKE))
def test_every_method_gives_the_loops_result(name: str, within: str) -> None:
    alone = played(name)
    try:
        there = played(name, backend=on("cuda", WITHIN[within]()))
    except UnfitError:
        assert within == "stacked"
        return
    assert there.trained == alone.trained
    assert relative_difference(everything(alone), everything(there)) < 1e-3
    assert (
        relative_difference(everything(alone), everything(played(name, seed=1))) > 1e-3
    )  # the control


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_models_are_evaluated_there_with_the_processors_outputs(name: str) -> None:
    """A round's model on both devices; the control: the model before it."""
    server, model = played(name).server, routed_model()
    x = make_federation(model).clients[0].x
    with torch.no_grad():
        here, first = (model(*pair, x) for pair in ((server["params"], {}), model.init()))
        with outputs_on("cuda"):
            outs = model(server["params"], {}, x)
    assert {v.device.type for v in outs.values()} == {"cpu"}
    assert relative_difference({"out": here}, {"out": outs}) < 1e-3
    assert relative_difference({"out": here}, {"out": first}) > 1e-3


@pytest.mark.parametrize("name", ["fedavg", "fedpals", "scaffold", "moon"])
def test_equal_seeds_give_equal_bits(name: str) -> None:
    backend = on("cuda", loop)
    assert not different(played(name, backend=backend), played(name, backend=on("cuda", loop)))
    assert different(played(name, backend=backend), played(name, seed=1, backend=backend))


@pytest.mark.parametrize(
    "between", [dropout, leaky, torch_noise, numpy_noise, unforeseen], ids=lambda f: f.__name__
)
def test_draws_on_the_gpu_are_part_of_the_run(between: Any) -> None:
    torch.rand(1, device="cuda")
    before, backend = states(), on("cuda", loop)
    rounds = list(run(*federated(between), 3, backend=backend))
    assert not before.moved(states())
    torch.rand(5, device="cuda")
    again = list(run(*federated(between), 3, backend=backend))
    resumed = last(run(*federated(between), 3, backend=backend, after=rounds[0]))
    assert not different(rounds[-1], again[-1])
    assert not different(rounds[-1], resumed)
    other = last(run(*federated(between, 1), 3, backend=backend))
    quiet = last(run(*federated(lambda net, h: h), 3, backend=backend))
    assert different(rounds[-1], other)
    assert different(rounds[-1], quiet)  # what is drawn does matter


def test_networks_that_draw_are_refused_where_clients_are_stacked() -> None:
    with pytest.raises(UnfitError, match="random"):
        last(run(*federated(dropout), 2, backend=on("cuda", Stacked())))


def test_workers_that_torch_lets_train_nothing_are_refused() -> None:
    """They were forked after a gradient; the control: workers forked earlier train."""
    command = (
        "from support.federations import CLASSES, FEATURES, TARGET, make_federation\n"
        "from fedshift import recipes, run\n"
        "from fedshift.client.local import Local\n"
        "from fedshift.model import build\n"
        "from fedshift.models.dense import Mlp\n"
        "from fedshift.recipes import Setting\n"
        "from fedshift.engine.processes.pool import workers\n"
        "model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)\n"
        "federation = make_federation(model)\n"
        "algorithm = recipes.fedavg(Setting(model, TARGET, Local(lr=0.1, batch=8)))\n"
        "for _ in range(2):\n"
        "    with workers(federation.clients, 2) as team:\n"
        "        print(len(list(run(algorithm, federation, 1, backend=team))), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1\n"
    assert "UnfitError: workers cannot train: this process took gradients" in done.stderr


@pytest.mark.parametrize("options", [["--workers", "2"], ["--backend", "dense", "--workers", "2"]])
def test_the_command_trains_by_workers(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TOML)
    command = [sys.executable, "-m", "fedshift", "run", str(file), "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
